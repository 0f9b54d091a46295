// Many tensors into one buffer: copy, scale and cast in one launch. One block a tile.
//
// Bytes: each source byte is read once, each byte of the buffer written once, and 32 bytes of table are read for each tile.
#include "convert.cuh"

extern "C" __global__ void __launch_bounds__(kThreads) flatten(ADDRESSES, const Tile* tiles, double scale, void* out) {
    const Tile tile = tiles[blockIdx.x];
    const int64 address = ADDRESS_OF(tile.tensor);
    if (address == kOther) return;
    const SOURCE* source = reinterpret_cast<const SOURCE*>(address) + tile.first;
    RESULT* target = static_cast<RESULT*>(out) + tile.place;
    const Compute factor = to<Compute>(scale);
    const uint32 valid = address == kAbsent ? 0 : tile.valid;
    const auto nothing = [](RESULT) {};
    if (valid == kTile && aligned(source) && aligned(target)) {
        convert_whole(source, target, factor, nothing);
    } else {
        convert_part(source, target, valid, ACCUMULATE ? valid : tile.written, factor, nothing);
    }
}

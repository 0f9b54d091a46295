// One buffer into many tensors: copy, scale and cast in one launch; with NORM also each tile's norm of what was written. One block a tile.
//
// Bytes: each covered byte of the buffer is read once, each byte of the tensors written once; with NORM 16 bytes a tile besides.
#include "convert.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(kThreads)
    unflatten(ADDRESSES, const Tile* tiles, double scale, const void* flat, Partial* partials) {
    const Tile tile = tiles[blockIdx.x];
    const int64 address = ADDRESS_OF(tile.tensor);
    if (address == kAbsent || address == kOther) return;
    const SOURCE* source = static_cast<const SOURCE*>(flat) + tile.place;
    RESULT* target = reinterpret_cast<RESULT*>(address) + tile.first;
    const Compute factor = to<Compute>(scale);
#if NORM
    Norm<ComputeType<RESULT, RESULT>::type> norm;
    const auto visit = [&norm](RESULT number) { norm.add(widen(number)); };
#else
    const auto visit = [](RESULT) {};
#endif
    if (tile.valid == kTile && aligned(source) && aligned(target)) {
        convert_whole(source, target, factor, visit);
    } else {
        convert_part(source, target, tile.valid, tile.valid, factor, visit);
    }
#if NORM
    norm.reduce(partials + blockIdx.x);
#else
    static_cast<void>(partials);
#endif
}

// 8-bit codes with a scale per 256 elements into many tensors. One block a tile.
//
// Macros: RESULT: the tensors' type. CODE: Int8, Float8E4M3 or Float8E5M2. ACCUMULATE: adds to what is there.
#include "quantise.cuh"

using Wide = ComputeType<RESULT, RESULT>::type;

__device__ inline RESULT decoded(uint8 code, float unit, Wide factor, const RESULT* before) {
    Wide value = product(to<Wide>(product(decode(code), unit)), factor);
#if ACCUMULATE
    value = sum(to<Wide>(widen(*before)), value);
#endif
    RESULT result;
    narrow(value, result);
    return result;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    dequantise(ADDRESSES, const Tile* tiles, double scale, const uint8* codes, const float* scales) {
    const Tile tile = tiles[blockIdx.x];
    const int64 address = ADDRESS_OF(tile.tensor);
    if (address == kAbsent || address == kOther) return;
    RESULT* target = reinterpret_cast<RESULT*>(address) + tile.first;
    const Wide factor = to<Wide>(scale);
    if (tile.valid == kTile && aligned(target)) {
        constexpr int width = 16 / static_cast<int>(sizeof(RESULT)) < 4 ? 4 : 16 / static_cast<int>(sizeof(RESULT));
#pragma unroll
        for (int step = 0; step < kElementsPerThread / width; ++step) {
            const uint32 i = (step * kThreads + threadIdx.x) * width;
            Vector<Bits8, width> loaded;
            load(reinterpret_cast<const Bits8*>(codes) + tile.place + i, loaded);
            const float unit = scales[(tile.place + i) / kBlock];
            Vector<RESULT, width> result;
#if ACCUMULATE
            load(target + i, result);
#endif
#pragma unroll
            for (int j = 0; j < width; ++j) result.numbers[j] = decoded(loaded.numbers[j].value, unit, factor, &result.numbers[j]);
            store(target + i, result);
        }
    } else {
        for (uint32 i = threadIdx.x; i < tile.valid; i += kThreads) {
            target[i] = decoded(codes[tile.place + i], scales[(tile.place + i) / kBlock], factor, target + i);
        }
    }
}

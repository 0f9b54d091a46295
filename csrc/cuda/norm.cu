// Sum of squares and number of non-finite values of a buffer's tensors: one block a tile, then one block over the tiles.
//
// Bytes: each covered byte of the buffer is read once. No atomic operations: two runs give the same bits.
#include "norm.cuh"

using Value = ComputeType<SOURCE, SOURCE>::type;

extern "C" __global__ void __launch_bounds__(kThreads) norm_tiles(const Tile* tiles, const void* flat, Partial* partials) {
    const Tile tile = tiles[blockIdx.x];
    const SOURCE* source = static_cast<const SOURCE*>(flat) + tile.place;
    Norm<Value> norm;
    if (tile.valid == kTile && aligned(source)) {
        constexpr int width = 16 / static_cast<int>(sizeof(SOURCE));
        constexpr int steps = kElementsPerThread / width;
        Vector<SOURCE, width> loaded[steps];
#pragma unroll
        for (int step = 0; step < steps; ++step) load(source + (step * kThreads + threadIdx.x) * width, loaded[step]);
#pragma unroll
        for (int step = 0; step < steps; ++step) {
#pragma unroll
            for (int i = 0; i < width; ++i) norm.add(widen(loaded[step].numbers[i]));
        }
    } else {
        for (uint32 i = threadIdx.x; i < tile.valid; i += kThreads) norm.add(widen(source[i]));
    }
    norm.reduce(partials + blockIdx.x);
}

// One block. statistics: sum of squares, number of non-finite values.
extern "C" __global__ void __launch_bounds__(kThreads) sum_partials(const Partial* partials, int64 count, double* statistics) {
    __shared__ Partial sums[kThreads];
    Partial sum{0, 0};
    for (int64 i = threadIdx.x; i < count; i += kThreads) {
        sum.sum_of_squares += partials[i].sum_of_squares;
        sum.nonfinite += partials[i].nonfinite;
    }
    sums[threadIdx.x] = sum;
    for (uint32 distance = kThreads / 2; distance > 0; distance /= 2) {
        __syncthreads();
        if (threadIdx.x < distance) {
            sums[threadIdx.x].sum_of_squares += sums[threadIdx.x + distance].sum_of_squares;
            sums[threadIdx.x].nonfinite += sums[threadIdx.x + distance].nonfinite;
        }
    }
    if (threadIdx.x == 0) {
        statistics[0] = sums[0].sum_of_squares;
        statistics[1] = sums[0].nonfinite;
    }
}

// Sum of squares and number of non-finite values over a block's threads, in a fixed order.
#pragma once

#include "tiles.cuh"

struct Partial {
    double sum_of_squares;
    double nonfinite;
};

template <class C>
struct Norm {
    C squares = 0;
    uint32 nonfinite = 0;

    __device__ void add(C value) {
        squares = sum(squares, product(value, value));
        nonfinite += difference(value, value) == C(0) ? 0u : 1u;
    }

    // Called by every thread of the block; `out` is written by one.
    __device__ void reduce(Partial* out) const {
        __shared__ C sums[kThreads];
        __shared__ uint32 counts[kThreads];
        sums[threadIdx.x] = squares;
        counts[threadIdx.x] = nonfinite;
        for (uint32 distance = kThreads / 2; distance > 0; distance /= 2) {
            __syncthreads();
            if (threadIdx.x < distance) {
                sums[threadIdx.x] = sum(sums[threadIdx.x], sums[threadIdx.x + distance]);
                counts[threadIdx.x] += counts[threadIdx.x + distance];
            }
        }
        if (threadIdx.x == 0) *out = Partial{to<double>(sums[0]), static_cast<double>(counts[0])};
    }
};

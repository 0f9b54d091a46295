// Moves one tile from an array of SOURCE to one of RESULT: copy, scale and cast.
//
// Macros: SOURCE, RESULT: types of numbers.cuh. COPY: bits are moved as they are. ACCUMULATE: the product is added to what is there.
#pragma once

#include "tiles.cuh"

using Compute = ComputeType<SOURCE, RESULT>::type;

__device__ inline RESULT convert(SOURCE source, Compute factor, const RESULT* before) {
#if COPY
    return source;
#else
    Compute value = product(to<Compute>(widen(source)), factor);
#if ACCUMULATE
    value = sum(to<Compute>(widen(*before)), value);
#endif
    RESULT result;
    narrow(value, result);
    return result;
#endif
}

// A whole tile, both sides aligned to 16 bytes. Every load is issued before the first store, which might alias it for all that the compiler
// knows. `visit` sees each number as it was stored.
template <class Visit>
__device__ inline void convert_whole(const SOURCE* source, RESULT* target, Compute factor, Visit visit) {
    constexpr int width = 16 / static_cast<int>(sizeof(SOURCE) < sizeof(RESULT) ? sizeof(SOURCE) : sizeof(RESULT));
    constexpr int steps = kElementsPerThread / width;
    Vector<SOURCE, width> loaded[steps];
#pragma unroll
    for (int step = 0; step < steps; ++step) load(source + (step * kThreads + threadIdx.x) * width, loaded[step]);
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        RESULT* const place = target + (step * kThreads + threadIdx.x) * width;
        Vector<RESULT, width> result;
#if ACCUMULATE
        load(place, result);
#endif
#pragma unroll
        for (int i = 0; i < width; ++i) {
            result.numbers[i] = convert(loaded[step].numbers[i], factor, &result.numbers[i]);
            visit(result.numbers[i]);
        }
        store(place, result);
    }
}

// Any tile: `valid` numbers, then zeros up to `written`.
template <class Visit>
__device__ inline void convert_part(const SOURCE* source, RESULT* target, uint32 valid, uint32 written, Compute factor, Visit visit) {
    for (uint32 i = threadIdx.x; i < valid; i += kThreads) {
        const RESULT result = convert(source[i], factor, target + i);
        target[i] = result;
        visit(result);
    }
    for (uint32 i = valid + threadIdx.x; i < written; i += kThreads) target[i] = RESULT{};
}

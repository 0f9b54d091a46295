// A block's piece of work, the tensors' addresses, and 128-bit accesses.
//
// POINTERS: how many addresses travel as a kernel argument (at most 480 in 4 KB, 4,000 in 32 KB); 0: they lie in device memory.
#pragma once

#include "numbers.cuh"

constexpr int kThreads = 256;
constexpr int kTile = 4096;  // elements
constexpr int kElementsPerThread = kTile / kThreads;

// A row of kernels/tiles.py's table.
struct Tile {
    int64 tensor;
    int64 first;     // element of the tensor
    int64 place;     // element of the buffer
    uint32 valid;    // elements of the tensor
    uint32 written;  // elements of the buffer: more where a gap follows
};

constexpr int64 kAbsent = 0;  // the tensor is not there: its place becomes zero
constexpr int64 kOther = -1;  // another launch, for another dtype, sees to it

#if POINTERS > 0
struct Addresses {
    int64 address[POINTERS];
};
#define ADDRESSES const __grid_constant__ Addresses addresses
#define ADDRESS_OF(tensor) addresses.address[tensor]
#else
#define ADDRESSES const int64* addresses
#define ADDRESS_OF(tensor) addresses[tensor]
#endif

// Tells the compiler that a pointer, which comes from a table, leads to global memory.
__device__ inline void assume_global(const void* pointer) {
#if defined(__CUDA_ARCH__)
    __builtin_assume(__isGlobal(pointer));
#else
    static_cast<void>(pointer);
#endif
}

__device__ inline bool aligned(const void* pointer) { return reinterpret_cast<uint64>(pointer) % 16 == 0; }

// `count` numbers by the fewest accesses of up to 128 bits.
template <class T, int count>
struct alignas(sizeof(T) * count < 16 ? sizeof(T) * count : 16) Vector {
    T numbers[count];
};

// Reads and writes a vector as the hardware's own type, which makes it one instruction for each 16 bytes.
template <class T, int count>
__device__ inline void load(const T* from, Vector<T, count>& to) {
    assume_global(from);
    constexpr int bytes = sizeof(T) * count;
    if constexpr (bytes >= 16) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) reinterpret_cast<uint4*>(&to)[i] = reinterpret_cast<const uint4*>(from)[i];
    } else if constexpr (bytes == 8) {
        *reinterpret_cast<uint2*>(&to) = *reinterpret_cast<const uint2*>(from);
    } else {
        static_assert(bytes == 4, "a vector has 4, 8 or a multiple of 16 bytes");
        *reinterpret_cast<uint32*>(&to) = *reinterpret_cast<const uint32*>(from);
    }
}

template <class T, int count>
__device__ inline void store(T* to, const Vector<T, count>& from) {
    assume_global(to);
    constexpr int bytes = sizeof(T) * count;
    if constexpr (bytes >= 16) {
#pragma unroll
        for (int i = 0; i < bytes / 16; ++i) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(&from)[i];
    } else if constexpr (bytes == 8) {
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(&from);
    } else {
        static_assert(bytes == 4, "a vector has 4, 8 or a multiple of 16 bytes");
        *reinterpret_cast<uint32*>(to) = *reinterpret_cast<const uint32*>(&from);
    }
}

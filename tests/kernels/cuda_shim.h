// Lets a .cu file of csrc/cuda compile as host C++: every thread of a block is a fiber, and a barrier switches to the next one.
#pragma once

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define __global__
#define __device__
#define __grid_constant__
#define __launch_bounds__(threads)
#define __shared__ static  // one block runs at a time

struct Index {
    unsigned x;
};
inline Index threadIdx, blockIdx;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};

inline unsigned __float_as_uint(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}
inline float __uint_as_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
inline float __fdiv_rn(float a, float b) { return a / b; }

// One block at a time; its threads take turns. A thread that has ended counts as arrived at every later barrier, as on the device.
struct Fiber {
    ucontext_t context;
    char* stack;
    bool ended;
};

constexpr unsigned kShimThreads = 256;
constexpr size_t kStackBytes = 64 << 10;

inline Fiber fibers[kShimThreads];
inline ucontext_t scheduler;
inline void (*current_kernel)(const void*);
inline const void* current_arguments;

inline void __syncthreads() { swapcontext(&fibers[threadIdx.x].context, &scheduler); }

inline void enter_fiber() {
    current_kernel(current_arguments);
    fibers[threadIdx.x].ended = true;
    setcontext(&scheduler);
}

inline void run_block(unsigned block) {
    for (Fiber& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = kStackBytes;
        fiber.context.uc_link = nullptr;
        fiber.ended = false;
        makecontext(&fiber.context, enter_fiber, 0);
    }
    for (bool running = true; running;) {  // each round: every thread up to its next barrier
        running = false;
        for (unsigned thread = 0; thread < kShimThreads; ++thread) {
            if (fibers[thread].ended) continue;
            blockIdx.x = block;
            threadIdx.x = thread;
            swapcontext(&scheduler, &fibers[thread].context);
            running = running || !fibers[thread].ended;
        }
    }
}

template <class Kernel>
void run_grid(int64_t blocks, const Kernel& kernel) {
    current_kernel = [](const void* arguments) { (*static_cast<const Kernel*>(arguments))(); };
    current_arguments = &kernel;
    for (Fiber& fiber : fibers) fiber.stack = static_cast<char*>(malloc(kStackBytes));
    for (int64_t block = 0; block < blocks; ++block) run_block(static_cast<unsigned>(block));
    for (Fiber& fiber : fibers) free(fiber.stack);
}

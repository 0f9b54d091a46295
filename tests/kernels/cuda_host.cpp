// Entry points for tests: each kernel of csrc/cuda, run by cuda_shim.h on the host. Macros: FILE_OF_KERNEL, KERNEL_<NAME>, and the kernel's
// own.
#include "cuda_shim.h"

#include FILE_OF_KERNEL

#if POINTERS > 0
#define TAKE_ADDRESSES   \
    Addresses addresses; \
    memcpy(&addresses, raw_addresses, sizeof(addresses))
#else
#define TAKE_ADDRESSES const int64* addresses = static_cast<const int64*>(raw_addresses)
#endif

extern "C" {

#if defined(KERNEL_flatten)
void entry(int64_t blocks, const void* raw_addresses, const Tile* tiles, double scale, void* out) {
    TAKE_ADDRESSES;
    run_grid(blocks, [&] { flatten(addresses, tiles, scale, out); });
}
#elif defined(KERNEL_unflatten)
void entry(int64_t blocks, const void* raw_addresses, const Tile* tiles, double scale, const void* flat, Partial* partials) {
    TAKE_ADDRESSES;
    run_grid(blocks, [&] { unflatten(addresses, tiles, scale, flat, partials); });
}
#elif defined(KERNEL_norm_tiles)
void entry(int64_t blocks, const Tile* tiles, const void* flat, Partial* partials) {
    run_grid(blocks, [&] { norm_tiles(tiles, flat, partials); });
}
#elif defined(KERNEL_sum_partials)
void entry(int64_t blocks, const Partial* partials, int64_t count, double* statistics) {
    run_grid(blocks, [&] { sum_partials(partials, count, statistics); });
}
#elif defined(KERNEL_quantise)
void entry(int64_t blocks, const void* raw_addresses, const Tile* tiles, double scale, float* residual, uint8* codes, float* scales) {
    TAKE_ADDRESSES;
    run_grid(blocks, [&] { quantise(addresses, tiles, scale, residual, codes, scales); });
}
#elif defined(KERNEL_dequantise)
void entry(int64_t blocks, const void* raw_addresses, const Tile* tiles, double scale, const uint8* codes, const float* scales) {
    TAKE_ADDRESSES;
    run_grid(blocks, [&] { dequantise(addresses, tiles, scale, codes, scales); });
}
#endif
}

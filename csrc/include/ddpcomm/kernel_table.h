// The innermost loops, once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ddpcomm/dtype.h"
#include "ddpcomm/isa.h"

namespace ddpcomm {

// to[i] = To(C(from[i]) * C(scale)), where C is double if either type is, else float. Rounds to nearest, ties to even; results narrower
// than float are rounded from float, as torch does; float8_e4m3 saturates. Neither pointer needs to be aligned. `to` may be the very same
// array as `from` if the types are. Accumulating: to[i] = To(C(to[i]) + C(from[i]) * C(scale)).
using ConvertFunction = void (*)(const void* from, void* to, std::size_t count, double scale);

// Copies with stores that bypass the caches: for results too big to be found there again.
using StreamFunction = void (*)(const void* from, void* to, std::size_t bytes);

struct Norm {
    double sum_of_squares;
    std::int64_t nonfinite;  // infinities and not-a-numbers
};

// Of at most kNormTile elements. Sixteen running sums, in float (double for float64): element i goes to sum i % 16, and they are added in
// pairs at distance 8, 4, 2, 1. So every instruction set, and the reference in torch, gives the same bits.
using NormFunction = Norm (*)(const void* values, std::size_t count);
inline constexpr std::size_t kNormTile = 4096;

enum class Code { kInt8, kFloat8E4M3, kFloat8E5M2 };
inline constexpr int kCodes = 3;
inline constexpr std::size_t kQuantisedBlock = 256;  // elements that share one scale

// One block of kQuantisedBlock floats. quantise writes codes and scale, and leaves in `values` what was lost. See quantise.h.
using QuantiseFunction = void (*)(float* values, std::uint8_t* codes, float* scale);
using DequantiseFunction = void (*)(const std::uint8_t* codes, float scale, float* values);

struct KernelTable {
    ConvertFunction convert[kFloatTypes][kFloatTypes];  // [from][to]
    ConvertFunction streamed[kWideTypes][kWideTypes];   // results bypass the caches
    ConvertFunction accumulate[kWideTypes][kWideTypes];
    StreamFunction stream;
    NormFunction norm[kWideTypes];
    QuantiseFunction quantise[kCodes];
    DequantiseFunction dequantise[kCodes];
};

const KernelTable& kernel_table(Isa isa);

// What kernel_table chooses from. Only those of the instruction sets that the compiler targets are defined.
const KernelTable& kernel_table_baseline();
const KernelTable& kernel_table_avx2();
const KernelTable& kernel_table_avx512();

}  // namespace ddpcomm

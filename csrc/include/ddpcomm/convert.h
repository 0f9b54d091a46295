// Conversion of arrays between floating-point types, with a scale, in each instruction set.
#pragma once

#include <cstddef>

#include "ddpcomm/dtype.h"
#include "ddpcomm/isa.h"

namespace ddpcomm {

// to[i] = To(C(from[i]) * C(scale)), where C is double if either type is, else float. Rounds to nearest, ties to even; 16-bit results are
// rounded from float, as torch does. Neither pointer needs to be aligned. `to` may be the very same array as `from` if the types are.
using ConvertFunction = void (*)(const void* from, void* to, std::size_t count, double scale);

// Copies with stores that bypass the caches: for results too big to be found there again.
using StreamFunction = void (*)(const void* from, void* to, std::size_t bytes);

inline constexpr int kFloatTypes = 4;  // in the order of float_type_index

struct ConvertTable {
    ConvertFunction convert[kFloatTypes][kFloatTypes];  // [from][to]
    StreamFunction stream;
};

const ConvertTable& convert_table(Isa isa);

// 0 to 3 for float32, float64, bfloat16, float16; -1 for any other type.
constexpr int float_type_index(Dtype dtype) {
    if (dtype == kFloat32) return 0;
    if (dtype == kFloat64) return 1;
    if (dtype == kBFloat16) return 2;
    if (dtype == kFloat16) return 3;
    return -1;
}

}  // namespace ddpcomm

// Element-wise reduction of several arrays into several arrays, in each instruction set.
#pragma once

#include <cstddef>

#include "ddpcomm/dtype.h"
#include "ddpcomm/isa.h"

namespace ddpcomm {

enum class ReduceOp : std::uint8_t { kSum, kAvg, kMax };

// What one pass reads and writes. All arrays have `count` elements of one type; none needs to be aligned. A target may be the very same
// array as a source, but not overlap one in any other way.
struct ReducePass {
    const void* const* sources;
    int source_count;
    void* const* targets;
    int target_count;
    std::size_t count;
    double scale;  // each source is multiplied by it before it is added; ignored by the maximum and by integers
};

// Sources are added from first to last, so that everybody who reduces the same arrays gets the same bits. 16-bit floats are accumulated
// in float and rounded once, to nearest, ties to even. The maximum of anything and NaN is NaN. Integers wrap around.
//
// Results are written with plain stores: where a target is a source too its lines have just been read, so that stores which bypass the
// caches save no reading. They were slower at every size from 64 KiB to 128 MiB (see docs/transports.md).
using ReduceFunction = void (*)(const ReducePass&);

// nullptr where the type can't be reduced that way. kAvg is kSum with a scale: it is up to the caller to set it.
ReduceFunction reduce_function(Dtype dtype, ReduceOp op, Isa isa);

}  // namespace ddpcomm

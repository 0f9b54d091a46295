// Where each tensor lies in a flat buffer.
#pragma once

#include <cstdint>
#include <vector>

#include "ddpcomm/dtype.h"
#include "ddpcomm/isa.h"

namespace ddpcomm {

struct Layout {
    std::vector<std::int64_t> numels;   // elements of each tensor
    std::vector<std::int64_t> offsets;  // each tensor's first element in the buffer; ascending, ranges do not overlap
    std::int64_t total_numel;           // elements of the buffer
    Dtype dtype;                        // of the buffer

    std::size_t count() const { return numels.size(); }

    // Throws std::invalid_argument, naming the first tensor that is out of order or outside the buffer.
    void check() const;
};

// A tensor's memory: `numel` elements one after another, in memory order. `data` null: there is no tensor.
struct Piece {
    void* data;
    Dtype dtype;
};

// Elements [begin, end) of a flat buffer.
struct Stretch {
    std::int64_t begin = 0, end = 0;
};

struct Execution {
    int threads;  // at most; small work is done by one
    Isa isa;
};

}  // namespace ddpcomm

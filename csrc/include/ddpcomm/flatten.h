// Many tensors into one buffer: copy, scale and cast in one pass.
#pragma once

#include <cstdint>
#include <vector>

#include "ddpcomm/layout.h"

namespace ddpcomm {

// Elements [begin, end) of the buffer, as far as tensors of the buffer's own type and of at least so many bytes have them: they stay in
// those tensors, for whoever reads them there. To keep track of a small tensor costs more than its copy.
struct Skipped {
    std::int64_t begin = 0, end = 0;
    std::int64_t least_bytes = 0;
};

// out[offsets[i] + j] = pieces[i][j] * scale, cast to the layout's type; whatever no piece covers becomes zero. Accumulating, the product
// is added to what is there, and the rest is left as it is. A piece may lie exactly at its own place in `out`; it must not overlap it in
// any other way. Every pair of types must be one that Copier supports.
// Moves: every source byte is read once, every byte of `out` is written once (accumulating: the covered ones read once and written once).
//
// What `skipped` names is left as it is in `out`.
void flatten(const Layout& layout, const Piece* pieces, void* out, double scale, bool accumulate, Execution execution,
             const Skipped& skipped = {});

// Elements [first, first + count) of the buffer, as they lie in a tensor.
struct Skip {
    std::size_t tensor;
    std::int64_t first, count;
    const char* data;
};

// What a flatten with `skipped` does not copy, by place in the buffer.
std::vector<Skip> skips(const Layout& layout, const Piece* pieces, const void* out, const Skipped& skipped);

}  // namespace ddpcomm

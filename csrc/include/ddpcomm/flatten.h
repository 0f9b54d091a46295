// Many tensors into one buffer: copy, scale and cast in one pass.
#pragma once

#include "ddpcomm/layout.h"

namespace ddpcomm {

// out[offsets[i] + j] = pieces[i][j] * scale, cast to the layout's type; whatever no piece covers becomes zero. Accumulating, the product
// is added to what is there, and the rest is left as it is. A piece may lie exactly at its own place in `out`; it must not overlap it in
// any other way. Every pair of types must be one that Copier supports.
// Moves: every source byte is read once, every byte of `out` is written once (accumulating: the covered ones read once and written once).
void flatten(const Layout& layout, const Piece* pieces, void* out, double scale, bool accumulate, Execution execution);

}  // namespace ddpcomm

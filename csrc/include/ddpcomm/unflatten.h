// One buffer into many tensors: copy, scale and cast in one pass.
#pragma once

#include "ddpcomm/kernel_table.h"
#include "ddpcomm/layout.h"

namespace ddpcomm {

// pieces[i][j] = flat[offsets[i] + j] * scale, cast to the piece's type. Entries without a tensor are skipped. The same rules as for
// flatten hold for overlap and types.
void unflatten(const Layout& layout, const void* flat, const Piece* pieces, double scale, Execution execution);

// The same, and the norm of what was written, taken while it is still in the first-level cache. See norm.h for the order of summation.
Norm unflatten_with_norm(const Layout& layout, const void* flat, const Piece* pieces, double scale, Execution execution);

}  // namespace ddpcomm

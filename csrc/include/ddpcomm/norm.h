// Sum of squares and count of non-finite values of the tensors of a buffer, the same bits whatever the number of threads.
#pragma once

#include <cstdint>
#include <functional>

#include "ddpcomm/kernel_table.h"
#include "ddpcomm/layout.h"

namespace ddpcomm {

// Each tensor is cut into tiles of kNormTile elements from its own beginning; the tiles' sums (see NormFunction) are added in double, in
// order. Gaps between tensors are not read. The layout's type is one of the wide ones.
Norm norm(const Layout& layout, const void* flat, Execution execution);

// The order of summation by itself: tile(i, first, count) gives the norm of tensor i's elements [first, first + count).
Norm sum_tiles(const Layout& layout, int threads, const std::function<Norm(std::size_t, std::int64_t, std::int64_t)>& tile);

}  // namespace ddpcomm

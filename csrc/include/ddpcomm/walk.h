// Walks through the tensors that lie in one stretch of a flat buffer.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ddpcomm/layout.h"

namespace ddpcomm {

// Each thread has this much at least.
inline constexpr std::int64_t kBytesPerThread = 1 << 20;
// Parts begin at multiples of this, so that no two threads write to one cache line.
inline constexpr std::int64_t kPartBytes = 4096;
// From this size on a result is written past the caches.
inline constexpr std::int64_t kStreamBytes = 16 << 20;

// Calls visit(i, first, begin, end) for every tensor i of which elements lie in [from, to) of the buffer: its elements from `first` on are
// the buffer's [begin, end).
template <class Visit>
void walk(const Layout& layout, std::int64_t from, std::int64_t to, Visit visit) {
    const auto& offsets = layout.offsets;
    auto next = std::upper_bound(offsets.begin(), offsets.end(), from);
    if (next != offsets.begin()) --next;
    for (auto i = static_cast<std::size_t>(next - offsets.begin()); i < layout.count() && offsets[i] < to; ++i) {
        const std::int64_t begin = std::max(offsets[i], from);
        const std::int64_t end = std::min(offsets[i] + layout.numels[i], to);
        if (begin < end) visit(i, begin - offsets[i], begin, end);
    }
}

}  // namespace ddpcomm

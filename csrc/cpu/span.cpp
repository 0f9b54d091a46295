#include "ddpcomm/span.h"

#include <algorithm>

namespace ddpcomm {

Span span_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape, const std::int64_t* strides) {
    std::int64_t numel = 1, last = 0;
    for (std::int32_t i = 0; i < ndim; ++i) {
        if (shape[i] == 0) return {};
        numel *= shape[i];
        if (shape[i] > 1) last += (shape[i] - 1) * strides[i];
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return {begin, begin + static_cast<std::uintptr_t>((last + 1) * element_bytes), numel > last + 1};
}

std::vector<std::size_t> overlapping(const std::vector<Span>& spans) {
    struct Entry {
        Span span;
        std::size_t position;
    };
    std::vector<Entry> entries;
    std::vector<std::size_t> found;
    entries.reserve(spans.size());
    for (std::size_t i = 0; i < spans.size(); ++i) {
        if (spans[i].shares_places) found.push_back(i);
        if (!spans[i].empty()) entries.push_back({spans[i], i});
    }
    std::sort(entries.begin(), entries.end(), [](const Entry& one, const Entry& other) { return one.span.begin < other.span.begin; });
    std::size_t furthest = 0;  // the entry so far that ends last
    for (std::size_t i = 1; i < entries.size(); ++i) {
        if (entries[i].span.meets(entries[furthest].span)) {
            found.push_back(entries[furthest].position);
            found.push_back(entries[i].position);
        }
        if (entries[i].span.end > entries[furthest].span.end) furthest = i;
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

}  // namespace ddpcomm

#include "ddpcomm/span.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace ddpcomm {

Span span_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape, const std::int64_t* strides) {
    std::int64_t numel = 1, last = 0;
    for (std::int32_t i = 0; i < ndim; ++i) {
        if (shape[i] == 0) return {};
        numel *= shape[i];
        if (shape[i] > 1) last += (shape[i] - 1) * strides[i];
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    return {begin, begin + static_cast<std::uintptr_t>((last + 1) * element_bytes), numel == last + 1};
}

std::vector<Span> runs_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape,
                          const std::int64_t* strides) {
    constexpr std::int64_t kMostRuns = 1 << 20;
    std::vector<std::pair<std::int64_t, std::int64_t>> dimensions;  // (stride, size), the smallest stride first
    for (std::int32_t i = 0; i < ndim; ++i) {
        if (shape[i] == 0) return {};
        if (shape[i] > 1) dimensions.push_back({strides[i], shape[i]});
    }
    std::sort(dimensions.begin(), dimensions.end());
    std::int64_t run = 1;  // elements that lie side by side
    std::size_t first = 0;
    while (first < dimensions.size() && dimensions[first].first == run) run *= dimensions[first++].second;
    std::int64_t count = 1;
    for (std::size_t i = first; i < dimensions.size(); ++i) {
        if (dimensions[i].second > kMostRuns / count) return {};
        count *= dimensions[i].second;
    }
    std::vector<Span> runs;
    for (std::int64_t index = 0; index < count; ++index) {
        std::int64_t rest = index, offset = 0;
        for (std::size_t i = first; i < dimensions.size(); ++i) {
            offset += rest % dimensions[i].second * dimensions[i].first;
            rest /= dimensions[i].second;
        }
        const auto begin = reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(offset * element_bytes);
        runs.push_back({begin, begin + static_cast<std::uintptr_t>(run * element_bytes)});
    }
    return runs;
}

std::vector<std::size_t> may_overlap(const std::vector<Span>& spans) {
    std::vector<Run> runs;
    std::vector<std::size_t> found;
    runs.reserve(spans.size());
    for (std::size_t i = 0; i < spans.size(); ++i) {
        if (!spans[i].dense) found.push_back(i);
        if (!spans[i].empty()) runs.push_back({spans[i], i});
    }
    const std::vector<std::size_t> meeting = overlapping(std::move(runs));
    std::vector<std::size_t> all;
    std::set_union(found.begin(), found.end(), meeting.begin(), meeting.end(), std::back_inserter(all));
    return all;
}

std::vector<std::size_t> overlapping(std::vector<Run> runs) {
    std::sort(runs.begin(), runs.end(), [](const Run& one, const Run& other) { return one.span.begin < other.span.begin; });
    std::vector<std::size_t> found;
    std::size_t furthest = 0;  // the one so far that ends last
    for (std::size_t i = 1; i < runs.size(); ++i) {
        if (runs[i].span.meets(runs[furthest].span)) {
            found.push_back(runs[furthest].position);
            found.push_back(runs[i].position);
        }
        if (runs[i].span.end > runs[furthest].span.end) furthest = i;
    }
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
}

}  // namespace ddpcomm

// Stretches of memory, and which of them have bytes in common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ddpcomm {

// The bytes from `begin` to `end`, exclusive. Empty where nothing is known, or there is nothing.
struct Span {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    bool shares_places = false;  // several elements lie in one place

    bool empty() const { return begin == end; }
    bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
    bool within(const Span& other) const { return other.begin <= begin && end <= other.end; }
};

// Of a tensor's elements. Strides are not negative.
Span span_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape, const std::int64_t* strides);

// The positions of those that meet another one, or whose elements share places, in ascending order. About 20 ns for each span.
std::vector<std::size_t> overlapping(const std::vector<Span>& spans);

}  // namespace ddpcomm

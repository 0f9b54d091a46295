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
    bool dense = true;  // every byte is an element's, and no other's of the same tensor

    bool empty() const { return begin == end; }
    bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
    bool within(const Span& other) const { return other.begin <= begin && end <= other.end; }
};

// Of a tensor's elements. Strides are not negative.
Span span_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape, const std::int64_t* strides);

// The stretches that a tensor's elements fill, without the gaps between them. Nothing if there are more than a million.
std::vector<Span> runs_of(const void* data, std::int64_t element_bytes, std::int32_t ndim, const std::int64_t* shape,
                          const std::int64_t* strides);

// The positions of those that meet another one, or are not dense, in ascending order. About 20 ns for each span.
std::vector<std::size_t> may_overlap(const std::vector<Span>& spans);

// A stretch of the tensor at some position.
struct Run {
    Span span;
    std::size_t position;
};

// The positions of the tensors that have bytes in common with another one's runs, or more than once with their own, in ascending order.
std::vector<std::size_t> overlapping(std::vector<Run> runs);

}  // namespace ddpcomm

// What a segment says of itself in its first bytes, and what is checked of a segment that came from elsewhere before it is used.
//
// Everything here is a pure function over bytes and numbers, none of which is trusted: tests/native/fuzz_segment.cpp feeds them garbage.
#pragma once

#include <sys/types.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "ddpcomm/shared_memory_control.h"

namespace ddpcomm {

// Chosen at random by the maker of a segment and told to its peers on the way by which the file comes: so that a segment of another run,
// or one that was put in its place, is not taken for it.
using SegmentToken = std::array<std::uint8_t, 16>;

struct SegmentHeader {
    std::array<char, 8> magic;
    std::uint32_t version;
    std::uint32_t channels;
    std::uint64_t header_bytes;
    std::uint64_t control_bytes;  // of one channel
    std::uint64_t capacity;
    SegmentToken token;
};

// Control blocks begin here, after the header.
inline constexpr std::size_t kHeaderBytes = 4096;
static_assert(sizeof(SegmentHeader) <= kHeaderBytes && kHeaderBytes % alignof(ControlBlock) == 0);

// Bytes at the start of every segment that the header and the control blocks take.
inline constexpr std::size_t kReservedBytes = kHeaderBytes + kChannels * sizeof(ControlBlock);

// The most that a segment may have: half of a process's address space on the smallest 64-bit machines.
inline constexpr std::uint64_t kLargestCapacity = std::uint64_t{1} << 46;

// What the kernel says of a segment's file.
struct SegmentFile {
    mode_t mode;  // type and permissions, as in struct stat
    uid_t owner;
    std::int64_t bytes;
    int seals;  // negative where the file can't have any
};

SegmentHeader make_header(std::uint64_t capacity, const SegmentToken& token);

// Each returns what is wrong, in words; empty where nothing is.
std::string check_capacity(std::uint64_t capacity);
std::string check_file(const SegmentFile& file, std::uint64_t capacity, uid_t user);
std::string check_header(const void* bytes, std::size_t length, std::uint64_t capacity, const SegmentToken& token);

// Whether the data that a peer's descriptor speaks of lies in a segment of `capacity` bytes, behind the control blocks. `numel` elements of
// `item_bytes` bytes, `rows` times; staged data is there in buffers of `buffer_bytes`, of which `buffers` are used.
struct DataRange {
    std::uint64_t numel;
    std::uint64_t item_bytes;
    std::uint64_t rows;
    bool staged;
    std::uint64_t buffer_bytes;
    std::size_t buffers;
};
bool lies_within(const DataRange& range, const std::array<std::uint64_t, kStagingBuffers>& offsets, std::uint64_t capacity);

}  // namespace ddpcomm

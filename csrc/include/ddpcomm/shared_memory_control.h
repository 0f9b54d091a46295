// What the ranks tell each other: the first bytes of every rank's segment. Each rank writes its own block only, but for the bell.
#pragma once

#include <array>
#include <atomic>
#include <bitset>
#include <cstddef>
#include <cstdint>

#include "ddpcomm/dtype.h"
#include "ddpcomm/shared_memory_reduce.h"

namespace ddpcomm {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kCallsInFlight = 256;  // more calls than this wait for the oldest to end
inline constexpr std::size_t kStagingBuffers = 2;   // per call: one is filled while the other is read
inline constexpr std::size_t kChannels = 2;
inline constexpr std::size_t kMostRanks = 256;

using RankSet = std::bitset<kMostRanks>;

enum class CollectiveKind : std::uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

// A call of one rank. The ranks compare these before any of them touches data.
struct alignas(kCacheLine) Descriptor {
    std::atomic<std::uint64_t> number;  // of the call, from 1; stored last, so that whoever finds it finds the rest
    std::uint64_t numel;                // elements of one rank's part
    std::uint64_t tag;
    std::int32_t source;
    CollectiveKind kind;
    ReduceOp op;
    Dtype dtype;
    // Not compared: where this rank's data lies in its segment. Staged data is there in pieces, by turns in one buffer and the other.
    bool staged;
    bool elsewhere;  // not all of it: this rank's own share may be in other memory, where only this rank reads it
    std::array<std::uint64_t, kStagingBuffers> offsets;
};

// How far a rank has got: call number * kPieces + pieces of that call. A larger mark is always a later one.
using Mark = std::uint64_t;
inline constexpr Mark kPieces = Mark{1} << 24;

enum class RankState : std::uint32_t { kOpen, kFailed, kClosed };
enum class FailureKind : std::uint32_t { kNone, kMismatch, kTimeout, kPeerLost, kPeerClosed, kClosed, kOther };

inline constexpr std::size_t kMessageBytes = 2048;

// Why a rank gave up, for the others to read.
struct Failure {
    FailureKind kind;
    RankSet ranks;  // those that were missing or lost
    char message[kMessageBytes];
};

struct ControlBlock {
    alignas(kCacheLine) std::atomic<Mark> published;      // pieces of staged data that the others may read
    alignas(kCacheLine) std::atomic<Mark> consumed;       // pieces that this rank has read from everybody, and reduced into everybody's
    alignas(kCacheLine) std::atomic<std::uint32_t> bell;  // a futex: changes when somebody has news for this rank, if it sleeps
    std::atomic<std::uint32_t> sleepers;                  // threads of this rank that sleep
    alignas(kCacheLine) std::atomic<RankState> state;
    Failure failure;                                                   // valid once state is kFailed
    alignas(kCacheLine) std::array<Descriptor, kCallsInFlight> calls;  // by number % kCallsInFlight
};

static_assert(sizeof(Descriptor) == kCacheLine, "one cache line travels from rank to rank for a call");
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free,
              "atomics that need a lock don't work between processes");

}  // namespace ddpcomm

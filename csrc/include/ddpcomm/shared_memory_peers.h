// The ranks of a host as one of them sees the others: their segments, their control blocks, whether they live, and how to wait for them.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "ddpcomm/shared_memory_control.h"
#include "ddpcomm/shared_memory_segment.h"

namespace ddpcomm {

using Clock = std::chrono::steady_clock;

// What a rank needs of each other rank.
struct Peer {
    std::shared_ptr<Segment> segment;  // of this rank itself: its own
    int name;                          // its number in error messages, where that is not its place among the ranks of the host
    std::vector<int> watched;          // files that become readable, or hang up, when the peer's process ends; empty for this rank itself
};

class Peers {
  public:
    // `channel` picks one of kChannels control blocks, so that as many sequences of calls can share the segments.
    Peers(int rank, std::vector<Peer> peers, std::size_t channel);

    int rank() const { return rank_; }
    int name(int rank) const { return peers_[static_cast<std::size_t>(rank)].name; }
    int count() const { return static_cast<int>(peers_.size()); }
    char* memory(int rank) const { return peers_[static_cast<std::size_t>(rank)].segment->data(); }
    ControlBlock& control(int rank) const { return *controls_[static_cast<std::size_t>(rank)]; }
    ControlBlock& own() const { return control(rank_); }
    std::size_t capacity(int rank) const { return peers_[static_cast<std::size_t>(rank)].segment->capacity(); }
    const Segment& own_segment() const { return *peers_[static_cast<std::size_t>(rank_)].segment; }

    // Wakes every peer that sleeps. Call it after each change that a peer may wait for.
    void ring() const;

    // A thread sleeps in three steps, so that no bell is missed: prepare, look whether there is news, then sleep or cancel.
    std::uint32_t prepare_sleep() const;
    void sleep(std::uint32_t bell, Clock::duration limit) const;
    void cancel_sleep() const;

    // Whether the process of a peer has ended, also when nobody has waited for it yet (a zombie).
    bool has_ended(int rank) const;

  private:
    int rank_;
    std::vector<Peer> peers_;
    std::vector<ControlBlock*> controls_;
};

}  // namespace ddpcomm

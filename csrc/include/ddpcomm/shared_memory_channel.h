// A sequence of collective calls among the ranks of a host.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "ddpcomm/shared_memory_call.h"
#include "ddpcomm/shared_memory_spin.h"

namespace ddpcomm {

struct ChannelSettings {
    CallSettings call;
    std::chrono::nanoseconds longest_spin;
};

// How long a wait may take. `until` only interrupts it; passing the deadline, `total` after the wait began, fails the channel.
struct TimeLimit {
    Clock::time_point deadline;
    Clock::time_point until;
    Clock::duration total;
};

// Thread-safe. No thread of its own: calls make progress in every function below, whichever call it was asked about. After a failure
// nothing more is done and everything reports that failure.
class Channel {
  public:
    Channel(std::shared_ptr<Arena> arena, Peers peers, const ChannelSettings& settings);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // The call's number, or 0 if it was not started: see `failed`, or wait_for_room and try again. Never blocks.
    std::uint64_t start(const CallArguments& arguments, std::vector<Elsewhere> elsewhere = {});
    // Whether every other rank has called what this rank is going to call next, and nothing is to be done before it: then `start` does it,
    // and has read all of this rank's own share when it returns.
    bool others_have_called();
    // See Call::own_share.
    Stretch own_share(std::uint64_t numel, Dtype dtype) const { return Call::own_share(numel, dtype, settings_.call, peers_); }

    enum class Outcome { kDone, kFailed, kInterrupted };
    // Until the call is finished.
    Outcome wait(std::uint64_t number, const TimeLimit& limit);
    // Until another call can be started.
    Outcome wait_for_room(const TimeLimit& limit);

    // Does what can be done now. Costs a few nanoseconds where no call is under way.
    void progress();
    bool is_finished(std::uint64_t number) const { return number <= finished_.load(std::memory_order_acquire); }
    bool is_quiet() const { return retired_.load(std::memory_order_relaxed) == last_.load(std::memory_order_relaxed); }

    bool failed() const { return failed_.load(std::memory_order_acquire); }
    Failure failure() const;

    // Fails this channel, and with it those of the peers, for a reason from outside.
    void abort(FailureKind kind, const RankSet& ranks, const std::string& message);

    // Not collective. Calls under way are given up, which the peers that need this rank are told.
    void close();

  private:
    template <class Done>
    void spin(Done done);
    std::uint64_t position();
    template <class Done>
    Outcome wait_until(Done done, const TimeLimit& limit);
    bool has_room() const { return last_ - retired_ < kCallsInFlight; }
    Call& call(std::uint64_t number) { return calls_[number % kCallsInFlight]; }

    void advance();
    bool run(Call& call);
    void take_buffers(Call& call);
    void return_buffers(Call& call);
    std::vector<std::uint64_t>& spare_buffers(std::size_t bytes) { return bytes <= settings_.call.small_bytes ? spare_small_ : spare_; }

    void fail(FailureKind kind, const RankSet& ranks, const std::string& message);
    void fail_after_timeout(const TimeLimit& limit);
    void look_for_failures();
    void look_for_the_dead();
    RankSet awaited();
    bool awaits(int rank) { return awaited()[static_cast<std::size_t>(rank)]; }

    std::shared_ptr<Arena> arena_;
    const Peers peers_;
    const ChannelSettings settings_;
    const int process_;
    mutable std::mutex mutex_;
    std::array<Call, kCallsInFlight> calls_;
    // Numbers of the last call that ... All calls up to that one have, too.
    std::atomic<std::uint64_t> last_{0};              // was started
    std::uint64_t run_ = 0;                           // has consumed everything
    std::atomic<std::uint64_t> finished_{0};          // is done as far as its caller is concerned
    std::atomic<std::uint64_t> retired_{0};           // nobody needs any more
    std::vector<std::uint64_t> spare_, spare_small_;  // staging buffers, offsets in the segment
    std::atomic<bool> failed_{false};
    Clock::time_point looked_for_the_dead_;
    SpinBudget spin_;
};

}  // namespace ddpcomm

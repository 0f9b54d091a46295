#if defined(__linux__)

#include "ddpcomm/shared_memory_channel.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <system_error>

#include "ddpcomm/shared_memory_describe.h"

namespace ddpcomm {
namespace {

constexpr auto kLongestSleep = std::chrono::milliseconds(100);
constexpr auto kLookForTheDead = std::chrono::milliseconds(100);

void pause_briefly() {
    for (int i = 0; i < 8; ++i) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
}

}  // namespace

Channel::Channel(std::shared_ptr<Arena> arena, Peers peers, const ChannelSettings& settings)
    : arena_(std::move(arena)), peers_(std::move(peers)), settings_(settings), process_(getpid()), spin_(settings.longest_spin) {}

Channel::~Channel() { close(); }

std::uint64_t Channel::start(const CallArguments& arguments, std::vector<Elsewhere> elsewhere) {
    const std::lock_guard<std::mutex> lock(mutex_);
    advance();
    if (failed() || !has_room()) return 0;
    const std::uint64_t number = last_ + 1;
    Call& next = call(number);
    next = Call(number, arguments, settings_.call, peers_, std::move(elsewhere));
    try {
        take_buffers(next);
    } catch (const std::system_error& error) {
        fail(FailureKind::kOther, {},
             "rank " + std::to_string(peers_.name(peers_.rank())) + " has no shared memory left for " + next.describe(peers_) + ": " +
                 error.what());
        return 0;
    }
    next.post(peers_);
    last_.store(number, std::memory_order_relaxed);
    advance();
    return number;
}

bool Channel::others_have_called() {
    const std::lock_guard<std::mutex> lock(mutex_);
    advance();
    if (failed() || run_ < last_ || !has_room()) return false;
    const std::uint64_t next = last_.load(std::memory_order_relaxed) + 1;
    for (int rank = 0; rank < peers_.count(); ++rank) {
        if (rank == peers_.rank()) continue;
        if (peers_.control(rank).calls[next % kCallsInFlight].number.load(std::memory_order_acquire) != next) return false;
    }
    return true;
}

void Channel::progress() {
    if (is_quiet()) return;
    const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
    if (lock.owns_lock()) advance();
}

void Channel::advance() {
    if (failed()) return;
    while (run_ < last_ && run(call(run_ + 1))) ++run_;
    while (finished_ < run_) {
        Call& next = call(finished_ + 1);
        if (next.needs_everyone() && !next.retire(peers_)) break;
        finished_.store(finished_ + 1, std::memory_order_release);
    }
    while (retired_ < finished_ && call(retired_ + 1).retire(peers_)) {
        return_buffers(call(retired_ + 1));
        retired_.store(retired_ + 1, std::memory_order_relaxed);
    }
}

bool Channel::run(Call& call) {
    if (!call.planned()) {
        if (!call.all_posted(peers_)) return false;
        if (!call.matches(peers_)) {
            fail(FailureKind::kMismatch, {},
                 "call " + std::to_string(call.number()) +
                     ": the ranks made different calls at the same place: " + call.describe_all(peers_));
            return false;
        }
        if (call.lacks_elements(peers_)) {
            fail(FailureKind::kMismatch, {},
                 "call " + std::to_string(call.number()) + ", " + call.describe(peers_) +
                     ": a rank's tensor is in its shared memory only in part, while another's is outside of its own");
            return false;
        }
        const RankSet astray = call.out_of_bounds(peers_);
        if (astray.any()) {
            fail(FailureKind::kOther, astray,
                 call.describe(peers_) + ": " + describe_ranks(astray, peers_) +
                     " told of data outside of the shared memory, which has been tampered with or written over");
            return false;
        }
        look_for_failures();  // a rank that has given up may no longer expect its data to be written
        if (failed()) return false;
        call.plan(peers_);
    }
    return call.advance(peers_);
}

void Channel::take_buffers(Call& call) {
    const bool small = call.buffer_bytes() <= settings_.call.small_bytes;
    const std::size_t widest_element = static_cast<std::size_t>(peers_.count()) * 16;  // a row a rank, of complex128
    const std::size_t bytes = small ? settings_.call.small_bytes : std::max(settings_.call.piece_bytes, widest_element);
    std::vector<std::uint64_t>& spare = spare_buffers(call.buffer_bytes());
    for (int i = 0; i < call.buffers_needed(); ++i) {
        if (spare.empty()) spare.push_back(arena_->allocate(bytes));
        call.buffers()[static_cast<std::size_t>(i)] = spare.back();
        spare.pop_back();
    }
}

void Channel::return_buffers(Call& call) {
    std::vector<std::uint64_t>& spare = spare_buffers(call.buffer_bytes());
    for (int i = 0; i < call.buffers_needed(); ++i) spare.push_back(call.buffers()[static_cast<std::size_t>(i)]);
}

// Looks for news for a while; longer as long as there are some.
template <class Done>
void Channel::spin(Done done) {
    advance();
    if (done() || failed()) return;
    const SpinBudget::Duration budget = spin_.next();
    Clock::time_point end = Clock::now() + budget;
    bool news = false;
    for (std::uint64_t before = position(); Clock::now() < end;) {
        pause_briefly();
        advance();
        if (position() != before) {
            before = position();
            end = Clock::now() + budget;
            news = true;
        }
        if (done() || failed()) break;
    }
    news ? spin_.found_news() : spin_.found_nothing();
}

// Changes with every step that is taken.
std::uint64_t Channel::position() {
    std::uint64_t steps = run_ + finished_ + retired_;
    if (run_ < last_) steps += call(run_ + 1).steps();
    if (finished_ < run_) steps += call(finished_ + 1).steps();
    return steps;
}

template <class Done>
Channel::Outcome Channel::wait_until(Done done, const TimeLimit& limit) {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        spin(done);
        if (done()) return Outcome::kDone;
        if (failed()) return Outcome::kFailed;
        const Clock::time_point now = Clock::now();
        if (now >= limit.deadline) {
            fail_after_timeout(limit);
            return Outcome::kFailed;
        }
        if (now >= limit.until) return Outcome::kInterrupted;
        const std::uint32_t bell = peers_.prepare_sleep();
        advance();
        if (!done() && !failed()) look_for_failures();
        if (!done() && !failed()) look_for_the_dead();
        if (done() || failed()) {
            peers_.cancel_sleep();
            continue;
        }
        lock.unlock();
        peers_.sleep(bell, std::min<Clock::duration>({kLongestSleep, limit.deadline - now, limit.until - now}));
        lock.lock();
    }
}

Channel::Outcome Channel::wait(std::uint64_t number, const TimeLimit& limit) {
    if (is_finished(number)) return Outcome::kDone;
    return wait_until([this, number] { return is_finished(number); }, limit);
}

Channel::Outcome Channel::wait_for_room(const TimeLimit& limit) {
    return wait_until([this] { return has_room(); }, limit);
}

// Ranks that the oldest unfinished call waits for.
RankSet Channel::awaited() {
    if (run_ == last_ && finished_ == run_ && retired_ == run_) return {};
    Call& oldest = call(run_ < last_ ? run_ + 1 : (finished_ < run_ ? finished_ : retired_) + 1);
    RankSet ranks = oldest.planned() ? oldest.unfinished(peers_) : oldest.missing(peers_);
    return ranks.reset(static_cast<std::size_t>(peers_.rank()));
}

void Channel::look_for_failures() {
    for (int rank = 0; rank < peers_.count() && !failed(); ++rank) {
        if (rank == peers_.rank()) continue;
        const ControlBlock& control = peers_.control(rank);
        const RankState state = control.state.load(std::memory_order_acquire);
        if (state == RankState::kFailed) {
            // The other rank's words, which may lack their end.
            fail(control.failure.kind, control.failure.ranks,
                 std::string(control.failure.message, strnlen(control.failure.message, kMessageBytes)));
        } else if (state == RankState::kClosed && awaits(rank)) {
            // Read after the state: what the rank did before it closed is seen.
            fail(FailureKind::kPeerClosed, RankSet().set(static_cast<std::size_t>(rank)),
                 "rank " + std::to_string(peers_.name(rank)) + " has closed its communicator, but rank " +
                     std::to_string(peers_.name(peers_.rank())) + " waits for it in " +
                     call(run_ < last_ ? run_ + 1 : finished_ + 1).describe(peers_));
        }
    }
}

void Channel::look_for_the_dead() {
    const Clock::time_point now = Clock::now();
    if (now - looked_for_the_dead_ < kLookForTheDead) return;
    looked_for_the_dead_ = now;
    for (int rank = 0; rank < peers_.count() && !failed(); ++rank) {
        if (rank == peers_.rank() || !peers_.has_ended(rank)) continue;
        advance();  // with what it did before it died
        if (!awaits(rank)) continue;
        fail(FailureKind::kPeerLost, RankSet().set(static_cast<std::size_t>(rank)),
             "rank " + std::to_string(peers_.name(rank)) + " has died; rank " + std::to_string(peers_.name(peers_.rank())) +
                 " found this in " + call(run_ < last_ ? run_ + 1 : finished_ + 1).describe(peers_));
    }
}

void Channel::fail_after_timeout(const TimeLimit& limit) {
    const RankSet ranks = awaited();
    Call& oldest = call(run_ < last_ ? run_ + 1 : finished_ + 1);
    std::ostringstream text;
    text << oldest.describe(peers_) << ", call " << oldest.number() << ", did not end within "
         << std::chrono::duration<double>(limit.total).count() << " s on rank " << peers_.name(peers_.rank()) << ": "
         << describe_ranks(ranks, peers_) << (oldest.planned() ? " called it but did not do their part" : " did not call it");
    fail(FailureKind::kTimeout, ranks, text.str());
}

void Channel::fail(FailureKind kind, const RankSet& ranks, const std::string& message) {
    if (failed()) return;
    arena_->freeze();
    ControlBlock& own = peers_.own();
    own.failure.kind = kind;
    own.failure.ranks = ranks;
    const std::size_t length = std::min(message.size(), kMessageBytes - 1);
    std::memcpy(own.failure.message, message.data(), length);
    own.failure.message[length] = 0;
    own.state.store(RankState::kFailed, std::memory_order_release);
    failed_.store(true, std::memory_order_release);
    peers_.ring();
}

Failure Channel::failure() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return peers_.own().failure;
}

void Channel::abort(FailureKind kind, const RankSet& ranks, const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    fail(kind, ranks, message);
}

void Channel::close() {
    if (getpid() != process_) return;  // a forked child: the channel is its parent's
    const std::lock_guard<std::mutex> lock(mutex_);
    if (failed()) return;
    if (!is_quiet()) arena_->freeze();
    Failure& failure = peers_.own().failure;
    failure.kind = FailureKind::kClosed;
    std::strncpy(failure.message, "the communicator was closed while this collective was under way", kMessageBytes - 1);
    peers_.own().state.store(RankState::kClosed, std::memory_order_release);
    failed_.store(true, std::memory_order_release);
    peers_.ring();
}

}  // namespace ddpcomm

#endif  // __linux__

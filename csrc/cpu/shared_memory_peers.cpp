#if defined(__linux__)

#include "ddpcomm/shared_memory_peers.h"

#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>
#include <ctime>

namespace ddpcomm {
namespace {

// Not the private form: the word is shared by processes.
void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t value, Clock::duration limit) {
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count();
    timespec time{};
    time.tv_sec = static_cast<time_t>(nanoseconds / 1000000000);
    time.tv_nsec = static_cast<long>(nanoseconds % 1000000000);
    syscall(SYS_futex, &word, FUTEX_WAIT, value, &time, nullptr, 0);
}

void futex_wake_all(std::atomic<std::uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

Peers::Peers(int rank, std::vector<Peer> peers, std::size_t channel) : rank_(rank), peers_(std::move(peers)) {
    for (const Peer& peer : peers_) {
        // The memory is zeros at first, which is what every field of a ControlBlock starts with.
        controls_.push_back(reinterpret_cast<ControlBlock*>(peer.segment->data() + kHeaderBytes) + channel);
    }
}

void Peers::ring() const {
    // Pairs with the fence in prepare_sleep: either the sleeper sees the change, or this sees the sleeper.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (int peer = 0; peer < count(); ++peer) {
        if (peer == rank_) continue;
        ControlBlock& control = this->control(peer);
        if (control.sleepers.load(std::memory_order_relaxed) == 0) continue;
        control.bell.fetch_add(1, std::memory_order_release);
        futex_wake_all(control.bell);
    }
}

std::uint32_t Peers::prepare_sleep() const {
    const std::uint32_t bell = own().bell.load(std::memory_order_acquire);
    own().sleepers.fetch_add(1, std::memory_order_seq_cst);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return bell;
}

void Peers::sleep(std::uint32_t bell, Clock::duration limit) const {
    futex_wait(own().bell, bell, limit);
    cancel_sleep();
}

void Peers::cancel_sleep() const { own().sleepers.fetch_sub(1, std::memory_order_relaxed); }

bool Peers::has_ended(int rank) const {
    for (const int file : peers_[static_cast<std::size_t>(rank)].watched) {
        pollfd request{file, POLLIN, 0};
        if (poll(&request, 1, 0) > 0 && (request.revents & (POLLIN | POLLHUP | POLLERR)) != 0) return true;
    }
    return false;
}

}  // namespace ddpcomm

#endif  // __linux__

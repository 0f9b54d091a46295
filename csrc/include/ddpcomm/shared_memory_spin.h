// How long a wait looks for news before it sleeps.
#pragma once

#include <algorithm>
#include <chrono>

namespace ddpcomm {

// Spinning saves the 10 to 50 us of a futex's sleep and wake-up where the other rank is running on a core of its own, and costs just what
// it lasts where that rank needs this core, or shares its own with others. Which of the two it is can't be asked, and changes; so the next
// spin may last twice as long after one that found news, a quarter as long after one that did not, and is tried at some length now and
// then in any case. Two ranks, 4 KiB, us a call, on idle and on busy cores (three times as many processes as cores): never spinning 16 and
// 42; always 20 us 6.6 and 52; always 200 us 6.3 and 637.
class SpinBudget {
  public:
    using Duration = std::chrono::nanoseconds;

    explicit SpinBudget(Duration longest) : longest_(longest), now_(longest) {}

    // For the next wait.
    Duration next() {
        constexpr int kTryEvery = 32;
        tries_ = (tries_ + 1) % kTryEvery;
        return tries_ == 0 ? std::max(now_, longest_ / 2) : now_;
    }
    void found_news() { now_ = std::min(longest_, std::max(2 * now_, longest_ / 2)); }
    void found_nothing() { now_ = now_ / 2; }

  private:
    Duration longest_;
    Duration now_;
    int tries_ = 0;
};

}  // namespace ddpcomm

// Splits work among threads that live as long as one call.
#pragma once

#include <cstdint>
#include <functional>

namespace ddpcomm {

// Calls work(begin, end) for parts that together make [0, total), each but the last a multiple of `granularity`, on at most `threads`
// threads, the caller's among them. No thread gets less than `minimum`. Threads are made for the call: no pool that a fork could break;
// starting one costs some 20 us, which `minimum` has to outweigh.
void parallel_for(std::int64_t total, std::int64_t granularity, std::int64_t minimum, int threads,
                  const std::function<void(std::int64_t, std::int64_t)>& work);

}  // namespace ddpcomm

#include "ddpcomm/parallel.h"

#include <algorithm>
#include <system_error>
#include <thread>
#include <vector>

namespace ddpcomm {

void parallel_for(std::int64_t total, std::int64_t granularity, std::int64_t minimum, int threads,
                  const std::function<void(std::int64_t, std::int64_t)>& work) {
    const std::int64_t parts = std::clamp<std::int64_t>(total / std::max<std::int64_t>(minimum, 1), 1, std::max(threads, 1));
    if (parts == 1) {
        work(0, total);
        return;
    }
    const std::int64_t part = (total / parts + granularity - 1) / granularity * granularity;
    std::vector<std::thread> others;
    others.reserve(static_cast<std::size_t>(parts));
    std::int64_t begin = part;  // the first part is the caller's own
    try {
        for (; begin < total; begin += part) {
            const std::int64_t end = std::min(begin + part, total);
            others.emplace_back([&work, begin, end] { work(begin, end); });
        }
    } catch (const std::system_error&) {
        // The system gives no more threads: the caller does what is left.
    }
    work(0, std::min(part, total));
    if (begin < total) work(begin, total);
    for (std::thread& other : others) other.join();
}

}  // namespace ddpcomm

// Words for error messages.
#pragma once

#include <cstdint>
#include <string>

namespace ddpcomm {

// "rank 3" or "ranks 0, 2" for a set of one bit a rank.
std::string describe_ranks(std::uint64_t ranks);

}  // namespace ddpcomm

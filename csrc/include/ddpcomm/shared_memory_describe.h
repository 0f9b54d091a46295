// Words for error messages.
#pragma once

#include <cstdint>
#include <string>

#include "ddpcomm/shared_memory_peers.h"

namespace ddpcomm {

// "rank 3" or "ranks 0, 2" for a set of one bit a rank.
std::string describe_ranks(std::uint64_t ranks, const Peers& peers);

}  // namespace ddpcomm

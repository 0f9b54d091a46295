// Words for error messages.
#pragma once

#include <cstdint>
#include <string>

#include "ddpcomm/shared_memory_peers.h"

namespace ddpcomm {

// "rank 3" or "ranks 0, 2".
std::string describe_ranks(const RankSet& ranks, const Peers& peers);

}  // namespace ddpcomm

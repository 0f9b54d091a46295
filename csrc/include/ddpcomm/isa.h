// The instruction sets that kernels are built for.
#pragma once

#include <vector>

namespace ddpcomm {

enum class Isa { kBaseline, kAvx2, kAvx512 };

// Those that this processor (and this build) can run, best first. Never empty: the baseline is plain C++.
const std::vector<Isa>& available_isas();

const char* isa_name(Isa isa);

}  // namespace ddpcomm

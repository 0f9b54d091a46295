#include "ddpcomm/isa.h"

namespace ddpcomm {

const std::vector<Isa>& available_isas() {
    static const std::vector<Isa> isas = [] {
        std::vector<Isa> found;
#if defined(__x86_64__)
        __builtin_cpu_init();
        const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("popcnt");
        const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
        if (avx512) found.push_back(Isa::kAvx512);
        if (avx2) found.push_back(Isa::kAvx2);
#endif
        found.push_back(Isa::kBaseline);
        return found;
    }();
    return isas;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kAvx512: return "avx512";
        case Isa::kAvx2: return "avx2";
        case Isa::kBaseline: break;
    }
    return "baseline";
}

}  // namespace ddpcomm

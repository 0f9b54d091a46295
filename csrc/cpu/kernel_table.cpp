#include "ddpcomm/kernel_table.h"

namespace ddpcomm {

const KernelTable& kernel_table(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return kernel_table_avx512();
    if (isa == Isa::kAvx2) return kernel_table_avx2();
#else
    static_cast<void>(isa);
#endif
    return kernel_table_baseline();
}

}  // namespace ddpcomm

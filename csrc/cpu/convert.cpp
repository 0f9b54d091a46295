#include "ddpcomm/convert.h"

#include "ddpcomm/convert_isas.h"

namespace ddpcomm {

const ConvertTable& convert_table(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return convert_table_avx512();
    if (isa == Isa::kAvx2) return convert_table_avx2();
#else
    static_cast<void>(isa);
#endif
    return convert_table_baseline();
}

}  // namespace ddpcomm

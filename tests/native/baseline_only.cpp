// In place of the reduction loops for newer processors, where what is tested is not the loops but who reads and writes when.
#include "ddpcomm/shared_memory_reduce_isas.h"

namespace ddpcomm {

const ReduceTable& reduce_table_avx2() { return reduce_table_baseline(); }
const ReduceTable& reduce_table_avx512() { return reduce_table_baseline(); }

}  // namespace ddpcomm

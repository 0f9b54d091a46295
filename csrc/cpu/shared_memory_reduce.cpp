#include "ddpcomm/shared_memory_reduce.h"

#include "ddpcomm/shared_memory_reduce_isas.h"

namespace ddpcomm {
namespace {

const ReduceTable& reduce_table(Isa isa) {
#if defined(__x86_64__)
    if (isa == Isa::kAvx512) return reduce_table_avx512();
    if (isa == Isa::kAvx2) return reduce_table_avx2();
#else
    static_cast<void>(isa);
#endif
    return reduce_table_baseline();
}

const ReducePair* find_pair(const ReduceTable& table, Dtype dtype) {
    if (dtype == kFloat32) return &table.float32;
    if (dtype == kBFloat16) return &table.bfloat16;
    if (dtype == kFloat16) return &table.float16;
    if (dtype == kFloat64) return &table.float64;
    if (dtype == kInt64) return &table.int64;
    if (dtype == kInt32) return &table.int32;
    if (dtype == kInt16) return &table.int16;
    if (dtype == kInt8) return &table.int8;
    if (dtype == kUInt8) return &table.uint8;
    return nullptr;
}

}  // namespace

ReduceFunction reduce_function(Dtype dtype, ReduceOp op, Isa isa) {
    const ReducePair* pair = find_pair(reduce_table(isa), dtype);
    if (pair == nullptr) return nullptr;
    return op == ReduceOp::kMax ? pair->max : pair->sum;
}

}  // namespace ddpcomm

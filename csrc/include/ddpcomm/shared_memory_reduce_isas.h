// What shared_memory_reduce.cpp chooses from. Only those of the instruction sets that the compiler targets are defined.
#pragma once

#include "ddpcomm/shared_memory_reduce.h"

namespace ddpcomm {

struct ReducePair {
    ReduceFunction sum;
    ReduceFunction max;
};

struct ReduceTable {
    ReducePair float64, float32, float16, bfloat16, int64, int32, int16, int8, uint8;
};

const ReduceTable& reduce_table_baseline();
const ReduceTable& reduce_table_avx2();
const ReduceTable& reduce_table_avx512();

}  // namespace ddpcomm

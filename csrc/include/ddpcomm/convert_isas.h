// What convert.cpp chooses from. Only those of the instruction sets that the compiler targets are defined.
#pragma once

#include "ddpcomm/convert.h"

namespace ddpcomm {

const ConvertTable& convert_table_baseline();
const ConvertTable& convert_table_avx2();
const ConvertTable& convert_table_avx512();

}  // namespace ddpcomm

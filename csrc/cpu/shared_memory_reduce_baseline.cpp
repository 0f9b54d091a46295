// Reduction for every processor: what the others are tested against.
#include "ddpcomm/shared_memory_reduce.h"
#include "ddpcomm/shared_memory_reduce_isas.h"

namespace ddpcomm {
namespace {
constexpr std::size_t kWidth = 16;
}
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_vectors.h"

namespace ddpcomm {
namespace {

// Half to float without a table: the exponent is moved by a multiplication, which also makes subnormal numbers right.
inline Floats widen_half(Shorts half) {
    const Words bits = __builtin_convertvector(half, Words);
    const Words sign = (bits & 0x8000) << 16;
    const Words magnitude = (bits & 0x7fff) << 13;
    const Words factor = Words{} + 0x77800000;  // 2^112
    const Words finite = (Words)((Floats)magnitude * (Floats)factor);
    const Words special = magnitude | 0x7f800000;  // infinity or not a number
    return (Floats)(sign | (magnitude >= 0x0f800000 ? special : finite));
}

inline Shorts narrow_half(Floats value) {
    const Words bits = (Words)value;
    const Words sign = (bits >> 16) & 0x8000;
    const Words magnitude = bits & 0x7fffffff;
    // Subnormal halves: adding 0.5 puts the result's last bit where float rounds.
    const Words small = (Words)((Floats)magnitude + 0.5f) - 0x3f000000;
    const Words normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    Words half = magnitude < 0x38800000 ? small : normal;
    half = magnitude >= 0x477ff000 ? Words{} + 0x7c00 : half;  // too big, even after rounding
    half = magnitude > 0x7f800000 ? 0x7e00 | ((magnitude >> 13) & 0x3ff) : half;
    return __builtin_convertvector(sign | half, Shorts);
}

inline Bytes join(Shorts low, Shorts high) {
    Bytes result;
    __builtin_memcpy(&result, &low, sizeof(low));
    __builtin_memcpy(reinterpret_cast<char*>(&result) + sizeof(low), &high, sizeof(high));
    return result;
}

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_kernel.h"

namespace ddpcomm {

const ReduceTable& reduce_table_baseline() {
    static constexpr ReduceTable table = make_reduce_table();
    return table;
}

}  // namespace ddpcomm

// Reduction for x86-64 processors with AVX2 and F16C (Haswell and later, all of AMD's Zen).
#if defined(__x86_64__)

#include <immintrin.h>

#include "ddpcomm/shared_memory_reduce.h"
#include "ddpcomm/shared_memory_reduce_isas.h"

// From here to the end of the file; nothing that other files share may be compiled below this line.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

namespace ddpcomm {
namespace {
constexpr std::size_t kWidth = 32;
}
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_vectors.h"

namespace ddpcomm {
namespace {

inline Floats widen_half(Shorts bits) { return (Floats)_mm256_cvtph_ps((__m128i)bits); }
inline Shorts narrow_half(Floats value) { return (Shorts)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Bytes join(Shorts low, Shorts high) { return (Bytes)_mm256_set_m128i((__m128i)high, (__m128i)low); }

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_kernel.h"

namespace ddpcomm {

const ReduceTable& reduce_table_avx2() {
    static constexpr ReduceTable table = make_reduce_table();
    return table;
}

}  // namespace ddpcomm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__

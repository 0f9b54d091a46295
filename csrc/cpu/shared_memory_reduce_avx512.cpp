// Reduction for x86-64 processors with AVX-512 (F, BW, VL, DQ: Skylake server and later).
#if defined(__x86_64__)

#include <immintrin.h>

#include "ddpcomm/shared_memory_reduce.h"
#include "ddpcomm/shared_memory_reduce_isas.h"

// From here to the end of the file; nothing that other files share may be compiled below this line.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c")
#endif

namespace ddpcomm {
namespace {
constexpr std::size_t kWidth = 64;
}
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_vectors.h"

namespace ddpcomm {
namespace {

// The masked forms only because gcc 12 warns about the plain ones.
inline Floats widen_half(Shorts bits) { return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)bits); }
inline Shorts narrow_half(Floats value) {
    return (Shorts)_mm512_maskz_cvtps_ph(0xffff, (__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Bytes join(Shorts low, Shorts high) { return (Bytes)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1); }

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/shared_memory_reduce_kernel.h"

namespace ddpcomm {

const ReduceTable& reduce_table_avx512() {
    static constexpr ReduceTable table = make_reduce_table();
    return table;
}

}  // namespace ddpcomm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__

// Kernels for x86-64 processors with AVX-512 (F, BW, VL, DQ: Skylake server and later).
#if defined(__x86_64__)

#if !defined(__clang__)
// GCC 12 takes the deliberately undefined operands of its own intrinsics for a mistake.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "ddpcomm/kernel_table.h"

// From here to the end of the file; nothing that other files share may be compiled below this line.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,f16c,popcnt")
#endif

#include "ddpcomm/scalar_convert.h"

namespace ddpcomm {
namespace {

template <class C>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr std::size_t width = 16;

    static __m512 fill(float value) { return _mm512_set1_ps(value); }

    static __m512 load(const float* from) { return _mm512_loadu_ps(from); }
    static __m512 load(const Float16* from) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))); }
    static __m512 load(const BFloat16* from) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    }

    template <class Float8>
    static __m512 load(const Float8* from) {
        float values[width];
        for (std::size_t i = 0; i < width; ++i) values[i] = widen(from[i]);
        return load(values);
    }

    static void store(float* to, __m512 value) { _mm512_storeu_ps(to, value); }
    static void store(Float16* to, __m512 value) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store(BFloat16* to, __m512 value) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(value)); }
    template <class Float8>
    static void store(Float8* to, __m512 value) {
        float values[width];
        store(values, value);
        for (std::size_t i = 0; i < width; ++i) narrow(values[i], to[i]);
    }

    static void store_streamed(float* to, __m512 value) { _mm512_stream_ps(to, value); }
    static void store_streamed(Float16* to, __m512 value) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store_streamed(BFloat16* to, __m512 value) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to), to_bfloat16(value)); }

    static __m512 multiply(__m512 value, __m512 factor) { return _mm512_mul_ps(value, factor); }
    static __m512 add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
    static std::int64_t count_nonfinite(__m512 value) {
        const __m512 zero_or_nan = _mm512_sub_ps(value, value);
        return __builtin_popcount(_mm512_cmp_ps_mask(zero_or_nan, zero_or_nan, _CMP_UNORD_Q));
    }

  private:
    // By integer arithmetic, although some processors have an instruction: that one turns subnormal numbers to zero.
    static __m256i to_bfloat16(__m512 value) {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i upper = _mm512_srli_epi32(bits, 16);
        const __m512i half = _mm512_add_epi32(_mm512_set1_epi32(0x7fff), _mm512_and_si512(upper, _mm512_set1_epi32(1)));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, upper, _mm512_set1_epi32(0x40)));
    }
};

template <>
struct Lanes<double> {
    static constexpr std::size_t width = 16;
    using Float = Lanes<float>;
    struct Pair {
        __m512d low, high;
    };

    static Pair fill(double value) { return {_mm512_set1_pd(value), _mm512_set1_pd(value)}; }

    static Pair load(const double* from) { return {_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)}; }
    template <class From>
    static Pair load(const From* from) {
        const __m512 value = Float::load(from);
        return {_mm512_cvtps_pd(_mm512_castps512_ps256(value)), _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1))};
    }

    static void store(double* to, Pair value) {
        _mm512_storeu_pd(to, value.low);
        _mm512_storeu_pd(to + 8, value.high);
    }
    template <class To>
    static void store(To* to, Pair value) {
        Float::store(to, to_float(value));
    }

    static void store_streamed(double* to, Pair value) {
        _mm512_stream_pd(to, value.low);
        _mm512_stream_pd(to + 8, value.high);
    }
    template <class To>
    static void store_streamed(To* to, Pair value) {
        Float::store_streamed(to, to_float(value));
    }

    static Pair multiply(Pair a, Pair b) { return {_mm512_mul_pd(a.low, b.low), _mm512_mul_pd(a.high, b.high)}; }
    static Pair add(Pair a, Pair b) { return {_mm512_add_pd(a.low, b.low), _mm512_add_pd(a.high, b.high)}; }
    static std::int64_t count_nonfinite(Pair value) { return count_nonfinite(value.low) + count_nonfinite(value.high); }

  private:
    static __m512 to_float(Pair value) {
        const __m512 low = _mm512_castps256_ps512(_mm512_cvtpd_ps(value.low));
        return _mm512_insertf32x8(low, _mm512_cvtpd_ps(value.high), 1);
    }
    static std::int64_t count_nonfinite(__m512d value) {
        const __m512d zero_or_nan = _mm512_sub_pd(value, value);
        return __builtin_popcount(_mm512_cmp_pd_mask(zero_or_nan, zero_or_nan, _CMP_UNORD_Q));
    }
};

void stream(const void* from_bytes, void* to_bytes, std::size_t bytes) {
    const char* from = static_cast<const char*>(from_bytes);
    char* to = static_cast<char*>(to_bytes);
    const std::size_t head = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
    if (bytes < head + 64) {
        __builtin_memcpy(to, from, bytes);
        return;
    }
    __builtin_memcpy(to, from, head);
    std::size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_loadu_si512(from + i));
    }
    __builtin_memcpy(to + i, from + i, bytes - i);
}

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/all_kernels.h"

namespace ddpcomm {

const KernelTable& kernel_table_avx512() {
    static constexpr KernelTable table = make_kernel_table(stream);
    return table;
}

}  // namespace ddpcomm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__

// Kernels for x86-64 processors with AVX2 and F16C.
#if defined(__x86_64__)

#include <immintrin.h>

#include "ddpcomm/kernel_table.h"

// From here to the end of the file; nothing that other files share may be compiled below this line.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,popcnt")
#endif

#include "ddpcomm/scalar_convert.h"

namespace ddpcomm {
namespace {

template <class C>
struct Lanes;

template <>
struct Lanes<float> {
    static constexpr std::size_t width = 8;

    static __m256 fill(float value) { return _mm256_set1_ps(value); }

    static __m256 load(const float* from) { return _mm256_loadu_ps(from); }
    static __m256 load(const Float16* from) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))); }
    static __m256 load(const BFloat16* from) {
        const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
    }

    template <class Float8>
    static __m256 load(const Float8* from) {
        float values[width];
        for (std::size_t i = 0; i < width; ++i) values[i] = widen(from[i]);
        return load(values);
    }

    static void store(float* to, __m256 value) { _mm256_storeu_ps(to, value); }
    static void store(Float16* to, __m256 value) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store(BFloat16* to, __m256 value) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), to_bfloat16(value)); }
    template <class Float8>
    static void store(Float8* to, __m256 value) {
        float values[width];
        store(values, value);
        for (std::size_t i = 0; i < width; ++i) narrow(values[i], to[i]);
    }

    static void store_streamed(float* to, __m256 value) { _mm256_stream_ps(to, value); }
    static void store_streamed(Float16* to, __m256 value) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
    static void store_streamed(BFloat16* to, __m256 value) { _mm_stream_si128(reinterpret_cast<__m128i*>(to), to_bfloat16(value)); }

    static __m256 multiply(__m256 value, __m256 factor) { return _mm256_mul_ps(value, factor); }
    static __m256 add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
    static std::int64_t count_nonfinite(__m256 value) {
        const __m256 zero_or_nan = _mm256_sub_ps(value, value);
        return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(zero_or_nan, zero_or_nan, _CMP_UNORD_Q))));
    }

  private:
    static __m128i to_bfloat16(__m256 value) {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i upper = _mm256_srli_epi32(bits, 16);
        const __m256i half = _mm256_add_epi32(_mm256_set1_epi32(0x7fff), _mm256_and_si256(upper, _mm256_set1_epi32(1)));
        const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
        const __m256i quiet = _mm256_or_si256(upper, _mm256_set1_epi32(0x40));
        const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        const __m256i result = _mm256_blendv_epi8(rounded, quiet, nan);
        return _mm_packus_epi32(_mm256_castsi256_si128(result), _mm256_extracti128_si256(result, 1));
    }
};

template <>
struct Lanes<double> {
    static constexpr std::size_t width = 8;
    using Float = Lanes<float>;
    struct Pair {
        __m256d low, high;
    };

    static Pair fill(double value) { return {_mm256_set1_pd(value), _mm256_set1_pd(value)}; }

    static Pair load(const double* from) { return {_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4)}; }
    template <class From>
    static Pair load(const From* from) {
        const __m256 value = Float::load(from);
        return {_mm256_cvtps_pd(_mm256_castps256_ps128(value)), _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1))};
    }

    static void store(double* to, Pair value) {
        _mm256_storeu_pd(to, value.low);
        _mm256_storeu_pd(to + 4, value.high);
    }
    template <class To>
    static void store(To* to, Pair value) {
        Float::store(to, to_float(value));
    }

    static void store_streamed(double* to, Pair value) {
        _mm256_stream_pd(to, value.low);
        _mm256_stream_pd(to + 4, value.high);
    }
    template <class To>
    static void store_streamed(To* to, Pair value) {
        Float::store_streamed(to, to_float(value));
    }

    static Pair multiply(Pair a, Pair b) { return {_mm256_mul_pd(a.low, b.low), _mm256_mul_pd(a.high, b.high)}; }
    static Pair add(Pair a, Pair b) { return {_mm256_add_pd(a.low, b.low), _mm256_add_pd(a.high, b.high)}; }
    static std::int64_t count_nonfinite(Pair value) { return count_nonfinite(value.low) + count_nonfinite(value.high); }

  private:
    static __m256 to_float(Pair value) { return _mm256_set_m128(_mm256_cvtpd_ps(value.high), _mm256_cvtpd_ps(value.low)); }
    static std::int64_t count_nonfinite(__m256d value) {
        const __m256d zero_or_nan = _mm256_sub_pd(value, value);
        return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(zero_or_nan, zero_or_nan, _CMP_UNORD_Q))));
    }
};

void stream(const void* from_bytes, void* to_bytes, std::size_t bytes) {
    const char* from = static_cast<const char*>(from_bytes);
    char* to = static_cast<char*>(to_bytes);
    const std::size_t head = (32 - reinterpret_cast<std::uintptr_t>(to) % 32) % 32;
    if (bytes < head + 64) {
        __builtin_memcpy(to, from, bytes);
        return;
    }
    __builtin_memcpy(to, from, head);
    std::size_t i = head;
    for (; i + 64 <= bytes; i += 64) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i), first);
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i + 32), second);
    }
    __builtin_memcpy(to + i, from + i, bytes - i);
}

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/all_kernels.h"

namespace ddpcomm {

const KernelTable& kernel_table_avx2() {
    static constexpr KernelTable table = make_kernel_table(stream);
    return table;
}

}  // namespace ddpcomm

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // __x86_64__

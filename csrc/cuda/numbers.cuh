// Numbers on the device: storage of each format, and conversion to and from float (double for float64), to nearest, ties to even.
//
// Compiled by NVRTC, by nvcc, and as host C++ over tests/kernels/cuda_shim.h, so it includes nothing. Kernels are chosen by macros:
// SOURCE and RESULT name two of the types below.
#pragma once

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

struct Float32 {
    float value;
};
struct Float64 {
    double value;
};
struct BFloat16 {
    uint16 bits;
};
struct Float16 {
    uint16 bits;
};
struct Float8E4M3 {
    uint8 bits;
};
struct Float8E5M2 {
    uint8 bits;
};
// Moved as they are.
struct Bits8 {
    uint8 value;
};
struct Bits16 {
    uint16 value;
};
struct Bits32 {
    uint32 value;
};
struct Bits64 {
    uint64 value;
};

// The type that a conversion between two formats calculates in.
template <class A, class B>
struct ComputeType {
    using type = float;
};
template <class B>
struct ComputeType<Float64, B> {
    using type = double;
};
template <class A>
struct ComputeType<A, Float64> {
    using type = double;
};
template <>
struct ComputeType<Float64, Float64> {
    using type = double;
};

// ---- arithmetic ----
//
// CuPy has NVRTC compile with -ftz=true, whatever it is told: float's own operators take subnormal numbers for zeros then. These don't.

#if defined(__CUDA_ARCH__)
__device__ inline float product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ inline float sum(float a, float b) {
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ inline float difference(float a, float b) {
    float result;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ inline double to_double(float value) {
    double result;
    asm("cvt.f64.f32 %0, %1;" : "=d"(result) : "f"(value));
    return result;
}
__device__ inline float to_float(double value) {
    float result;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(result) : "d"(value));
    return result;
}
#else
__device__ inline float product(float a, float b) { return a * b; }
__device__ inline float sum(float a, float b) { return a + b; }
__device__ inline float difference(float a, float b) { return a - b; }
__device__ inline double to_double(float value) { return value; }
__device__ inline float to_float(double value) { return static_cast<float>(value); }
#endif
__device__ inline double product(double a, double b) { return a * b; }
__device__ inline double sum(double a, double b) { return a + b; }
__device__ inline double difference(double a, double b) { return a - b; }

// A float or double as the other, or as it is.
template <class To, class From>
__device__ inline To to(From value) {
    if constexpr (sizeof(To) == sizeof(From)) {
        return value;
    } else if constexpr (sizeof(To) > sizeof(From)) {
        return to_double(value);
    } else {
        return to_float(value);
    }
}

// ---- to float ----

__device__ inline float widen(Float32 number) { return number.value; }
__device__ inline double widen(Float64 number) { return number.value; }
__device__ inline float widen(BFloat16 number) { return __uint_as_float(static_cast<uint32>(number.bits) << 16); }

__device__ inline float widen(Float16 number) {
#if defined(__CUDA_ARCH__)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(number.bits));
    return value;
#else
    const uint32 magnitude = (number.bits & 0x7fffu) << 13;
    const uint32 subnormal = __float_as_uint(__uint_as_float(magnitude + 0x38800000u) - __uint_as_float(0x38800000u));
    const uint32 finite = magnitude < 0x00800000u ? subnormal : magnitude + 0x38000000u;
    const uint32 special = magnitude | 0x7f800000u;
    return __uint_as_float(((number.bits & 0x8000u) << 16) | (magnitude >= 0x0f800000u ? special : finite));
#endif
}

// The upper half of a float16.
__device__ inline float widen(Float8E5M2 number) { return widen(Float16{static_cast<uint16>(number.bits << 8)}); }

__device__ inline float widen(Float8E4M3 number) {
    const uint32 magnitude = (number.bits & 0x7fu) << 20;
    const uint32 subnormal = __float_as_uint(difference(__uint_as_float(magnitude + 0x3c800000u), __uint_as_float(0x3c800000u)));
    const uint32 finite = magnitude < 0x00800000u ? subnormal : magnitude + 0x3c000000u;
    return __uint_as_float(((number.bits & 0x80u) << 24) | (magnitude == 0x07f00000u ? 0x7fc00000u : finite));
}

// ---- from float ----

__device__ inline void narrow(float value, Float32& to) { to.value = value; }
__device__ inline void narrow(float value, Float64& to) { to.value = to_double(value); }
__device__ inline void narrow(double value, Float64& to) { to.value = value; }

__device__ inline void narrow(float value, BFloat16& to) {
    const uint32 bits = __float_as_uint(value);
    const uint32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    to.bits = static_cast<uint16>((bits & 0x7fffffffu) > 0x7f800000u ? ((bits >> 16) | 0x40u) : rounded);
}

// The magnitude of a finite float in a format of fewer bits; too big ones are not yet seen to. Where the result is subnormal, adding a
// power of two puts its last bit where float rounds.
template <int exponent_bits, int mantissa_bits>
__device__ inline uint32 narrow_finite(uint32 magnitude) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    constexpr int shift = 23 - mantissa_bits;
    constexpr uint32 smallest_normal = static_cast<uint32>(127 + 1 - bias) << 23;
    constexpr uint32 rounder = static_cast<uint32>(127 + 1 - bias + shift) << 23;
    const uint32 subnormal = __float_as_uint(sum(__uint_as_float(magnitude), __uint_as_float(rounder))) - rounder;
    const uint32 rebiased = magnitude - (static_cast<uint32>(127 - bias) << 23);
    const uint32 normal = (rebiased + (1u << (shift - 1)) - 1u + ((magnitude >> shift) & 1u)) >> shift;
    return magnitude < smallest_normal ? subnormal : normal;
}

__device__ inline void narrow(float value, Float16& to) {
#if defined(__CUDA_ARCH__)
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(value));
#else
    const uint32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32 half = narrow_finite<5, 10>(magnitude);
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on: infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    to.bits = static_cast<uint16>(((bits >> 16) & 0x8000u) | half);
#endif
}

__device__ inline void narrow(float value, Float8E5M2& to) {
    const uint32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32 result = narrow_finite<5, 2>(magnitude);
    result = magnitude >= 0x47700000u ? 0x7cu : result;  // from 61440 on: infinity
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    to.bits = static_cast<uint8>(((bits >> 24) & 0x80u) | result);
}

__device__ inline void narrow(float value, Float8E4M3& to) {
    const uint32 bits = __float_as_uint(value), magnitude = bits & 0x7fffffffu;
    uint32 result = narrow_finite<4, 3>(magnitude);
    result = magnitude >= 0x43e00000u ? 0x7eu : result;  // 448 and more, infinity too: 448
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    to.bits = static_cast<uint8>(((bits >> 24) & 0x80u) | result);
}

template <class To>
__device__ inline void narrow(double value, To& to) {
    narrow(to_float(value), to);
}

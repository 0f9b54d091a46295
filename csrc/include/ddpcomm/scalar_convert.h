// Conversion of single numbers, by integer arithmetic without branches, so that compilers turn loops over them into vector code.
//
// In an unnamed namespace: each instruction set's file keeps its own copy, compiled for its own instructions.
#pragma once

#include <cstdint>

#include "ddpcomm/dtype.h"

namespace ddpcomm {
namespace {

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

// ---- to float ----

inline float widen(float value) { return value; }
inline double widen(double value) { return value; }
inline float widen(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// A subnormal half is built as 2^-14 + value, from which 2^-14 is taken off again: no step of it meets a subnormal float, which the
// processor may have been told to flush to zero.
inline float widen(Float16 half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half.bits & 0x7fffu) << 13;
    const std::uint32_t normal = magnitude + 0x38000000u;
    const std::uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000u) - float_of(0x38800000u));
    const std::uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
    const std::uint32_t special = magnitude | 0x7f800000u;  // infinity or not a number
    return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

// The same exponent as a half, and its upper bits.
inline float widen(Float8E5M2 value) { return widen(Float16{static_cast<std::uint16_t>(value.bits << 8)}); }

inline float widen(Float8E4M3 value) {
    const std::uint32_t sign = static_cast<std::uint32_t>(value.bits & 0x80u) << 24;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits & 0x7fu) << 20;
    const std::uint32_t normal = magnitude + 0x3c000000u;
    const std::uint32_t subnormal = bits_of(float_of(magnitude + 0x3c800000u) - float_of(0x3c800000u));
    const std::uint32_t number = magnitude < 0x00800000u ? subnormal : normal;
    return float_of(sign | (magnitude == 0x07f00000u ? 0x7fc00000u : number));
}

// ---- from float: to nearest, ties to even ----

inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, double& to) { to = value; }
inline void narrow(double value, double& to) { to = value; }

inline void narrow(float value, BFloat16& to) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = static_cast<std::uint16_t>(nan ? ((bits >> 16) | 0x40u) : rounded);
}

// A format with an exponent of `exponent_bits` and a mantissa of `mantissa_bits`: the magnitude of a finite float, too big ones not yet
// seen to. Where the result is subnormal, adding a power of two puts its last bit where float rounds.
template <int exponent_bits, int mantissa_bits>
inline std::uint32_t narrow_finite(std::uint32_t magnitude) {
    constexpr int bias = (1 << (exponent_bits - 1)) - 1;
    constexpr int shift = 23 - mantissa_bits;
    constexpr std::uint32_t smallest_normal = static_cast<std::uint32_t>(127 + 1 - bias) << 23;
    constexpr std::uint32_t rounder = static_cast<std::uint32_t>(127 + 1 - bias + shift) << 23;
    const std::uint32_t subnormal = bits_of(float_of(magnitude) + float_of(rounder)) - rounder;
    const std::uint32_t rebiased = magnitude - (static_cast<std::uint32_t>(127 - bias) << 23);
    const std::uint32_t normal = (rebiased + (1u << (shift - 1)) - 1u + ((magnitude >> shift) & 1u)) >> shift;
    return magnitude < smallest_normal ? subnormal : normal;
}

inline void narrow(float value, Float16& to) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    std::uint32_t half = narrow_finite<5, 10>(magnitude);
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // from 65520 on: infinity
    half = magnitude > 0x7f800000u ? 0x7e00u : half;
    to.bits = static_cast<std::uint16_t>(((bits >> 16) & 0x8000u) | half);
}

inline void narrow(float value, Float8E5M2& to) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    std::uint32_t result = narrow_finite<5, 2>(magnitude);
    result = magnitude >= 0x47700000u ? 0x7cu : result;  // from 61440 on: infinity
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    to.bits = static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | result);
}

inline void narrow(float value, Float8E4M3& to) {
    const std::uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    std::uint32_t result = narrow_finite<4, 3>(magnitude);
    result = magnitude >= 0x43e00000u ? 0x7eu : result;  // 448 and more, infinity too: 448
    result = magnitude > 0x7f800000u ? 0x7fu : result;
    to.bits = static_cast<std::uint8_t>(((bits >> 24) & 0x80u) | result);
}

template <class To>
inline void narrow(double value, To& to) {
    narrow(static_cast<float>(value), to);
}

}  // namespace
}  // namespace ddpcomm

// The 8-bit codes. Macro CODE: Int8, Float8E4M3 or Float8E5M2.
#pragma once

#include "tiles.cuh"

struct Int8 {};

constexpr uint32 kBlock = 256;  // elements that share one scale
constexpr uint32 kLanes = 16;   // threads a block of elements

// Below this scale (the smallest normal float) its reciprocal would overflow.
constexpr float kSmallestScale = 1.17549435e-38f;

template <class Code>
struct Largest;
template <>
struct Largest<Int8> {
    static constexpr float reciprocal = 1.0f / 127.0f;
};
template <>
struct Largest<Float8E4M3> {
    static constexpr float reciprocal = 1.0f / 448.0f;
};
template <>
struct Largest<Float8E5M2> {
    static constexpr float reciprocal = 1.0f / 57344.0f;
};
constexpr float kReciprocalOfLargest = Largest<CODE>::reciprocal;

template <class Code>
struct Coder {
    __device__ static uint8 encode(float value) {
        Code code;
        narrow(value, code);
        return code.bits;
    }
    __device__ static float decode(uint8 code) { return widen(Code{code}); }
};
template <>
struct Coder<Int8> {
    __device__ static uint8 encode(float value) {
        const float rounded = difference(sum(value, 12582912.0f), 12582912.0f);  // to an integer, ties to even
        const float clamped = rounded > 127.0f ? 127.0f : (rounded < -127.0f ? -127.0f : rounded);
        return static_cast<uint8>(static_cast<int>(clamped));
    }
    __device__ static float decode(uint8 code) { return static_cast<float>(static_cast<signed char>(code)); }
};

__device__ inline uint8 encode(float value) { return Coder<CODE>::encode(value); }
__device__ inline float decode(uint8 code) { return Coder<CODE>::decode(code); }

// Element types, told apart the way DLPack does: a kind and a width in bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ddpcomm {

struct Dtype {
    std::uint8_t code;
    std::uint8_t bits;

    constexpr std::size_t bytes() const { return (bits + 7u) / 8u; }
    friend constexpr bool operator==(Dtype a, Dtype b) { return a.code == b.code && a.bits == b.bits; }
    friend constexpr bool operator!=(Dtype a, Dtype b) { return !(a == b); }
};

// Codes as in DLPack's DLDataTypeCode.
inline constexpr Dtype kInt8{0, 8};
inline constexpr Dtype kInt16{0, 16};
inline constexpr Dtype kInt32{0, 32};
inline constexpr Dtype kInt64{0, 64};
inline constexpr Dtype kUInt8{1, 8};
inline constexpr Dtype kFloat32{2, 32};
inline constexpr Dtype kFloat64{2, 64};
inline constexpr Dtype kBFloat16{4, 16};
inline constexpr Dtype kFloat16{2, 16};
inline constexpr Dtype kFloat8E4M3{10, 8};  // torch.float8_e4m3fn: no infinity, largest number 448
inline constexpr Dtype kFloat8E5M2{12, 8};
inline constexpr Dtype kComplex64{5, 64};
inline constexpr Dtype kComplex128{5, 128};

// Storage of the narrow floats: only the bits; arithmetic is done in float.
struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};
struct Float8E4M3 {
    std::uint8_t bits;
};
struct Float8E5M2 {
    std::uint8_t bits;
};

// The floating-point types' places in tables: those that everything is made for, then those that only conversion knows.
inline constexpr int kWideTypes = 4;
inline constexpr int kFloatTypes = 6;

// -1 for any type that is not in the tables.
constexpr int float_index(Dtype dtype) {
    constexpr Dtype types[kFloatTypes] = {kFloat32, kFloat64, kBFloat16, kFloat16, kFloat8E4M3, kFloat8E5M2};
    for (int i = 0; i < kFloatTypes; ++i) {
        if (types[i] == dtype) return i;
    }
    return -1;
}

}  // namespace ddpcomm

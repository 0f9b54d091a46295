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
inline constexpr Dtype kFloat32{2, 32};
inline constexpr Dtype kFloat64{2, 64};
inline constexpr Dtype kFloat16{2, 16};
inline constexpr Dtype kBFloat16{4, 16};
inline constexpr Dtype kInt8{0, 8};
inline constexpr Dtype kInt16{0, 16};
inline constexpr Dtype kInt32{0, 32};
inline constexpr Dtype kInt64{0, 64};
inline constexpr Dtype kUInt8{1, 8};
inline constexpr Dtype kComplex64{5, 64};
inline constexpr Dtype kComplex128{5, 128};

// Storage of the 16-bit floats: only the bits; arithmetic is done in float.
struct BFloat16 {
    std::uint16_t bits;
};
struct Float16 {
    std::uint16_t bits;
};

}  // namespace ddpcomm

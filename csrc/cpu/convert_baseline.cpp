// Conversion in plain C++: the only one on processors other than x86-64, and what the others are tested against.
#include <cstring>

#include "ddpcomm/convert.h"
#include "ddpcomm/convert_isas.h"

namespace ddpcomm {
namespace {

template <class C>
struct Lanes;

inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Half to float without a table. A subnormal half is built as 2^-14 + value, from which 2^-14 is taken off again: no step of it meets a
// subnormal float, which the processor may have been told to flush to zero.
inline float widen(Float16 half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half.bits & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half.bits & 0x7fffu) << 13;
    const std::uint32_t normal = magnitude + 0x38000000u;
    const std::uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000u) - float_of(0x38800000u));
    const std::uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
    const std::uint32_t special = magnitude | 0x7f800000u;  // infinity or not a number
    return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

inline float widen(BFloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }
inline float widen(float value) { return value; }
inline double widen(double value) { return value; }

inline void narrow(float value, float& to) { to = value; }
inline void narrow(float value, double& to) { to = value; }

inline void narrow(float value, BFloat16& to) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to.bits = static_cast<std::uint16_t>(nan ? ((bits >> 16) | 0x40u) : rounded);
}

inline void narrow(float value, Float16& to) {
    const std::uint32_t bits = bits_of(value);
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    // Subnormal halves: adding 0.5 puts the result's last bit where float rounds.
    const std::uint32_t small = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
    const std::uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    std::uint32_t half = magnitude < 0x38800000u ? small : normal;
    half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // too big, even after rounding
    half = magnitude > 0x7f800000u ? (0x7e00u | ((magnitude >> 13) & 0x3ffu)) : half;
    to.bits = static_cast<std::uint16_t>(sign | half);
}

inline void narrow(double value, double& to) { to = value; }
template <class To>
inline void narrow(double value, To& to) {
    narrow(static_cast<float>(value), to);
}

template <class C>
struct Lanes {
    static constexpr std::size_t width = 1;

    template <class From>
    static C load(const From* from) {
        From value;
        std::memcpy(&value, from, sizeof(From));
        return widen(value);
    }
    template <class To>
    static void store(To* to, C value) {
        To result;
        narrow(value, result);
        std::memcpy(to, &result, sizeof(To));
    }
    static C multiply(C value, C factor) { return value * factor; }
};

void stream(const void* from, void* to, std::size_t bytes) { std::memcpy(to, from, bytes); }

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/convert_kernel.h"

namespace ddpcomm {

const ConvertTable& convert_table_baseline() {
    static constexpr ConvertTable table = make_convert_table(stream);
    return table;
}

}  // namespace ddpcomm

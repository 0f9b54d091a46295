// Quantisation of one block. Plain loops over integers and floats, which each instruction set's file compiles to its own vector code.
//
// Every step is one correctly rounded operation, so that the CUDA and Triton kernels and the reference give the same bits.

namespace ddpcomm {
namespace {

// Below this scale (the smallest normal float) its reciprocal would overflow; such a block is sent as zero and stays in the residual.
constexpr float kSmallestScale = 1.17549435e-38f;
// Adding and subtracting it rounds a float of less than 2^22 to an integer, ties to even.
constexpr float kRounder = 12582912.0f;

struct Int8Code {
    static constexpr float reciprocal_of_largest = 1.0f / 127.0f;
    static std::uint8_t encode(float value) {
        const float rounded = (value + kRounder) - kRounder;
        const float clamped = rounded > 127.0f ? 127.0f : (rounded < -127.0f ? -127.0f : rounded);
        return static_cast<std::uint8_t>(static_cast<std::int8_t>(static_cast<std::int32_t>(clamped)));
    }
    static float decode(std::uint8_t code) { return static_cast<float>(static_cast<std::int8_t>(code)); }
};

template <class Float8>
struct Float8Code {
    static std::uint8_t encode(float value) {
        Float8 result;
        narrow(value, result);
        return result.bits;
    }
    static float decode(std::uint8_t code) { return widen(Float8{code}); }
};
struct Float8E4M3Code : Float8Code<Float8E4M3> {
    static constexpr float reciprocal_of_largest = 1.0f / 448.0f;
};
struct Float8E5M2Code : Float8Code<Float8E5M2> {
    static constexpr float reciprocal_of_largest = 1.0f / 57344.0f;
};

template <class Code>
void quantise(float* __restrict__ values, std::uint8_t* __restrict__ codes, float* scale) {
    std::uint32_t largest_bits = 0;  // magnitudes order like their bits; infinity and not-a-number come last
    for (std::size_t i = 0; i < kQuantisedBlock; ++i) {
        const std::uint32_t magnitude = bits_of(values[i]) & 0x7fffffffu;
        largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
    }
    const bool finite = largest_bits < 0x7f800000u;
    const float step = float_of(largest_bits) * Code::reciprocal_of_largest;
    const bool sent = finite && step >= kSmallestScale;
    const float reciprocal = sent ? 1.0f / step : 0.0f;
    for (std::size_t i = 0; i < kQuantisedBlock; ++i) {
        const float value = finite ? values[i] : 0.0f;
        const std::uint8_t code = Code::encode(value * reciprocal);
        codes[i] = code;
        values[i] = value - Code::decode(code) * (sent ? step : 0.0f);
    }
    *scale = finite ? (sent ? step : 0.0f) : float_of(0x7fc00000u);
}

template <class Code>
void dequantise(const std::uint8_t* __restrict__ codes, float scale, float* __restrict__ values) {
    for (std::size_t i = 0; i < kQuantisedBlock; ++i) values[i] = Code::decode(codes[i]) * scale;
}

constexpr void fill_quantise_tables(KernelTable& table) {
    table.quantise[0] = quantise<Int8Code>;
    table.quantise[1] = quantise<Float8E4M3Code>;
    table.quantise[2] = quantise<Float8E5M2Code>;
    table.dequantise[0] = dequantise<Int8Code>;
    table.dequantise[1] = dequantise<Float8E4M3Code>;
    table.dequantise[2] = dequantise<Float8E5M2Code>;
}

}  // namespace
}  // namespace ddpcomm

// Many tensors into 8-bit codes with a scale per 256 elements, with error feedback. One block a tile of 16 such blocks, 16 threads each.
//
// Macros: SOURCE: the tensors' type. CODE: Int8, Float8E4M3 or Float8E5M2. FEEDBACK: there is a residual. Compiled without fused
// multiply-add, so that each step is rounded as the reference's.
#include "quantise.cuh"

using Wide = ComputeType<SOURCE, SOURCE>::type;

constexpr int kWidth = 4;  // elements a step of a thread
constexpr int kSteps = kBlock / kLanes / kWidth;

extern "C" __global__ void __launch_bounds__(kThreads)
    quantise(ADDRESSES, const Tile* tiles, double scale, float* residual, uint8* codes, float* scales) {
    const Tile tile = tiles[blockIdx.x];
    const int64 address = ADDRESS_OF(tile.tensor);
    if (address == kOther) return;
    const SOURCE* source = reinterpret_cast<const SOURCE*>(address) + tile.first;
    const uint32 valid = address == kAbsent ? 0 : tile.valid;
    const Wide factor = to<Wide>(scale);
    const uint32 lane = threadIdx.x % kLanes, begin = threadIdx.x / kLanes * kBlock;  // this thread's place in its block, and the block's

    float values[kSteps][kWidth];
    uint32 largest = 0;  // magnitudes order like their bits; what is not finite comes last
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const uint32 place = begin + (step * kLanes + lane) * kWidth;
        Vector<SOURCE, kWidth> loaded{};
        if (valid == kTile && aligned(source)) {
            load(source + place, loaded);
        } else {
            for (uint32 i = 0; i < kWidth; ++i) {
                if (place + i < valid) loaded.numbers[i] = source[place + i];
            }
        }
        Vector<Float32, kWidth> kept{};
        if (FEEDBACK && begin < tile.written) load(reinterpret_cast<const Float32*>(residual) + tile.place + place, kept);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float value = to<float>(product(to<Wide>(widen(loaded.numbers[i])), factor));
            values[step][i] = FEEDBACK ? sum(value, kept.numbers[i].value) : value;
            const uint32 magnitude = __float_as_uint(values[step][i]) & 0x7fffffffu;
            largest = magnitude > largest ? magnitude : largest;
        }
    }

    __shared__ uint32 magnitudes[kThreads];
    magnitudes[threadIdx.x] = largest;
    __syncthreads();
    for (uint32 i = 0; i < kLanes; ++i) {
        const uint32 other = magnitudes[threadIdx.x / kLanes * kLanes + i];
        largest = other > largest ? other : largest;
    }
    if (begin >= tile.written) return;

    const bool finite = largest < 0x7f800000u;
    const float unit = product(__uint_as_float(largest), kReciprocalOfLargest);
    const bool sent = finite && unit >= kSmallestScale;
    const float reciprocal = sent ? __fdiv_rn(1.0f, unit) : 0.0f;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
        const int64 place = tile.place + begin + (step * kLanes + lane) * kWidth;
        Vector<Bits8, kWidth> encoded;
        Vector<Float32, kWidth> lost;
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            const float value = finite ? values[step][i] : 0.0f;
            encoded.numbers[i].value = encode(product(value, reciprocal));
            lost.numbers[i].value = difference(value, product(decode(encoded.numbers[i].value), sent ? unit : 0.0f));
        }
        store(reinterpret_cast<Bits8*>(codes) + place, encoded);
        if (FEEDBACK) store(reinterpret_cast<Float32*>(residual) + place, lost);
    }
    if (lane == 0) scales[(tile.place + begin) / kBlock] = finite ? (sent ? unit : 0.0f) : __uint_as_float(0x7fc00000u);
}

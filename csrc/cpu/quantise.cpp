#include "ddpcomm/quantise.h"

#include <cstring>

#include "ddpcomm/copy.h"
#include "ddpcomm/parallel.h"
#include "ddpcomm/walk.h"

namespace ddpcomm {
namespace {

constexpr auto kBlock = static_cast<std::int64_t>(kQuantisedBlock);
constexpr std::int64_t kBlocksPerThread = kBytesPerThread / kBlock / 4;

// Calls work(block) for every block, each on one of the threads.
template <class Work>
void for_each_block(const Layout& layout, int threads, Work work) {
    parallel_for(layout.total_numel / kBlock, 16, kBlocksPerThread, threads, [&](std::int64_t from, std::int64_t to) {
        for (std::int64_t block = from; block < to; ++block) work(block);
    });
}

}  // namespace

void quantise(const Layout& layout, const Piece* pieces, double scale, Code code, float* residual, std::uint8_t* codes, float* scales,
              Execution execution) {
    const QuantiseFunction quantise_block = kernel_table(execution.isa).quantise[static_cast<int>(code)];
    for_each_block(layout, execution.threads, [&](std::int64_t block) {
        alignas(64) float values[kQuantisedBlock] = {};
        const std::int64_t from = block * kBlock;
        walk(layout, from, from + kBlock, [&](std::size_t i, std::int64_t first, std::int64_t begin, std::int64_t end) {
            const Piece& piece = pieces[i];
            if (!piece.data) return;
            const Copier copier(piece.dtype, kFloat32, scale, Write::kPlain, execution.isa);
            const char* source = static_cast<const char*>(piece.data) + first * static_cast<std::int64_t>(piece.dtype.bytes());
            copier(source, reinterpret_cast<char*>(values + (begin - from)), end - begin);
        });
        if (residual) {
            for (std::size_t j = 0; j < kQuantisedBlock; ++j) values[j] += residual[from + static_cast<std::int64_t>(j)];
        }
        quantise_block(values, codes + from, scales + block);
        if (residual) std::memcpy(residual + from, values, sizeof(values));
    });
}

void dequantise(const Layout& layout, const Piece* pieces, double scale, Code code, bool accumulate, const std::uint8_t* codes,
                const float* scales, Execution execution) {
    const DequantiseFunction dequantise_block = kernel_table(execution.isa).dequantise[static_cast<int>(code)];
    const Write write = accumulate ? Write::kAccumulate : Write::kPlain;
    for_each_block(layout, execution.threads, [&](std::int64_t block) {
        alignas(64) float values[kQuantisedBlock];
        const std::int64_t from = block * kBlock;
        dequantise_block(codes + from, scales[block], values);
        walk(layout, from, from + kBlock, [&](std::size_t i, std::int64_t first, std::int64_t begin, std::int64_t end) {
            const Piece& piece = pieces[i];
            if (!piece.data) return;
            const Copier copier(kFloat32, piece.dtype, scale, write, execution.isa);
            char* target = static_cast<char*>(piece.data) + first * static_cast<std::int64_t>(piece.dtype.bytes());
            copier(reinterpret_cast<const char*>(values + (begin - from)), target, end - begin);
        });
    });
}

}  // namespace ddpcomm

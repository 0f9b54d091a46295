#include "ddpcomm/norm.h"

#include <algorithm>
#include <vector>

#include "ddpcomm/parallel.h"
#include "ddpcomm/walk.h"

namespace ddpcomm {

Norm sum_tiles(const Layout& layout, int threads, const std::function<Norm(std::size_t, std::int64_t, std::int64_t)>& tile) {
    constexpr auto tile_size = static_cast<std::int64_t>(kNormTile);
    std::vector<std::int64_t> first_tile(layout.count() + 1, 0);
    for (std::size_t i = 0; i < layout.count(); ++i) first_tile[i + 1] = first_tile[i] + (layout.numels[i] + tile_size - 1) / tile_size;
    const std::int64_t tiles = first_tile.back();

    std::vector<Norm> norms(static_cast<std::size_t>(tiles));
    const std::int64_t tile_bytes = tile_size * static_cast<std::int64_t>(layout.dtype.bytes());
    parallel_for(tiles, 1, std::max<std::int64_t>(kBytesPerThread / tile_bytes, 1), threads, [&](std::int64_t from, std::int64_t to) {
        auto i = static_cast<std::size_t>(std::upper_bound(first_tile.begin(), first_tile.end(), from) - first_tile.begin()) - 1;
        for (std::int64_t t = from; t < to; ++t) {
            while (first_tile[i + 1] <= t) ++i;
            const std::int64_t first = (t - first_tile[i]) * tile_size;
            norms[static_cast<std::size_t>(t)] = tile(i, first, std::min(tile_size, layout.numels[i] - first));
        }
    });

    Norm total{0.0, 0};
    for (const Norm& each : norms) {
        total.sum_of_squares += each.sum_of_squares;
        total.nonfinite += each.nonfinite;
    }
    return total;
}

Norm norm(const Layout& layout, const void* flat, Execution execution) {
    const NormFunction norm_of = kernel_table(execution.isa).norm[float_index(layout.dtype)];
    const auto bytes = static_cast<std::int64_t>(layout.dtype.bytes());
    return sum_tiles(layout, execution.threads, [&](std::size_t i, std::int64_t first, std::int64_t count) {
        return norm_of(static_cast<const char*>(flat) + (layout.offsets[i] + first) * bytes, static_cast<std::size_t>(count));
    });
}

}  // namespace ddpcomm

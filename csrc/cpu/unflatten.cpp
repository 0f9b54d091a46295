#include "ddpcomm/unflatten.h"

#include <atomic>
#include <optional>

#include "ddpcomm/copy.h"
#include "ddpcomm/norm.h"
#include "ddpcomm/parallel.h"
#include "ddpcomm/walk.h"

namespace ddpcomm {

void unflatten(const Layout& layout, const void* flat_data, const Piece* pieces, double scale, Execution execution) {
    const char* const flat = static_cast<const char*>(flat_data);
    const auto bytes = static_cast<std::int64_t>(layout.dtype.bytes());
    const Write write = layout.total_numel * bytes >= kStreamBytes ? Write::kStreamed : Write::kPlain;

    const auto work = [&](std::int64_t from, std::int64_t to) {
        std::optional<Copier> copier;
        Dtype copier_type{};
        walk(layout, from, to, [&](std::size_t i, std::int64_t first, std::int64_t begin, std::int64_t end) {
            const Piece& piece = pieces[i];
            if (!piece.data) return;
            if (!copier || copier_type != piece.dtype) {
                copier.emplace(layout.dtype, piece.dtype, scale, write, execution.isa);
                copier_type = piece.dtype;
            }
            char* target = static_cast<char*>(piece.data) + first * static_cast<std::int64_t>(piece.dtype.bytes());
            (*copier)(flat + begin * bytes, target, end - begin);
        });
        if (write == Write::kStreamed)
            std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed stores are not ordered by anything less
    };
    parallel_for(layout.total_numel, kPartBytes / bytes, kBytesPerThread / bytes, execution.threads, work);
}

Norm unflatten_with_norm(const Layout& layout, const void* flat_data, const Piece* pieces, double scale, Execution execution) {
    const char* const flat = static_cast<const char*>(flat_data);
    const auto bytes = static_cast<std::int64_t>(layout.dtype.bytes());
    const KernelTable& table = kernel_table(execution.isa);

    return sum_tiles(layout, execution.threads, [&](std::size_t i, std::int64_t first, std::int64_t count) {
        const Piece& piece = pieces[i];
        if (!piece.data) return Norm{0.0, 0};
        char* target = static_cast<char*>(piece.data) + first * static_cast<std::int64_t>(piece.dtype.bytes());
        Copier(layout.dtype, piece.dtype, scale, Write::kPlain, execution.isa)(flat + (layout.offsets[i] + first) * bytes, target, count);
        return table.norm[float_index(piece.dtype)](target, static_cast<std::size_t>(count));
    });
}

}  // namespace ddpcomm

#include "ddpcomm/flatten.h"

#include <atomic>
#include <cstring>
#include <optional>

#include "ddpcomm/copy.h"
#include "ddpcomm/parallel.h"
#include "ddpcomm/walk.h"

namespace ddpcomm {

void flatten(const Layout& layout, const Piece* pieces, void* out_data, double scale, bool accumulate, Execution execution) {
    char* const out = static_cast<char*>(out_data);
    const auto bytes = static_cast<std::int64_t>(layout.dtype.bytes());
    const Write write = accumulate ? Write::kAccumulate : layout.total_numel * bytes >= kStreamBytes ? Write::kStreamed : Write::kPlain;

    const auto work = [&](std::int64_t from, std::int64_t to) {
        std::optional<Copier> copier;
        Dtype copier_type{};
        std::int64_t done = from;  // everything before it is written
        walk(layout, from, to, [&](std::size_t i, std::int64_t first, std::int64_t begin, std::int64_t end) {
            const Piece& piece = pieces[i];
            if (!piece.data) return;
            if (!copier || copier_type != piece.dtype) {
                copier.emplace(piece.dtype, layout.dtype, scale, write, execution.isa);
                copier_type = piece.dtype;
            }
            if (done < begin && !accumulate) std::memset(out + done * bytes, 0, static_cast<std::size_t>((begin - done) * bytes));
            const char* source = static_cast<const char*>(piece.data) + first * static_cast<std::int64_t>(piece.dtype.bytes());
            (*copier)(source, out + begin * bytes, end - begin);
            done = end;
        });
        if (done < to && !accumulate) std::memset(out + done * bytes, 0, static_cast<std::size_t>((to - done) * bytes));
        if (write == Write::kStreamed)
            std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed stores are not ordered by anything less
    };
    parallel_for(layout.total_numel, kPartBytes / bytes, kBytesPerThread / bytes, execution.threads, work);
}

}  // namespace ddpcomm

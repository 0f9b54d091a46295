#include "ddpcomm/flatten.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>

#include "ddpcomm/copy.h"
#include "ddpcomm/parallel.h"
#include "ddpcomm/walk.h"

namespace ddpcomm {
namespace {

bool may_be_skipped(const Layout& layout, std::size_t i, const Piece& piece, const Skipped& skipped) {
    return piece.dtype == layout.dtype && layout.numels[i] * static_cast<std::int64_t>(layout.dtype.bytes()) >= skipped.least_bytes;
}

}  // namespace

std::vector<Skip> skips(const Layout& layout, const Piece* pieces, const void* out, const Skipped& skipped) {
    std::vector<Skip> found;
    const auto bytes = static_cast<std::int64_t>(layout.dtype.bytes());
    walk(layout, skipped.begin, skipped.end, [&](std::size_t i, std::int64_t first, std::int64_t begin, std::int64_t end) {
        if (!pieces[i].data || !may_be_skipped(layout, i, pieces[i], skipped)) return;
        const char* const data = static_cast<const char*>(pieces[i].data) + first * bytes;
        if (data != static_cast<const char*>(out) + begin * bytes) found.push_back({i, begin, end - begin, data});
    });
    return found;
}

void flatten(const Layout& layout, const Piece* pieces, void* out_data, double scale, bool accumulate, Execution execution,
             const Skipped& skipped) {
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
            const auto copy = [&](std::int64_t from_here, std::int64_t to_there) {
                if (from_here >= to_there) return;
                const std::int64_t element = first + from_here - begin;
                const char* source = static_cast<const char*>(piece.data) + element * static_cast<std::int64_t>(piece.dtype.bytes());
                (*copier)(source, out + from_here * bytes, to_there - from_here);
            };
            if (may_be_skipped(layout, i, piece, skipped)) {
                copy(begin, std::min(end, skipped.begin));
                copy(std::max(begin, skipped.end), end);
            } else {
                copy(begin, end);
            }
            done = end;
        });
        if (done < to && !accumulate) std::memset(out + done * bytes, 0, static_cast<std::size_t>((to - done) * bytes));
        if (write == Write::kStreamed)
            std::atomic_thread_fence(std::memory_order_seq_cst);  // streamed stores are not ordered by anything less
    };
    parallel_for(layout.total_numel, kPartBytes / bytes, kBytesPerThread / bytes, execution.threads, work);
}

}  // namespace ddpcomm

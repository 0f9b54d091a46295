#if defined(__linux__)

#include "ddpcomm/shared_memory_call.h"

#include <algorithm>
#include <cstring>

namespace ddpcomm {
namespace {

// Where rank's share of `count` elements begins, a whole number of cache lines from the start: so that no two ranks write to one line.
std::size_t share_begin(std::size_t count, std::size_t item_bytes, int rank, int ranks) {
    const std::size_t per_line = kCacheLine / item_bytes;
    const std::size_t lines = (count + per_line - 1) / per_line;
    return std::min(count, lines * static_cast<std::size_t>(rank) / static_cast<std::size_t>(ranks) * per_line);
}

void copy(void* to, const void* from, std::size_t bytes) {
    if (to != from && bytes != 0) std::memcpy(to, from, bytes);
}

}  // namespace

Call::Call(std::uint64_t number, const CallArguments& arguments, const CallSettings& settings, const Peers& peers)
    : number_(number), arguments_(arguments), settings_(settings), rank_(peers.rank()), ranks_(peers.count()) {
    const std::size_t bytes = arguments_.numel * element_bytes();
    small_ = arguments_.kind == CollectiveKind::kAllReduce && bytes <= settings_.small_bytes;
    staged_ = sends_data(rank_) && bytes != 0 && (small_ || !peers.own_segment().contains(arguments_.input, bytes));
}

std::size_t Call::rows() const { return arguments_.kind == CollectiveKind::kReduceScatter ? static_cast<std::size_t>(ranks_) : 1; }

bool Call::sends_data(int rank) const {
    if (arguments_.kind == CollectiveKind::kBarrier) return false;
    return arguments_.kind != CollectiveKind::kBroadcast || arguments_.source == rank;
}

std::size_t Call::piece_elements(bool in_pieces) const {
    const std::size_t numel = static_cast<std::size_t>(arguments_.numel);
    if (!in_pieces || element_bytes() == 0) return numel;
    const std::size_t elements = std::max<std::size_t>(1, settings_.piece_bytes / element_bytes());
    const std::size_t per_line = kCacheLine / item_bytes();
    return std::min(numel, elements > per_line ? elements / per_line * per_line : elements);
}

int Call::buffers_needed() const {
    if (!staged_) return 0;
    return piece_elements(true) < arguments_.numel ? static_cast<int>(kStagingBuffers) : 1;
}

Call::Range Call::piece(std::size_t index) const {
    const std::size_t numel = static_cast<std::size_t>(arguments_.numel);
    const std::size_t begin = std::min(numel, index * piece_elements_);
    return {begin, std::min(piece_elements_, numel - begin)};
}

const Descriptor& Call::descriptor(const Peers& peers, int rank) const { return peers.control(rank).calls[number_ % kCallsInFlight]; }

char* Call::data(const Peers& peers, int rank, std::size_t index, std::size_t row) const {
    const Descriptor& call = descriptor(peers, rank);
    const Range range = piece(index);
    if (call.staged) return peers.memory(rank) + call.offsets[index % kStagingBuffers] + row * range.count * item_bytes();
    return peers.memory(rank) + call.offsets[0] + (row * static_cast<std::size_t>(arguments_.numel) + range.begin) * item_bytes();
}

void Call::post(const Peers& peers) {
    Descriptor& own = peers.own().calls[number_ % kCallsInFlight];
    own.numel = arguments_.numel;
    own.tag = arguments_.tag;
    own.source = arguments_.source;
    own.kind = arguments_.kind;
    own.op = arguments_.op;
    own.dtype = arguments_.dtype;
    own.staged = staged_;
    own.offsets = buffers_;
    if (staged_) {
        piece_elements_ = piece_elements(true);
        copy_in(peers, 0);
    } else if (sends_data(rank_)) {
        own.offsets[0] = static_cast<std::uint64_t>(static_cast<const char*>(arguments_.input) - peers.memory(rank_));
    }
#if defined(__x86_64__)
    __builtin_ia32_sfence();  // the caller may have written its tensor with stores that bypass the caches
#endif
    own.number.store(number_, std::memory_order_release);
    peers.ring();
}

bool Call::all_posted(const Peers& peers) const {
    for (int rank = 0; rank < ranks_; ++rank) {
        if (descriptor(peers, rank).number.load(std::memory_order_acquire) != number_) return false;
    }
    return true;
}

RankSet Call::missing(const Peers& peers) const {
    RankSet ranks;
    for (int rank = 0; rank < ranks_; ++rank) {
        if (descriptor(peers, rank).number.load(std::memory_order_acquire) != number_) ranks.set(static_cast<std::size_t>(rank));
    }
    return ranks;
}

bool Call::matches(const Peers& peers) const {
    for (int rank = 0; rank < ranks_; ++rank) {
        const Descriptor& other = descriptor(peers, rank);
        const bool same = other.kind == arguments_.kind && other.op == arguments_.op && other.dtype == arguments_.dtype &&
                          other.numel == arguments_.numel && other.source == arguments_.source && other.tag == arguments_.tag;
        if (!same) return false;
    }
    return true;
}

void Call::plan(const Peers& peers) {
    bool any_staged = false;
    bool all_staged = true;
    for (int rank = 0; rank < ranks_; ++rank) {
        any_staged = any_staged || descriptor(peers, rank).staged;
        all_staged = all_staged && descriptor(peers, rank).staged;
    }
    const bool all_reduce = arguments_.kind == CollectiveKind::kAllReduce;
    piece_elements_ = piece_elements(any_staged);
    pieces_ = piece_elements_ == 0 ? 1 : static_cast<std::size_t>((arguments_.numel + piece_elements_ - 1) / piece_elements_);
    // With two ranks the bytes moved are fewer in one step; with three as many; with more the shares win.
    in_one_step_ = all_reduce && all_staged && (small_ || ranks_ <= 2);
    needs_everyone_ = arguments_.numel != 0 && ((all_reduce && !in_one_step_) || (sends_data(rank_) && !staged_));
    published_ = 1;
    if (!staged_ && pieces_ > 1) {
        published_ = pieces_;
        peers.own().published.store(mark(pieces_), std::memory_order_release);
        peers.ring();
    }
    planned_ = true;
}

bool Call::all_published(const Peers& peers, std::size_t pieces) const {
    if (pieces <= 1) return true;  // the first piece comes with the call
    for (int rank = 0; rank < ranks_; ++rank) {
        if (peers.control(rank).published.load(std::memory_order_acquire) < mark(pieces)) return false;
    }
    return true;
}

bool Call::all_consumed(const Peers& peers, std::size_t pieces) const {
    for (int rank = 0; rank < ranks_; ++rank) {
        if (peers.control(rank).consumed.load(std::memory_order_acquire) < mark(pieces)) return false;
    }
    return true;
}

RankSet Call::unfinished(const Peers& peers) const {
    RankSet ranks;
    for (int rank = 0; rank < ranks_; ++rank) {
        if (peers.control(rank).consumed.load(std::memory_order_acquire) < mark(pieces_)) ranks.set(static_cast<std::size_t>(rank));
    }
    return ranks;
}

bool Call::advance(const Peers& peers) {
    for (bool moved = true; moved && consumed_ < pieces_;) {
        moved = false;
        retire(peers);
        if (published_ < pieces_ && published_ - retired_ < kStagingBuffers) {
            copy_in(peers, published_);
            peers.own().published.store(mark(++published_), std::memory_order_release);
            peers.ring();
            moved = true;
        }
        if (consumed_ < published_ && all_published(peers, consumed_ + 1)) {
            consume(peers, consumed_);
            peers.own().consumed.store(mark(++consumed_), std::memory_order_release);
            peers.ring();
            moved = true;
        }
    }
    return consumed_ == pieces_;
}

bool Call::retire(const Peers& peers) {
    while (retired_ < consumed_ && all_consumed(peers, retired_ + 1)) copy_out(peers, retired_++);
    return retired_ == pieces_;
}

void Call::copy_in(const Peers& peers, std::size_t index) {
    const Range range = piece(index);
    char* buffer = peers.memory(rank_) + buffers_[index % kStagingBuffers];
    for (std::size_t row = 0; row < rows(); ++row) {
        const char* from = input(row * static_cast<std::size_t>(arguments_.numel) + range.begin);
        copy(buffer + row * range.count * item_bytes(), from, range.count * item_bytes());
    }
}

void Call::copy_out(const Peers& peers, std::size_t index) {
    if (!staged_ || in_one_step_ || arguments_.kind != CollectiveKind::kAllReduce) return;
    const Range range = piece(index);
    copy(output(range.begin), data(peers, rank_, index, 0), range.count * item_bytes());
}

void Call::consume(const Peers& peers, std::size_t index) {
    const Range range = piece(index);
    if (range.count == 0) return;
    switch (arguments_.kind) {
        case CollectiveKind::kAllReduce:
            if (in_one_step_) {
                reduce(peers, index, 0, {0, range.count}, output(range.begin));
            } else {
                const std::size_t begin = share_begin(range.count, item_bytes(), rank_, ranks_);
                reduce(peers, index, 0, {begin, share_begin(range.count, item_bytes(), rank_ + 1, ranks_) - begin}, nullptr);
            }
            break;
        case CollectiveKind::kReduceScatter:
            reduce(peers, index, static_cast<std::size_t>(rank_), {0, range.count}, output(range.begin));
            break;
        case CollectiveKind::kBroadcast:
            if (rank_ != arguments_.source) {
                copy(output(range.begin), data(peers, arguments_.source, index, 0), range.count * item_bytes());
            }
            break;
        case CollectiveKind::kAllGather:
            for (int rank = 0; rank < ranks_; ++rank) {
                const std::size_t to = static_cast<std::size_t>(rank) * static_cast<std::size_t>(arguments_.numel) + range.begin;
                copy(output(to), data(peers, rank, index, 0), range.count * item_bytes());
            }
            break;
        case CollectiveKind::kBarrier: break;
    }
}

// Reduces `part` of a piece, from everybody's data into `target`, or into everybody's data if that is null.
void Call::reduce(const Peers& peers, std::size_t index, std::size_t row, Range part, void* target) {
    if (part.count == 0) return;
    std::array<void*, kMostRanks> everybody;
    for (int rank = 0; rank < ranks_; ++rank)
        everybody[static_cast<std::size_t>(rank)] = data(peers, rank, index, row) + part.begin * item_bytes();
    const bool in_place = target == nullptr;
    const double scale = arguments_.op == ReduceOp::kAvg ? 1.0 / ranks_ : 1.0;
    reduce_function(arguments_.dtype, arguments_.op, settings_.isa)(
        {everybody.data(), ranks_, in_place ? everybody.data() : &target, in_place ? ranks_ : 1, part.count, scale});
}

}  // namespace ddpcomm

#endif  // __linux__

#if defined(__linux__)

#include "ddpcomm/shared_memory_call.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

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

Call::Call(std::uint64_t number, const CallArguments& arguments, const CallSettings& settings, const Peers& peers,
           std::vector<Elsewhere> elsewhere)
    : number_(number),
      arguments_(arguments),
      settings_(settings),
      rank_(peers.rank()),
      ranks_(peers.count()),
      elsewhere_(std::move(elsewhere)) {
    const std::size_t bytes = arguments_.numel * element_bytes();
    small_ = arguments_.kind == CollectiveKind::kAllReduce && bytes <= settings_.small_bytes;
    staged_ = sends_data(rank_) && bytes != 0 && (small_ || !peers.own_segment().contains(arguments_.input, bytes));
    if (!elsewhere_.empty()) check_elsewhere(peers);
}

void Call::check_elsewhere(const Peers& peers) const {
    if (arguments_.kind != CollectiveKind::kAllReduce || staged_) {
        throw std::invalid_argument("only an all-reduce of a tensor in this rank's own shared memory can have elements elsewhere");
    }
    const Stretch share = own_share(arguments_.numel, arguments_.dtype, settings_, peers);
    std::size_t at = static_cast<std::size_t>(share.begin);
    for (const Elsewhere& other : elsewhere_) {
        if (other.first < at || other.count > static_cast<std::size_t>(share.end) ||
            other.first + other.count > static_cast<std::size_t>(share.end)) {
            throw std::invalid_argument("elements elsewhere are outside of this rank's own share, or out of order");
        }
        at = other.first + other.count;
    }
}

Stretch Call::own_share(std::uint64_t numel, Dtype dtype, const CallSettings& settings, const Peers& peers) {
    const std::size_t count = static_cast<std::size_t>(numel);
    if (peers.count() < 2 || count * dtype.bytes() <= settings.small_bytes) return {};
    const auto begin_of = [&](int rank) { return static_cast<std::int64_t>(share_begin(count, dtype.bytes(), rank, peers.count())); };
    return {begin_of(peers.rank()), begin_of(peers.rank() + 1)};
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
    own.elsewhere = !elsewhere_.empty();
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

bool Call::lacks_elements(const Peers& peers) const {
    bool any_staged = false, any_elsewhere = false;
    for (int rank = 0; rank < ranks_; ++rank) {
        any_staged = any_staged || descriptor(peers, rank).staged;
        any_elsewhere = any_elsewhere || descriptor(peers, rank).elsewhere;
    }
    return any_staged && any_elsewhere;
}

RankSet Call::out_of_bounds(const Peers& peers) const {
    RankSet ranks;
    const std::size_t staged_elements = piece_elements(true);
    DataRange range{arguments_.numel, item_bytes(), rows(), false, staged_elements * element_bytes(), 1};
    if (staged_elements < arguments_.numel) range.buffers = kStagingBuffers;
    for (int rank = 0; rank < ranks_; ++rank) {
        if (rank == rank_ || !sends_data(rank)) continue;
        const Descriptor& other = descriptor(peers, rank);
        range.staged = other.staged;
        if (!lies_within(range, other.offsets, peers.capacity(rank))) ranks.set(static_cast<std::size_t>(rank));
    }
    return ranks;
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
                reduce_share(peers, index, {begin, share_begin(range.count, item_bytes(), rank_ + 1, ranks_) - begin});
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

// Reduces this rank's share of a piece in place, reading its own elements wherever they lie.
void Call::reduce_share(const Peers& peers, std::size_t index, Range part) {
    const std::size_t end = part.begin + part.count;
    std::size_t at = part.begin;
    for (const Elsewhere& other : elsewhere_) {
        const std::size_t from = std::max(at, other.first);
        const std::size_t to = std::min(end, other.first + other.count);
        if (from >= to) continue;
        reduce(peers, index, 0, {at, from - at}, nullptr);
        reduce(peers, index, 0, {from, to - from}, nullptr, static_cast<const char*>(other.data) + (from - other.first) * item_bytes());
        at = to;
    }
    reduce(peers, index, 0, {at, end - at}, nullptr);
}

// Reduces `part` of a piece, from everybody's data into `target`, or into everybody's data if that is null.
void Call::reduce(const Peers& peers, std::size_t index, std::size_t row, Range part, void* target, const void* own) {
    if (part.count == 0) return;
    std::array<const void*, kMostRanks> sources;
    std::array<void*, kMostRanks> everybody;
    for (int rank = 0; rank < ranks_; ++rank) {
        const auto i = static_cast<std::size_t>(rank);
        sources[i] = everybody[i] = data(peers, rank, index, row) + part.begin * item_bytes();
    }
    if (own != nullptr) sources[static_cast<std::size_t>(rank_)] = own;
    const bool in_place = target == nullptr;
    const double scale = arguments_.op == ReduceOp::kAvg ? 1.0 / ranks_ : 1.0;
    reduce_function(arguments_.dtype, arguments_.op, settings_.isa)(
        {sources.data(), ranks_, in_place ? everybody.data() : &target, in_place ? ranks_ : 1, part.count, scale});
}

}  // namespace ddpcomm

#endif  // __linux__

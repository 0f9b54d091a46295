// One collective call of one rank: what was asked, where its data lies, and how far it has got.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ddpcomm/layout.h"
#include "ddpcomm/shared_memory_control.h"
#include "ddpcomm/shared_memory_peers.h"

namespace ddpcomm {

// The arguments. `numel` counts the elements of one rank's part: of the tensor of an all-reduce, a broadcast or an all-gather, of the
// output of a reduce-scatter.
struct CallArguments {
    CollectiveKind kind;
    ReduceOp op;
    Dtype dtype;
    std::int32_t source;
    std::uint64_t numel;
    std::uint64_t tag;
    const void* input;
    void* output;
};

// Elements [first, first + count) of this rank's data in an all-reduce, which lie elsewhere than in its tensor.
struct Elsewhere {
    std::size_t first, count;
    const void* data;
};

// What is fixed for all calls of a communicator.
struct CallSettings {
    std::size_t piece_bytes;  // staged data travels in pieces of this size
    std::size_t small_bytes;  // an all-reduce up to this size takes one step, see Call
    Isa isa;
};

// The steps of a call, each of which never blocks. All ranks take them in the order of their calls:
//   publish   a piece of this rank's data becomes readable for the others: a copy into a staging buffer, or nothing at all where the data
//             lies in the rank's segment anyway
//   consume   once all have published a piece: read it from everybody, and write what this rank is responsible for
//   retire    once all have consumed a piece: its memory is this rank's own again
// An all-reduce runs in one of two ways. In place: each rank reduces its share of the elements from every rank's data into every rank's
// data; done when all have. In one step, for small tensors and for two ranks that both stage: every rank reduces everything into its own
// tensor; done at once. In place nobody else reads a rank's share of its own data, so that this may lie elsewhere, in any memory that stays
// as it is until the call is finished: the share need not be copied to where its result goes. The others read each other's data and write
// to their own memory only.
class Call {
  public:
    Call() = default;
    // elsewhere: by `first`, and within own_share. Throws std::invalid_argument where it is not, or the call has no such share.
    Call(std::uint64_t number, const CallArguments& arguments, const CallSettings& settings, const Peers& peers,
         std::vector<Elsewhere> elsewhere = {});

    // The elements of an all-reduce of data in this rank's segment that this rank is going to reduce; none where that is not settled yet.
    static Stretch own_share(std::uint64_t numel, Dtype dtype, const CallSettings& settings, const Peers& peers);

    std::uint64_t number() const { return number_; }
    const CallArguments& arguments() const { return arguments_; }
    bool staged() const { return staged_; }
    int buffers_needed() const;
    std::size_t buffer_bytes() const { return piece_elements(true) * element_bytes(); }
    std::array<std::uint64_t, kStagingBuffers>& buffers() { return buffers_; }

    // Publishes the first piece together with the call itself.
    void post(const Peers& peers);
    // Ranks that have not posted theirs.
    RankSet missing(const Peers& peers) const;
    bool all_posted(const Peers& peers) const;
    // Whether every rank has made the same call; only once all have posted.
    bool matches(const Peers& peers) const;
    // Whether one rank's data is staged, of which all read every element, and not all of another's is there; only once all have posted.
    bool lacks_elements(const Peers& peers) const;
    // Ranks whose data, as they tell of it, does not lie in their segments; only once it matches.
    RankSet out_of_bounds(const Peers& peers) const;
    // Fixes how the call will run; only once it matches.
    void plan(const Peers& peers);
    bool planned() const { return planned_; }

    // Does what can be done. True once this rank has consumed every piece.
    bool advance(const Peers& peers);
    // Retires what can be retired. True once all is.
    bool retire(const Peers& peers);
    // How many steps have been taken.
    std::size_t steps() const { return published_ + consumed_ + retired_; }
    // Whether the caller has to wait for retirement: its own memory is read or written by the others.
    bool needs_everyone() const { return needs_everyone_; }
    // Ranks that have not consumed every piece.
    RankSet unfinished(const Peers& peers) const;

    // Such as "all_reduce(sum, 10 x float32, 40 bytes)".
    std::string describe(const Peers& peers) const;
    // What each rank called; only once all have posted.
    std::string describe_all(const Peers& peers) const;

  private:
    struct Range {
        std::size_t begin, count;  // elements
    };

    void check_elsewhere(const Peers& peers) const;
    std::size_t item_bytes() const { return arguments_.dtype.bytes(); }
    std::size_t rows() const;
    std::size_t element_bytes() const { return item_bytes() * rows(); }
    std::size_t piece_elements(bool in_pieces) const;
    Range piece(std::size_t index) const;
    Mark mark(std::size_t pieces) const { return number_ * kPieces + pieces; }
    bool sends_data(int rank) const;
    const Descriptor& descriptor(const Peers& peers, int rank) const;
    char* data(const Peers& peers, int rank, std::size_t index, std::size_t row) const;
    bool all_published(const Peers& peers, std::size_t pieces) const;
    bool all_consumed(const Peers& peers, std::size_t pieces) const;

    void copy_in(const Peers& peers, std::size_t index);
    void copy_out(const Peers& peers, std::size_t index);
    void consume(const Peers& peers, std::size_t index);
    // own: where this rank's elements lie; null means with its data.
    void reduce(const Peers& peers, std::size_t index, std::size_t row, Range part, void* target, const void* own = nullptr);
    void reduce_share(const Peers& peers, std::size_t index, Range part);
    char* output(std::size_t element) const { return static_cast<char*>(arguments_.output) + element * item_bytes(); }
    const char* input(std::size_t element) const { return static_cast<const char*>(arguments_.input) + element * item_bytes(); }

    std::uint64_t number_ = 0;
    CallArguments arguments_{};
    CallSettings settings_{};
    int rank_ = 0;
    int ranks_ = 1;
    bool small_ = false;
    bool staged_ = false;  // this rank's data goes through staging buffers
    bool planned_ = false;
    bool in_one_step_ = false;
    bool needs_everyone_ = false;
    std::size_t piece_elements_ = 0;
    std::size_t pieces_ = 1;
    std::size_t published_ = 0, consumed_ = 0, retired_ = 0;  // pieces
    std::array<std::uint64_t, kStagingBuffers> buffers_{};    // offsets in this rank's segment
    std::vector<Elsewhere> elsewhere_;
};

}  // namespace ddpcomm

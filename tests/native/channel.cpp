// The shared-memory transport with threads for ranks, over one mapping of each segment, so that ThreadSanitizer sees what the ranks do to
// one another: every collective, odd sizes, tensors in and out of the segments, many calls in flight, several threads of a rank, ranks that
// leave or fail, and descriptors that lie.
#include "ddpcomm/shared_memory_channel.h"

#include <cstring>
#include <functional>
#include <thread>

#include "check.h"

using namespace ddpcomm;

namespace {

constexpr auto kLimit = std::chrono::seconds(20);

struct Rank {
    int number;
    std::shared_ptr<Arena> arena;
    std::unique_ptr<Channel> channel;
    Peers peers;
};

TimeLimit limit() {
    const auto end = Clock::now() + kLimit;
    return {end, end, kLimit};
}

void finish(Channel& channel, std::uint64_t number) { CHECK(channel.wait(number, limit()) == Channel::Outcome::kDone); }

std::uint64_t start(Channel& channel, const CallArguments& call) {
    while (true) {
        const std::uint64_t number = channel.start(call);
        if (number != 0) return number;
        CHECK(channel.wait_for_room(limit()) == Channel::Outcome::kDone);
    }
}

void on_ranks(int count, const std::function<void(Rank&)>& body) {
    std::vector<std::shared_ptr<Arena>> arenas;
    for (int i = 0; i < count; ++i) arenas.push_back(std::make_shared<Arena>(16u << 20));
    std::vector<Peer> everybody;
    for (int i = 0; i < count; ++i) everybody.push_back({std::shared_ptr<Segment>(arenas[i], &arenas[i]->segment()), i, {}});
    const ChannelSettings settings{{256, 128, Isa::kBaseline}, std::chrono::microseconds(20)};
    std::vector<Rank> ranks;
    for (int i = 0; i < count; ++i) {
        Peers peers(i, everybody, 0);
        ranks.push_back({i, arenas[i], std::make_unique<Channel>(arenas[i], peers, settings), peers});
    }
    std::vector<std::thread> threads;
    for (Rank& rank : ranks) threads.emplace_back([&body, &rank] { body(rank); });
    for (std::thread& thread : threads) thread.join();
}

// Memory for `count` numbers, in the rank's segment or on the heap where it is exactly as large.
class Numbers {
  public:
    Numbers(const Rank& rank, std::size_t count, bool shared) : count_(count) {
        if (shared) {
            allocation_ = std::make_unique<Allocation>(rank.arena, count * sizeof(float));
        } else {
            heap_ = std::make_unique<float[]>(count);
        }
    }
    float* data() { return allocation_ ? static_cast<float*>(allocation_->data()) : heap_.get(); }
    void fill(float value) { std::fill(data(), data() + count_, value); }
    void check(std::size_t begin, std::size_t end, float value) {
        for (std::size_t i = begin; i < end; ++i) CHECK(data()[i] == value);
    }

  private:
    std::size_t count_;
    std::unique_ptr<Allocation> allocation_;
    std::unique_ptr<float[]> heap_;
};

CallArguments call(CollectiveKind kind, std::size_t numel, const void* input, void* output, ReduceOp op = ReduceOp::kSum, int source = 0) {
    return {kind, op, kFloat32, source, numel, 0, input, output};
}

void all_collectives(int count) {
    on_ranks(count, [count](Rank& rank) {
        const float mine = static_cast<float>(rank.number + 1);
        const float sum = static_cast<float>(count * (count + 1) / 2);
        const auto ranks = static_cast<std::size_t>(count);
        for (const std::size_t size : {0, 1, 3, 31, 32, 33, 63, 65, 257, 1000}) {
            for (int where = 0; where < 3; ++where) {  // all on the heap, all shared, mixed among the ranks
                const bool shared = where == 1 || (where == 2 && rank.number % 2 == 0);
                Numbers one(rank, size, shared), all(rank, size * ranks, shared);
                one.fill(mine);
                finish(*rank.channel, start(*rank.channel, call(CollectiveKind::kAllReduce, size, one.data(), one.data())));
                one.check(0, size, sum);
                one.fill(mine);
                finish(*rank.channel, start(*rank.channel, call(CollectiveKind::kAllReduce, size, one.data(), one.data(), ReduceOp::kMax)));
                one.check(0, size, static_cast<float>(count));
                one.fill(mine);
                finish(*rank.channel,
                       start(*rank.channel, call(CollectiveKind::kBroadcast, size, one.data(), one.data(), ReduceOp::kSum, count - 1)));
                one.check(0, size, static_cast<float>(count));
                one.fill(mine);
                finish(*rank.channel, start(*rank.channel, call(CollectiveKind::kAllGather, size, one.data(), all.data())));
                for (std::size_t i = 0; i < ranks; ++i) all.check(i * size, (i + 1) * size, static_cast<float>(i + 1));
                all.fill(mine);
                finish(*rank.channel, start(*rank.channel, call(CollectiveKind::kReduceScatter, size, all.data(), one.data())));
                one.check(0, size, sum);
                finish(*rank.channel, start(*rank.channel, call(CollectiveKind::kBarrier, 0, nullptr, nullptr)));
            }
        }
        rank.channel->close();
    });
}

// More calls than there is room for, a second thread that moves them on, and the descriptors used again several times over.
void many_in_flight() {
    on_ranks(2, [](Rank& rank) {
        std::atomic<bool> done{false};
        std::thread mover([&] {
            while (!done) {
                rank.channel->progress();
                std::this_thread::yield();
            }
        });
        constexpr std::size_t kCalls = 700, kLargest = 2000;
        Numbers all(rank, kCalls * kLargest, true);  // no two calls under way share a tensor
        all.fill(static_cast<float>(rank.number));
        std::uint64_t last = 0;
        for (std::size_t i = 0; i < kCalls; ++i) {
            float* const one = all.data() + i * kLargest;
            const CallArguments arguments = call(CollectiveKind::kAllReduce, i % 3 == 0 ? kLargest : 5, one, one);
            last = start(*rank.channel, arguments);
        }
        finish(*rank.channel, last);
        for (std::size_t i = 0; i < kCalls; ++i) all.check(i * kLargest, i * kLargest + (i % 3 == 0 ? kLargest : 5), 1);
        done = true;
        mover.join();
    });
}

void expect_failure(Rank& rank, FailureKind kind) {
    float number = 1;
    const std::uint64_t call_number = rank.channel->start(call(CollectiveKind::kAllReduce, 1, &number, &number));
    CHECK(call_number == 0 || rank.channel->wait(call_number, limit()) == Channel::Outcome::kFailed);
    CHECK(rank.channel->failure().kind == kind);
    CHECK(rank.channel->start(call(CollectiveKind::kBarrier, 0, nullptr, nullptr)) == 0);
}

void peers_that_leave() {
    on_ranks(3, [](Rank& rank) {
        if (rank.number == 2) return rank.channel->close();
        expect_failure(rank, rank.channel->failed() ? rank.channel->failure().kind : FailureKind::kPeerClosed);
    });
    on_ranks(3, [](Rank& rank) {
        if (rank.number == 1) return rank.channel->abort(FailureKind::kOther, {}, std::string(2 * kMessageBytes, 'x'));
        expect_failure(rank, FailureKind::kOther);
    });
    on_ranks(2, [](Rank& rank) {  // another size
        float numbers[2] = {};
        const auto size = static_cast<std::size_t>(rank.number + 1);
        const std::uint64_t number = rank.channel->start(call(CollectiveKind::kAllReduce, size, numbers, numbers));
        CHECK(number == 0 || rank.channel->wait(number, limit()) == Channel::Outcome::kFailed);
        CHECK(rank.channel->failure().kind == FailureKind::kMismatch);
    });
}

// Rank 1 writes descriptors by hand: no field of them makes rank 0 read outside of a segment.
void descriptors_that_lie() {
    Generator generator(7);
    const std::uint64_t odd[] = {0, 1, kReservedBytes, 16u << 20, (16u << 20) - 3, ~std::uint64_t{0}, ~std::uint64_t{0} - 4, 1ull << 63};
    for (int round = 0; round < 100; ++round) {
        const std::uint64_t seed = generator();
        on_ranks(2, [&](Rank& rank) {
            std::unique_ptr<float[]> numbers(new float[600]());
            if (rank.number == 1) {
                Generator own(seed);
                Descriptor& lie = rank.peers.own().calls[1];
                lie.numel = own() % 4 == 0 ? own() : 600;
                lie.tag = 0;
                lie.source = own() % 4 == 0 ? static_cast<std::int32_t>(own()) : 0;
                lie.kind = static_cast<CollectiveKind>(own() % 4 == 0 ? own() % 256 : 0);
                lie.op = static_cast<ReduceOp>(own() % 4 == 0 ? own() % 256 : 0);
                lie.dtype = own() % 4 == 0 ? Dtype{static_cast<std::uint8_t>(own()), static_cast<std::uint8_t>(own())} : kFloat32;
                lie.staged = own() % 2 == 0;
                for (std::uint64_t& offset : lie.offsets) offset = odd[below(own, std::size(odd))];
                lie.offsets[0] = (1u << 20) * 16 - 3;                               // never right
                std::memset(rank.peers.own().failure.message, 'x', kMessageBytes);  // without an end
                lie.number.store(1, std::memory_order_release);
                return;
            }
            const std::uint64_t number = rank.channel->start(call(CollectiveKind::kAllReduce, 600, numbers.get(), numbers.get()));
            CHECK(number == 0 || rank.channel->wait(number, limit()) == Channel::Outcome::kFailed);
            const FailureKind kind = rank.channel->failure().kind;
            CHECK(kind == FailureKind::kMismatch || kind == FailureKind::kOther);
            for (int i = 0; i < 600; ++i) CHECK(numbers[static_cast<std::size_t>(i)] == 0);
        });
    }
    on_ranks(2, [](Rank& rank) {  // a failure of which the words have no end
        if (rank.number == 0) return expect_failure(rank, FailureKind::kOther);
        Failure& failure = rank.peers.own().failure;
        failure.kind = FailureKind::kOther;
        std::memset(failure.message, 'x', kMessageBytes);
        rank.peers.own().state.store(RankState::kFailed, std::memory_order_release);
    });
}

// Allocation and freeing by several threads; what is handed out is zeros and nobody else's.
void arena() {
    const auto arena = std::make_shared<Arena>(8u << 20);
    std::vector<std::thread> threads;
    for (int which = 1; which <= 3; ++which) {
        threads.emplace_back([&arena, which] {
            Generator generator(static_cast<std::uint64_t>(which));
            for (int i = 0; i < 60; ++i) {
                const std::size_t bytes = 1 + below(generator, 50000);
                const Allocation allocation(arena, bytes);
                char* data = static_cast<char*>(allocation.data());
                for (std::size_t at = 0; at < bytes; at += 97) CHECK(data[at] == 0);
                std::memset(data, which, bytes);
                for (std::size_t at = 0; at < bytes; at += 97) CHECK(data[at] == which);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::size_t bytes : {std::size_t{9} << 20, ~std::size_t{0}, ~std::size_t{0} - 4095}) {
        bool refused = false;
        try {
            arena->allocate(bytes);
        } catch (const std::exception&) {
            refused = true;
        }
        CHECK(refused);
    }
    const auto attached = Segment::attach(arena->file(), arena->segment().capacity(), arena->token());
    arena->segment().data()[kReservedBytes] = 42;
    CHECK(attached->data()[kReservedBytes] == 42);

    auto kept = std::make_unique<Allocation>(arena, 3 << 20);
    const std::ptrdiff_t offset = static_cast<char*>(kept->data()) - arena->segment().data();
    std::memset(kept->data(), 7, kept->bytes());
    arena->close();
    arena->close();
    CHECK(attached->data()[offset] == 7);  // what has been handed out stays
    kept.reset();
    CHECK(attached->data()[offset] == 0);  // and goes back to the machine without the file
    bool refused = false;
    try {
        arena->allocate(1);
    } catch (const std::system_error&) {
        refused = true;
    }
    CHECK(refused);
}

}  // namespace

int main() {
    for (const int count : {1, 2, 3}) all_collectives(count);
    many_in_flight();
    peers_that_leave();
    descriptors_that_lie();
    arena();
    std::puts("channel: passed");
}

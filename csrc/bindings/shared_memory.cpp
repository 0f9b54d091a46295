// The shared-memory transport: ddpcomm._native.SharedMemory*. Absent where the system is not Linux.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#if defined(__linux__)

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <tuple>
#include <utility>

#include "ddpcomm/shared_memory_channel.h"

namespace py = pybind11;

namespace ddpcomm {
namespace {

constexpr auto kLookForSignals = std::chrono::milliseconds(100);

Clock::duration duration_of(double seconds) {
    constexpr double a_year = 365.0 * 86400.0;  // the clock can't count to infinity
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::fmin(seconds, a_year)));
}

// Runs `wait(limit)` again and again without the interpreter's lock, so that Ctrl-C is served meanwhile.
template <class Wait>
bool wait_serving_signals(double seconds, Wait wait) {
    const Clock::duration total = duration_of(seconds);
    const Clock::time_point deadline = Clock::now() + total;
    while (true) {
        Channel::Outcome outcome;
        {
            const py::gil_scoped_release release;
            outcome = wait(TimeLimit{deadline, Clock::now() + kLookForSignals, total});
        }
        if (outcome != Channel::Outcome::kInterrupted) return outcome == Channel::Outcome::kDone;
        if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
}

Isa isa_named(const std::string& name) {
    if (name.empty()) return available_isas().front();
    for (const Isa isa : available_isas()) {
        if (name == isa_name(isa)) return isa;
    }
    throw std::invalid_argument("this machine has no instruction set called " + name);
}

SegmentToken to_token(const std::string& bytes) {
    SegmentToken token;
    if (bytes.size() != token.size()) throw std::invalid_argument("a segment's token has " + std::to_string(token.size()) + " bytes");
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return token;
}

std::unique_ptr<Channel> make_channel(std::shared_ptr<Arena> arena, int rank, const std::vector<std::shared_ptr<Segment>>& segments,
                                      const std::vector<int>& names, const std::vector<std::vector<int>>& watched, std::size_t channel,
                                      std::size_t piece_bytes, std::size_t small_bytes, double spin_seconds, const std::string& isa) {
    if (segments.size() > kMostRanks) throw std::invalid_argument("a host can have " + std::to_string(kMostRanks) + " ranks at most");
    if (channel >= kChannels || names.size() != segments.size() || watched.size() != segments.size()) {
        throw std::invalid_argument("no such channel, or lists of different lengths");
    }
    std::vector<Peer> peers;
    for (std::size_t i = 0; i < segments.size(); ++i) peers.push_back({segments[i], names[i], watched[i]});
    for (std::size_t i = 0; i < peers.size(); ++i) {
        if (peers[i].segment == nullptr && static_cast<int>(i) != rank) throw std::invalid_argument("another rank's segment is missing");
    }
    peers.at(static_cast<std::size_t>(rank)).segment = std::shared_ptr<Segment>(arena, &arena->segment());
    const ChannelSettings settings{{piece_bytes, small_bytes, isa_named(isa)}, std::chrono::nanoseconds(duration_of(spin_seconds))};
    return std::make_unique<Channel>(arena, Peers(rank, std::move(peers), channel), settings);
}

std::vector<std::size_t> to_list(const RankSet& ranks) {
    std::vector<std::size_t> list;
    for (std::size_t rank = 0; rank < kMostRanks; ++rank) {
        if (ranks[rank]) list.push_back(rank);
    }
    return list;
}

RankSet to_set(const std::vector<std::size_t>& list) {
    RankSet ranks;
    for (const std::size_t rank : list) ranks.set(rank);
    return ranks;
}

std::uint64_t start(Channel& channel, int kind, int op, int dtype_code, int dtype_bits, int source, std::uint64_t numel, std::uint64_t tag,
                    std::uintptr_t input, std::uintptr_t output,
                    const std::vector<std::tuple<std::size_t, std::size_t, std::uintptr_t>>& parts) {
    const Dtype dtype{static_cast<std::uint8_t>(dtype_code), static_cast<std::uint8_t>(dtype_bits)};
    const CallArguments arguments{static_cast<CollectiveKind>(kind),    static_cast<ReduceOp>(op),      dtype, source, numel, tag,
                                  reinterpret_cast<const void*>(input), reinterpret_cast<void*>(output)};
    const bool reduces = arguments.kind == CollectiveKind::kAllReduce || arguments.kind == CollectiveKind::kReduceScatter;
    if (reduces && reduce_function(dtype, arguments.op, Isa::kBaseline) == nullptr) {
        throw std::invalid_argument("this element type can't be reduced");
    }
    std::vector<Elsewhere> elsewhere;
    for (const auto& [first, count, address] : parts) elsewhere.push_back({first, count, reinterpret_cast<const void*>(address)});
    const py::gil_scoped_release release;
    return channel.start(arguments, std::move(elsewhere));
}

void reduce(const std::string& isa, int op, int dtype_code, int dtype_bits, const std::vector<std::uintptr_t>& sources,
            const std::vector<std::uintptr_t>& targets, std::size_t count, double scale) {
    const Dtype dtype{static_cast<std::uint8_t>(dtype_code), static_cast<std::uint8_t>(dtype_bits)};
    const ReduceFunction function = reduce_function(dtype, static_cast<ReduceOp>(op), isa_named(isa));
    if (function == nullptr || sources.empty()) throw std::invalid_argument("this can't be reduced");
    std::vector<const void*> from;
    std::vector<void*> to;
    for (const std::uintptr_t address : sources) from.push_back(reinterpret_cast<const void*>(address));
    for (const std::uintptr_t address : targets) to.push_back(reinterpret_cast<void*>(address));
    const py::gil_scoped_release release;
    function({from.data(), static_cast<int>(from.size()), to.data(), static_cast<int>(to.size()), count, scale});
}

}  // namespace
}  // namespace ddpcomm

void bind_shared_memory(py::module_& module) {
    using namespace ddpcomm;

    py::class_<Segment, std::shared_ptr<Segment>>(module, "SharedMemorySegment", "Another rank's memory.")
        .def(py::init([](int file, std::size_t capacity, const std::string& token) {
                 return std::shared_ptr<Segment>(Segment::attach(file, capacity, to_token(token)));
             }),
             py::arg("file"), py::arg("capacity_bytes"), py::arg("token"));

    py::class_<Arena, std::shared_ptr<Arena>>(module, "SharedMemoryArena", "This rank's own memory.")
        .def(py::init([](std::size_t capacity) { return std::make_shared<Arena>(capacity); }), py::arg("capacity_bytes"))
        .def_property_readonly("file", &Arena::file)
        .def_property_readonly(
            "token",
            [](const Arena& arena) { return py::bytes(reinterpret_cast<const char*>(arena.token().data()), arena.token().size()); })
        .def_property_readonly("capacity_bytes", [](Arena& arena) { return arena.segment().capacity(); })
        .def(
            "allocate",
            [](std::shared_ptr<Arena> arena, std::size_t bytes) {
                const py::gil_scoped_release release;  // the kernel clears the pages now
                return std::make_unique<Allocation>(std::move(arena), bytes);
            },
            py::arg("bytes"))
        .def("close", &Arena::close);

    py::class_<Allocation>(module, "SharedMemoryAllocation", "Memory in the arena, until this object and all tensors over it are gone.",
                           py::buffer_protocol())
        .def_buffer([](Allocation& allocation) {
            return py::buffer_info(static_cast<std::uint8_t*>(allocation.data()), static_cast<py::ssize_t>(allocation.bytes()));
        });

    py::enum_<FailureKind>(module, "SharedMemoryFailure")
        .value("NONE", FailureKind::kNone)
        .value("MISMATCH", FailureKind::kMismatch)
        .value("TIMEOUT", FailureKind::kTimeout)
        .value("PEER_LOST", FailureKind::kPeerLost)
        .value("PEER_CLOSED", FailureKind::kPeerClosed)
        .value("CLOSED", FailureKind::kClosed)
        .value("OTHER", FailureKind::kOther);

    py::class_<Channel>(module, "SharedMemoryChannel", "A sequence of collective calls.")
        .def(py::init(&make_channel), py::arg("arena"), py::arg("rank"), py::arg("segments"), py::arg("names"), py::arg("watched"),
             py::arg("channel"), py::arg("piece_bytes"), py::arg("small_bytes"), py::arg("spin_seconds"), py::arg("isa"))
        .def("start", &start, py::arg("kind"), py::arg("op"), py::arg("dtype_code"), py::arg("dtype_bits"), py::arg("source"),
             py::arg("numel"), py::arg("tag"), py::arg("input"), py::arg("output"), py::arg("elsewhere") = py::tuple(),
             "elsewhere: (first element, count, address) of elements of own_share that are not in the tensor.")
        .def("others_have_called", &Channel::others_have_called)
        .def("own_share",
             [](const Channel& channel, std::uint64_t numel, int dtype_code, int dtype_bits) {
                 const Stretch share =
                     channel.own_share(numel, {static_cast<std::uint8_t>(dtype_code), static_cast<std::uint8_t>(dtype_bits)});
                 return py::make_tuple(share.begin, share.end);
             })
        .def("wait",
             [](Channel& channel, std::uint64_t number, double seconds) {
                 if (channel.is_finished(number)) return true;
                 return wait_serving_signals(seconds, [&](const TimeLimit& limit) { return channel.wait(number, limit); });
             })
        .def("wait_for_room",
             [](Channel& channel, double seconds) {
                 return wait_serving_signals(seconds, [&](const TimeLimit& limit) { return channel.wait_for_room(limit); });
             })
        .def("progress",
             [](Channel& channel) {
                 if (channel.is_quiet()) return;
                 const py::gil_scoped_release release;
                 channel.progress();
             })
        .def("is_finished", &Channel::is_finished)
        .def_property_readonly("failed", &Channel::failed)
        .def("failure",
             [](const Channel& channel) {
                 const Failure failure = channel.failure();
                 return py::make_tuple(failure.kind, to_list(failure.ranks), std::string(failure.message));
             })
        .def("abort",
             [](Channel& channel, FailureKind kind, const std::vector<std::size_t>& ranks, const std::string& message) {
                 const py::gil_scoped_release release;
                 channel.abort(kind, to_set(ranks), message);
             })
        .def("close", &Channel::close, py::call_guard<py::gil_scoped_release>());

    module.def("shared_memory_reduce", &reduce, "One pass of the reduction loops, for tests and benchmarks.");
}

#else

void bind_shared_memory(pybind11::module_&) {}

#endif  // __linux__

// The words in which calls appear in error messages.
#if defined(__linux__)

#include <iomanip>
#include <map>
#include <sstream>

#include "ddpcomm/shared_memory_call.h"
#include "ddpcomm/shared_memory_describe.h"

namespace ddpcomm {
namespace {

const char* kind_name(CollectiveKind kind) {
    switch (kind) {
        case CollectiveKind::kAllReduce: return "all_reduce";
        case CollectiveKind::kBroadcast: return "broadcast";
        case CollectiveKind::kAllGather: return "all_gather";
        case CollectiveKind::kReduceScatter: return "reduce_scatter";
        case CollectiveKind::kBarrier: break;
    }
    return "barrier";
}

const char* op_name(ReduceOp op) {
    switch (op) {
        case ReduceOp::kSum: return "sum";
        case ReduceOp::kAvg: return "avg";
        case ReduceOp::kMax: break;
    }
    return "max";
}

std::string dtype_name(Dtype dtype) {
    constexpr const char* kinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    const std::string kind = dtype.code < 7 ? kinds[dtype.code] : "type " + std::to_string(dtype.code) + " of bits ";
    return dtype.code == 6 ? kind : kind + std::to_string(dtype.bits);
}

// ddpcomm/comm/base.py, bucket_header: a digest of the layout, the number of buckets, and the bucket's, counted from 1.
std::string describe_tag(std::uint64_t tag) {
    std::ostringstream text;
    text << "bucket " << (tag & 0xFFFF) - 1 << " of " << (tag >> 16 & 0xFFFF) << " in layout " << std::hex << std::setw(8)
         << std::setfill('0') << (tag >> 32);
    return text.str();
}

// The number may be another rank's, and anything.
std::string rank_name(int rank, const Peers& peers) {
    if (rank < 0 || rank >= peers.count()) return "no rank (" + std::to_string(rank) + ")";
    return "rank " + std::to_string(peers.name(rank));
}

template <class Arguments>
std::string describe_arguments(const Arguments& call, const Peers& peers) {
    std::ostringstream text;
    text << kind_name(call.kind) << "(";
    if (call.kind == CollectiveKind::kAllReduce || call.kind == CollectiveKind::kReduceScatter) text << op_name(call.op) << ", ";
    if (call.kind == CollectiveKind::kBroadcast) text << "from " << rank_name(call.source, peers) << ", ";
    if (call.kind != CollectiveKind::kBarrier) {
        text << call.numel << " x " << dtype_name(call.dtype) << ", " << call.numel * call.dtype.bytes() << " bytes";
        if (call.tag != 0) text << ", " << describe_tag(call.tag);
    }
    text << ")";
    return text.str();
}

std::string rank_list(const std::vector<int>& ranks) {
    std::ostringstream text;
    text << (ranks.size() == 1 ? "rank " : "ranks ");
    for (std::size_t i = 0; i < ranks.size(); ++i) text << (i == 0 ? "" : ", ") << ranks[i];
    return text.str();
}

}  // namespace

std::string describe_ranks(const RankSet& ranks, const Peers& peers) {
    std::vector<int> list;
    for (int rank = 0; rank < peers.count(); ++rank) {
        if (ranks[static_cast<std::size_t>(rank)]) list.push_back(peers.name(rank));
    }
    return rank_list(list);
}

std::string Call::describe(const Peers& peers) const { return describe_arguments(arguments_, peers); }

std::string Call::describe_all(const Peers& peers) const {
    std::map<std::string, std::vector<int>> by_call;
    for (int rank = 0; rank < ranks_; ++rank) by_call[describe_arguments(descriptor(peers, rank), peers)].push_back(peers.name(rank));
    std::ostringstream text;
    for (const auto& [call, ranks] : by_call) text << (text.tellp() > 0 ? "; " : "") << rank_list(ranks) << " called " << call;
    return text.str();
}

}  // namespace ddpcomm

#endif  // __linux__

// The reduction loops, written once over the compiler's own vectors, which it lowers to the instruction set of the file that includes this.
//
// That file defines before: Floats widen_half(Shorts), Shorts narrow_half(Floats), Bytes join(Shorts, Shorts).
// Everything is in an unnamed namespace: each file must keep its own copy, compiled for its own instruction set.

namespace ddpcomm {
namespace {

template <class Vector>
Vector load_vector(const void* from) {
    Vector value;
    __builtin_memcpy(&value, from, sizeof(Vector));
    return value;
}

// One register of elements, as it is accumulated. Types that are accumulated as they are:
template <class T>
struct Lane {
    typedef T Vector __attribute__((vector_size(kWidth)));
    static constexpr bool is_float = static_cast<T>(0.5) != 0;
    Vector value;

    void load(const void* from) { value = load_vector<Vector>(from); }
    void multiply(double scale) {
        if (is_float) value = value * static_cast<T>(scale);
    }
    void add(const Lane& other) { value = value + other.value; }
    void maximum(const Lane& other) { value = (value > other.value) | (value != value) ? value : other.value; }
    Bytes result() const { return (Bytes)value; }
};

// 16-bit floats, accumulated as two registers of floats.
struct FloatPair {
    Floats first, second;

    void multiply(double scale) {
        first = first * static_cast<float>(scale);
        second = second * static_cast<float>(scale);
    }
    void add(const FloatPair& other) {
        first = first + other.first;
        second = second + other.second;
    }
    void maximum(const FloatPair& other) {
        first = (first > other.first) | (first != first) ? first : other.first;
        second = (second > other.second) | (second != second) ? second : other.second;
    }
};

// One half of the elements in either register.
struct Float16Lane : FloatPair {
    void load(const void* from) {
        first = widen_half(load_vector<Shorts>(from));
        second = widen_half(load_vector<Shorts>(static_cast<const char*>(from) + sizeof(Shorts)));
    }
    Bytes result() const { return join(narrow_half(first), narrow_half(second)); }
};

// A bfloat16 is the upper half of a float. Elements with even numbers are in `first`, those with odd ones in `second`, where they are in
// memory: nothing has to change places.
struct BFloat16Lane : FloatPair {
    static constexpr bool kLittleEndian = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    static_assert(kLittleEndian, "even elements are taken to be in the lower halves");

    void load(const void* from) {
        const Words pairs = load_vector<Words>(from);
        first = (Floats)(pairs << 16);
        second = (Floats)(pairs & 0xffff0000);
    }
    Bytes result() const { return (Bytes)((round(first) >> 16) | (round(second) & 0xffff0000)); }

    // The upper half is the result.
    static Words round(Floats value) {
        const Words bits = (Words)value;
        const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
        return value != value ? bits | 0x400000 : rounded;  // a NaN must stay one
    }
};

enum class Combine { kSum, kScaledSum, kMax };

template <class L, Combine combine>
void accumulate(L& total, const void* from, double scale) {
    L next;
    next.load(from);
    if (combine == Combine::kScaledSum) next.multiply(scale);
    if (combine == Combine::kMax) {
        total.maximum(next);
    } else {
        total.add(next);
    }
}

// kSources is the number of sources where the compiler shall know it, else 0.
template <class L, Combine combine, int kSources>
void reduce_vectors(const ReducePass& pass, std::size_t bytes) {
    constexpr std::size_t kUnroll = 4;
    constexpr std::size_t kStep = kUnroll * kWidth;
    const int sources = kSources ? kSources : pass.source_count;
    std::size_t at = 0;
    const auto step = [&](auto count) {
        constexpr std::size_t kCount = decltype(count)::value;
        L total[kCount];
        for (std::size_t i = 0; i < kCount; ++i) {
            total[i].load(static_cast<const char*>(pass.sources[0]) + at + i * kWidth);
            if (combine == Combine::kScaledSum) total[i].multiply(pass.scale);
        }
        for (int source = 1; source < sources; ++source) {
            const char* from = static_cast<const char*>(pass.sources[source]) + at;
            for (std::size_t i = 0; i < kCount; ++i) accumulate<L, combine>(total[i], from + i * kWidth, pass.scale);
        }
        for (std::size_t i = 0; i < kCount; ++i) {
            const Bytes value = total[i].result();
            for (int target = 0; target < pass.target_count; ++target) {
                __builtin_memcpy(static_cast<char*>(pass.targets[target]) + at + i * kWidth, &value, kWidth);
            }
        }
        at += kCount * kWidth;
    };
    while (at + kStep <= bytes) step(Count<kUnroll>{});
    while (at + kWidth <= bytes) step(Count<1>{});
}

// What is left after the last whole register, through one more, so that it is rounded by the same instructions.
template <class L, Combine combine>
void reduce_rest(const ReducePass& pass, std::size_t at, std::size_t bytes) {
    char rest[kWidth] = {};
    L total;
    __builtin_memcpy(rest, static_cast<const char*>(pass.sources[0]) + at, bytes);
    total.load(rest);
    if (combine == Combine::kScaledSum) total.multiply(pass.scale);
    for (int source = 1; source < pass.source_count; ++source) {
        __builtin_memcpy(rest, static_cast<const char*>(pass.sources[source]) + at, bytes);
        accumulate<L, combine>(total, rest, pass.scale);
    }
    const Bytes value = total.result();
    for (int target = 0; target < pass.target_count; ++target) {
        __builtin_memcpy(static_cast<char*>(pass.targets[target]) + at, &value, bytes);
    }
}

template <class L, Combine combine>
void reduce_all(const ReducePass& pass, std::size_t bytes) {
    if (pass.source_count == 2) {
        reduce_vectors<L, combine, 2>(pass, bytes);
    } else {
        reduce_vectors<L, combine, 0>(pass, bytes);
    }
    const std::size_t rest = bytes % kWidth;
    if (rest != 0) reduce_rest<L, combine>(pass, bytes - rest, rest);
}

template <class T, class L, bool kMax>
void reduce(const ReducePass& pass) {
    const std::size_t bytes = pass.count * sizeof(T);
    if (kMax) {
        reduce_all<L, Combine::kMax>(pass, bytes);
    } else if (pass.scale == 1.0) {
        reduce_all<L, Combine::kSum>(pass, bytes);
    } else {
        reduce_all<L, Combine::kScaledSum>(pass, bytes);
    }
}

template <class T, class L = Lane<T>>
constexpr ReducePair make_pair() {
    return {reduce<T, L, false>, reduce<T, L, true>};
}

constexpr ReduceTable make_reduce_table() {
    return {make_pair<double>(),       make_pair<float>(),        make_pair<Float16, Float16Lane>(), make_pair<BFloat16, BFloat16Lane>(),
            make_pair<std::int64_t>(), make_pair<std::int32_t>(), make_pair<std::int16_t>(),         make_pair<std::int8_t>(),
            make_pair<std::uint8_t>()};
}

}  // namespace
}  // namespace ddpcomm

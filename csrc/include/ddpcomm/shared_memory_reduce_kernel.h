// The reduction loops, written once over the compiler's own vectors, which it lowers to the instruction set of the file that includes this.
//
// That file defines before: Floats widen_half(Shorts), Shorts narrow_half(Floats), store_streaming(char*, Bytes), fence_streaming().
// Everything is in an unnamed namespace: each file must keep its own copy, compiled for its own instruction set.

namespace ddpcomm {
namespace {

// `widen` and `narrow` for bfloat16: the upper half of a float.
struct BFloat16Codec {
    static Floats widen(Shorts bits) { return (Floats)(__builtin_convertvector(bits, Words) << 16); }
    static Shorts narrow(Floats value) {
        const Words bits = (Words)value;
        const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const Words quiet = (bits >> 16) | 0x40;  // a NaN must stay one
        return __builtin_convertvector(value != value ? quiet : rounded, Shorts);
    }
};

struct Float16Codec {
    static Floats widen(Shorts bits) { return widen_half(bits); }
    static Shorts narrow(Floats value) { return narrow_half(value); }
};

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

// The 16-bit floats, accumulated as floats.
template <class Codec>
struct HalfLane {
    Floats low, high;

    void load(const void* from) {
        low = Codec::widen(load_vector<Shorts>(from));
        high = Codec::widen(load_vector<Shorts>(static_cast<const char*>(from) + sizeof(Shorts)));
    }
    void multiply(double scale) {
        low = low * static_cast<float>(scale);
        high = high * static_cast<float>(scale);
    }
    void add(const HalfLane& other) {
        low = low + other.low;
        high = high + other.high;
    }
    void maximum(const HalfLane& other) {
        low = (low > other.low) | (low != low) ? low : other.low;
        high = (high > other.high) | (high != high) ? high : other.high;
    }
    Bytes result() const {
        const Shorts halves[2] = {Codec::narrow(low), Codec::narrow(high)};
        return load_vector<Bytes>(halves);
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

inline void store(char* to, Bytes value, bool stream) {
    if (stream) {
        store_streaming(to, value);
    } else {
        __builtin_memcpy(to, &value, kWidth);
    }
}

// kSources is the number of sources where the compiler shall know it, else 0.
template <class L, Combine combine, int kSources, bool kStream>
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
                store(static_cast<char*>(pass.targets[target]) + at + i * kWidth, value, kStream);
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

template <class L, Combine combine, bool kStream>
void reduce_all(const ReducePass& pass, std::size_t bytes) {
    if (pass.source_count == 2) {
        reduce_vectors<L, combine, 2, kStream>(pass, bytes);
    } else {
        reduce_vectors<L, combine, 0, kStream>(pass, bytes);
    }
    if (kStream) fence_streaming();
    const std::size_t rest = bytes % kWidth;
    if (rest != 0) reduce_rest<L, combine>(pass, bytes - rest, rest);
}

inline bool all_aligned(const ReducePass& pass) {
    for (int target = 0; target < pass.target_count; ++target) {
        if (reinterpret_cast<std::uintptr_t>(pass.targets[target]) % kWidth) return false;
    }
    return true;
}

template <class T, class L, bool kMax>
void reduce(const ReducePass& pass) {
    const std::size_t bytes = pass.count * sizeof(T);
    const bool stream = pass.stream && all_aligned(pass);
    constexpr Combine plain = kMax ? Combine::kMax : Combine::kSum;
    constexpr Combine scaled = kMax ? Combine::kMax : Combine::kScaledSum;
    if (pass.scale == 1.0) {
        stream ? reduce_all<L, plain, true>(pass, bytes) : reduce_all<L, plain, false>(pass, bytes);
    } else {
        stream ? reduce_all<L, scaled, true>(pass, bytes) : reduce_all<L, scaled, false>(pass, bytes);
    }
}

template <class T, class L = Lane<T>>
constexpr ReducePair make_pair() {
    return {reduce<T, L, false>, reduce<T, L, true>};
}

constexpr ReduceTable make_reduce_table() {
    return {make_pair<double>(),
            make_pair<float>(),
            make_pair<Float16, HalfLane<Float16Codec>>(),
            make_pair<BFloat16, HalfLane<BFloat16Codec>>(),
            make_pair<std::int64_t>(),
            make_pair<std::int32_t>(),
            make_pair<std::int16_t>(),
            make_pair<std::int8_t>(),
            make_pair<std::uint8_t>()};
}

}  // namespace
}  // namespace ddpcomm

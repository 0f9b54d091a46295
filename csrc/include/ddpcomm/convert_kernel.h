// The conversion loops, written once over a `Lanes<C>` that each instruction set's file defines before it includes this one.
//
// Lanes<float> and Lanes<double> have: `width`; `load(const From*)` from every type to lanes of C; `store(To*, lanes)`;
// `store_streamed(To*, lanes)` for the wide types, past the caches, to addresses that are multiples of 64; `multiply`, `add`, `fill(C)`.
// Other pointers need not be aligned.
//
// Everything here is in an unnamed namespace: each file must keep its own copy, compiled for its own instruction set.

namespace ddpcomm {
namespace {

template <class A, class B>
struct ComputeType {
    using type = float;
};
template <class B>
struct ComputeType<double, B> {
    using type = double;
};
template <class A>
struct ComputeType<A, double> {
    using type = double;
};
template <>
struct ComputeType<double, double> {
    using type = double;
};

enum class Store { kPlain, kStreamed, kAccumulate };

template <class L, Store how, class From, class To, class Factor>
inline void convert_lanes(const From* from, To* to, Factor factor) {
    auto value = L::multiply(L::load(from), factor);
    if constexpr (how == Store::kAccumulate) value = L::add(L::load(static_cast<const To*>(to)), value);
    if constexpr (how == Store::kStreamed) {
        L::store_streamed(to, value);
    } else {
        L::store(to, value);
    }
}

// Fewer elements than there are lanes: through copies, so that they are rounded by the same instructions.
template <class L, Store how, class From, class To, class Factor>
inline void convert_rest(const From* from, To* to, std::size_t count, Factor factor) {
    From source[L::width] = {};
    To result[L::width] = {};
    __builtin_memcpy(source, from, count * sizeof(From));
    if constexpr (how == Store::kAccumulate) __builtin_memcpy(result, to, count * sizeof(To));
    convert_lanes<L, how == Store::kStreamed ? Store::kPlain : how>(source, result, factor);
    __builtin_memcpy(to, result, count * sizeof(To));
}

template <class From, class To, Store how>
void convert(const void* from_bytes, void* to_bytes, std::size_t count, double scale) {
    using C = typename ComputeType<From, To>::type;
    using L = Lanes<C>;
    const From* from = static_cast<const From*>(from_bytes);
    To* to = static_cast<To*>(to_bytes);
    const auto factor = L::fill(static_cast<C>(scale));
    if constexpr (how == Store::kStreamed) {
        const std::size_t gap = (64 - reinterpret_cast<std::uintptr_t>(to) % 64) % 64;
        if (gap % sizeof(To) != 0) return convert<From, To, Store::kPlain>(from, to, count, scale);
        std::size_t head = gap / sizeof(To);
        if (head > count) head = count;
        convert<From, To, Store::kPlain>(from, to, head, scale);
        from += head;
        to += head;
        count -= head;
    }
    std::size_t i = 0;
    for (; i + L::width <= count; i += L::width) convert_lanes<L, how>(from + i, to + i, factor);
    if (i < count) convert_rest<L, how>(from + i, to + i, count - i, factor);
}

// ---- tables ----

template <class From>
constexpr void fill_convert(ConvertFunction* row) {
    row[0] = convert<From, float, Store::kPlain>;
    row[1] = convert<From, double, Store::kPlain>;
    row[2] = convert<From, BFloat16, Store::kPlain>;
    row[3] = convert<From, Float16, Store::kPlain>;
    row[4] = convert<From, Float8E4M3, Store::kPlain>;
    row[5] = convert<From, Float8E5M2, Store::kPlain>;
}

template <class From, Store how>
constexpr void fill_wide(ConvertFunction* row) {
    row[0] = convert<From, float, how>;
    row[1] = convert<From, double, how>;
    row[2] = convert<From, BFloat16, how>;
    row[3] = convert<From, Float16, how>;
}

template <Store how>
constexpr void fill_wide_table(ConvertFunction (*rows)[kWideTypes]) {
    fill_wide<float, how>(rows[0]);
    fill_wide<double, how>(rows[1]);
    fill_wide<BFloat16, how>(rows[2]);
    fill_wide<Float16, how>(rows[3]);
}

constexpr void fill_convert_tables(KernelTable& table) {
    fill_convert<float>(table.convert[0]);
    fill_convert<double>(table.convert[1]);
    fill_convert<BFloat16>(table.convert[2]);
    fill_convert<Float16>(table.convert[3]);
    fill_convert<Float8E4M3>(table.convert[4]);
    fill_convert<Float8E5M2>(table.convert[5]);
    fill_wide_table<Store::kStreamed>(table.streamed);
    fill_wide_table<Store::kAccumulate>(table.accumulate);
}

}  // namespace
}  // namespace ddpcomm

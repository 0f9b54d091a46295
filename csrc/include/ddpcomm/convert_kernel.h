// The conversion loops, written once over a `Lanes<C>` that each instruction set's file defines before it includes this one.
//
// Lanes<float> and Lanes<double> have: `width`; `load(const S*)` from every type to lanes of C; `store(D*, lanes)`; `multiply(lanes, C)`.
// No pointer needs to be aligned.
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

template <class From, class To>
void convert(const void* from_bytes, void* to_bytes, std::size_t count, double scale) {
    using C = typename ComputeType<From, To>::type;
    using L = Lanes<C>;
    const From* from = static_cast<const From*>(from_bytes);
    To* to = static_cast<To*>(to_bytes);
    const C factor = static_cast<C>(scale);
    std::size_t i = 0;
    for (; i + L::width <= count; i += L::width) {
        L::store(to + i, L::multiply(L::load(from + i), factor));
    }
    if (i < count) {  // the rest goes through one more set of lanes, so that it is rounded by the same instructions
        From rest[L::width] = {};
        To result[L::width];
        __builtin_memcpy(rest, from + i, (count - i) * sizeof(From));
        L::store(result, L::multiply(L::load(rest), factor));
        __builtin_memcpy(to + i, result, (count - i) * sizeof(To));
    }
}

constexpr ConvertTable make_convert_table(StreamFunction stream) {
    return {{{convert<float, float>, convert<float, double>, convert<float, BFloat16>, convert<float, Float16>},
             {convert<double, float>, convert<double, double>, convert<double, BFloat16>, convert<double, Float16>},
             {convert<BFloat16, float>, convert<BFloat16, double>, convert<BFloat16, BFloat16>, convert<BFloat16, Float16>},
             {convert<Float16, float>, convert<Float16, double>, convert<Float16, BFloat16>, convert<Float16, Float16>}},
            stream};
}

}  // namespace
}  // namespace ddpcomm

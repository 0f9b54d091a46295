// Sum of squares and count of non-finite values, over the same `Lanes<C>` as convert_kernel.h, which also have `count_nonfinite(lanes)`.

namespace ddpcomm {
namespace {

template <class T>
Norm norm(const void* bytes, std::size_t count) {
    using C = typename ComputeType<T, T>::type;
    using L = Lanes<C>;
    constexpr std::size_t kSums = 16;
    constexpr std::size_t kSteps = kSums / L::width;
    const T* values = static_cast<const T*>(bytes);
    T rest[kSums] = {};
    const std::size_t whole = count / kSums * kSums;
    if (whole < count) __builtin_memcpy(rest, values + whole, (count - whole) * sizeof(T));

    decltype(L::fill(C{})) sums[kSteps];
    for (std::size_t step = 0; step < kSteps; ++step) sums[step] = L::fill(C{});
    std::int64_t nonfinite = 0;
    for (std::size_t i = 0; i < count; i += kSums) {
        const T* group = i < whole ? values + i : rest;
        for (std::size_t step = 0; step < kSteps; ++step) {
            const auto value = L::load(group + step * L::width);
            sums[step] = L::add(sums[step], L::multiply(value, value));
            nonfinite += L::count_nonfinite(value);
        }
    }
    C lanes[kSums];
    for (std::size_t step = 0; step < kSteps; ++step) L::store(lanes + step * L::width, sums[step]);
    for (std::size_t distance = kSums / 2; distance > 0; distance /= 2) {
        for (std::size_t i = 0; i < distance; ++i) lanes[i] += lanes[i + distance];
    }
    return {lanes[0], nonfinite};
}

constexpr void fill_norm_table(KernelTable& table) {
    table.norm[0] = norm<float>;
    table.norm[1] = norm<double>;
    table.norm[2] = norm<BFloat16>;
    table.norm[3] = norm<Float16>;
}

}  // namespace
}  // namespace ddpcomm

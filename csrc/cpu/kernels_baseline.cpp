// Kernels in plain C++: the only ones on processors other than x86-64, and what the others are tested against.
#include "ddpcomm/kernel_table.h"
#include "ddpcomm/scalar_convert.h"

namespace ddpcomm {
namespace {

template <class C>
struct Lanes {
    static constexpr std::size_t width = 1;

    static C fill(C value) { return value; }

    template <class From>
    static C load(const From* from) {
        From value;
        __builtin_memcpy(&value, from, sizeof(From));
        return widen(value);
    }
    template <class To>
    static void store(To* to, C value) {
        To result;
        narrow(value, result);
        __builtin_memcpy(to, &result, sizeof(To));
    }
    template <class To>
    static void store_streamed(To* to, C value) {
        store(to, value);
    }

    static C multiply(C value, C factor) { return value * factor; }
    static C add(C a, C b) { return a + b; }
    static std::int64_t count_nonfinite(C value) { return value - value == C{} ? 0 : 1; }
};

void stream(const void* from, void* to, std::size_t bytes) { __builtin_memcpy(to, from, bytes); }

}  // namespace
}  // namespace ddpcomm

#include "ddpcomm/all_kernels.h"

namespace ddpcomm {

const KernelTable& kernel_table_baseline() {
    static constexpr KernelTable table = make_kernel_table(stream);
    return table;
}

}  // namespace ddpcomm

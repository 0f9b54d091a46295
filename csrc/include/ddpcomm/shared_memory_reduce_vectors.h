// The vectors that shared_memory_reduce_kernel.h works on: as wide as the registers of the instruction set, which the file that includes
// this has chosen above, with kWidth (in bytes).

namespace ddpcomm {
namespace {

typedef char Bytes __attribute__((vector_size(kWidth)));
typedef float Floats __attribute__((vector_size(kWidth)));
typedef std::uint32_t Words __attribute__((vector_size(kWidth)));
typedef std::uint16_t Shorts __attribute__((vector_size(kWidth / 2)));

template <std::size_t number>
struct Count {
    static constexpr std::size_t value = number;
};

}  // namespace
}  // namespace ddpcomm

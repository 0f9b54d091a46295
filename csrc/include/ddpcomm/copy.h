// Copies one stretch of elements from one array to another, converting and scaling on the way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ddpcomm/kernel_table.h"

namespace ddpcomm {

enum class Write {
    kPlain,
    kStreamed,    // past the caches, where that is made for the types
    kAccumulate,  // adds to what is there
};

// Chooses once per pair of types; then each stretch is one call.
class Copier {
  public:
    Copier(Dtype from, Dtype to, double scale, Write write, Isa isa);

    void operator()(const char* from, char* to, std::int64_t count) const;

    // Between any two of float32, float64, bfloat16, float16 and (not accumulating) the two of 8 bits; complex64 and complex128 to
    // themselves; any type to itself when scale is 1 and nothing is accumulated.
    static bool supports(Dtype from, Dtype to, double scale, bool accumulate);

  private:
    ConvertFunction convert_ = nullptr;  // null: bits are copied as they are
    StreamFunction stream_ = nullptr;    // null: by memcpy
    double scale_;
    std::size_t element_bytes_;
    std::size_t parts_ = 1;  // real numbers in one element
};

}  // namespace ddpcomm

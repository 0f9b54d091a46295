// Copies one stretch of elements from one array to another, converting and scaling on the way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ddpcomm/convert.h"

namespace ddpcomm {

// Chooses once per pair of types; then each stretch is one call.
class Copier {
  public:
    // stream: results bypass the caches. Supported pairs: see `supports`.
    Copier(Dtype from, Dtype to, double scale, bool stream, Isa isa);

    void operator()(const char* from, char* to, std::int64_t count) const;

    // Between any two of float32, float64, bfloat16 and float16; complex to the same complex; any type to itself when scale is 1.
    static bool supports(Dtype from, Dtype to, double scale);

  private:
    ConvertFunction convert_ = nullptr;  // null: bits are copied as they are
    StreamFunction stream_ = nullptr;    // null: ordinary stores
    double scale_;
    std::size_t from_bytes_, to_bytes_;
    std::size_t parts_ = 1;  // real numbers in one element
};

}  // namespace ddpcomm

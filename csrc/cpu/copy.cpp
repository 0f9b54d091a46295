#include "ddpcomm/copy.h"

#include <cstring>

namespace ddpcomm {
namespace {

// A complex number is scaled as two real ones.
Dtype real_type(Dtype dtype) {
    if (dtype == kComplex64) return kFloat32;
    if (dtype == kComplex128) return kFloat64;
    return dtype;
}

bool is_wide(Dtype dtype) { return float_index(dtype) >= 0 && float_index(dtype) < kWideTypes; }

}  // namespace

bool Copier::supports(Dtype from, Dtype to, double scale, bool accumulate) {
    if (from == to && scale == 1.0 && !accumulate) return true;
    if (from == to && real_type(from) != from) return true;
    if (accumulate) return is_wide(from) && is_wide(to);
    return float_index(from) >= 0 && float_index(to) >= 0;
}

Copier::Copier(Dtype from, Dtype to, double scale, Write write, Isa isa) : scale_(scale), element_bytes_(to.bytes()) {
    const KernelTable& table = kernel_table(isa);
    if (from == to && scale == 1.0 && write != Write::kAccumulate) {
        if (write == Write::kStreamed) stream_ = table.stream;
        return;
    }
    parts_ = to.bytes() / real_type(to).bytes();
    const int row = float_index(real_type(from)), column = float_index(real_type(to));
    if (write == Write::kAccumulate) {
        convert_ = table.accumulate[row][column];
    } else if (write == Write::kStreamed && row < kWideTypes && column < kWideTypes) {
        convert_ = table.streamed[row][column];
    } else {
        convert_ = table.convert[row][column];
    }
}

void Copier::operator()(const char* from, char* to, std::int64_t count) const {
    const auto elements = static_cast<std::size_t>(count);
    if (convert_) {
        convert_(from, to, elements * parts_, scale_);
    } else if (from == to) {
        return;
    } else if (stream_) {
        stream_(from, to, elements * element_bytes_);
    } else {
        std::memcpy(to, from, elements * element_bytes_);
    }
}

}  // namespace ddpcomm

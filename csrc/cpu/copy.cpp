#include "ddpcomm/copy.h"

#include <algorithm>
#include <cstring>

namespace ddpcomm {
namespace {

// A complex number is scaled as two real ones.
Dtype real_type(Dtype dtype) {
    if (dtype == kComplex64) return kFloat32;
    if (dtype == kComplex128) return kFloat64;
    return dtype;
}

// Converted results that are to bypass the caches are put together here first; it stays in the first-level cache.
constexpr std::size_t kStagingBytes = 4096;

}  // namespace

bool Copier::supports(Dtype from, Dtype to, double scale) {
    if (from == to && (scale == 1.0 || real_type(from) != from)) return true;
    return float_type_index(from) >= 0 && float_type_index(to) >= 0;
}

Copier::Copier(Dtype from, Dtype to, double scale, bool stream, Isa isa) : scale_(scale) {
    const ConvertTable& table = convert_table(isa);
    if (from != to || scale != 1.0) {
        from = real_type(from);
        const std::size_t parts = to.bytes() / real_type(to).bytes();
        to = real_type(to);
        convert_ = table.convert[float_type_index(from)][float_type_index(to)];
        parts_ = parts;
    }
    from_bytes_ = from.bytes();
    to_bytes_ = to.bytes();
    if (stream) stream_ = table.stream;
}

void Copier::operator()(const char* from, char* to, std::int64_t count) const {
    const std::size_t elements = static_cast<std::size_t>(count) * parts_;
    if (!convert_) {
        if (from == to) return;
        if (stream_) {
            stream_(from, to, elements * to_bytes_);
        } else {
            std::memcpy(to, from, elements * to_bytes_);
        }
    } else if (!stream_) {
        convert_(from, to, elements, scale_);
    } else {
        alignas(64) char staging[kStagingBytes];
        const std::size_t step = kStagingBytes / to_bytes_;
        for (std::size_t i = 0; i < elements; i += step) {
            const std::size_t now = std::min(step, elements - i);
            convert_(from + i * from_bytes_, staging, now, scale_);
            stream_(staging, to + i * to_bytes_, now * to_bytes_);
        }
    }
}

}  // namespace ddpcomm

// A libFuzzer target: what csrc/ reads of a segment that came from elsewhere, and of the layout of a buffer. The input is cut into the
// numbers that the checks are asked about; whatever they let pass is then used, on memory that is no larger than they were told.
//
// With clang: clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -Icsrc/include tests/native/fuzz_segment.cpp
//     csrc/cpu/shared_memory_header.cpp csrc/cpu/layout.cpp -o fuzz_segment && ./fuzz_segment -max_len=512
// Without: fuzz_driver.cpp makes the inputs.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "check.h"
#include "ddpcomm/layout.h"
#include "ddpcomm/shared_memory_header.h"

using namespace ddpcomm;

namespace {

class Input {
  public:
    Input(const std::uint8_t* data, std::size_t size) : data_(data), size_(size) {}
    template <class T>
    T take() {
        T value{};
        const std::size_t bytes = size_ < sizeof(T) ? size_ : sizeof(T);
        if (bytes != 0) std::memcpy(&value, data_, bytes);
        data_ += bytes;
        size_ -= bytes;
        return value;
    }
    bool empty() const { return size_ == 0; }
    const std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }

  private:
    const std::uint8_t* data_;
    std::size_t size_;
};

void header(Input input) {
    const auto capacity = input.take<std::uint64_t>();
    const auto token = input.take<SegmentToken>();
    const std::unique_ptr<std::uint8_t[]> exact(new std::uint8_t[input.size()]);
    if (!input.empty()) std::memcpy(exact.get(), input.data(), input.size());
    const std::string wrong = check_header(exact.get(), input.size(), capacity, token);
    if (wrong.empty()) {
        const SegmentHeader expected = make_header(capacity, token);
        CHECK(std::memcmp(exact.get(), &expected, sizeof(expected)) == 0);
        CHECK(capacity >= kReservedBytes && capacity <= kLargestCapacity);
    }
}

void file(Input input) {
    const SegmentFile file{input.take<mode_t>(), input.take<uid_t>(), input.take<std::int64_t>(), input.take<int>()};
    const auto capacity = input.take<std::uint64_t>();
    const auto user = input.take<uid_t>();
    if (check_file(file, capacity, user).empty()) {
        CHECK(file.owner == user && static_cast<std::uint64_t>(file.bytes) == capacity && (file.mode & 0177) == 0);
    }
}

void data_range(Input input) {
    DataRange range{};
    range.numel = input.take<std::uint64_t>();
    range.item_bytes = input.take<std::uint8_t>() % 33;
    range.rows = input.take<std::uint8_t>();
    range.staged = input.take<std::uint8_t>() % 2 != 0;
    range.buffer_bytes = input.take<std::uint64_t>();
    range.buffers = input.take<std::uint8_t>() % 4;
    const auto offsets = input.take<std::array<std::uint64_t, kStagingBuffers>>();
    const std::uint64_t capacity = input.take<std::uint64_t>();
    if (!lies_within(range, offsets, capacity) || range.numel == 0) return;
    const std::size_t used = range.staged ? (range.buffers < kStagingBuffers ? range.buffers : kStagingBuffers) : 1;
    for (std::size_t i = 0; i < used; ++i) {
        const unsigned __int128 bytes =
            range.staged ? range.buffer_bytes : static_cast<unsigned __int128>(range.numel) * range.item_bytes * range.rows;
        CHECK(offsets[i] >= kReservedBytes && static_cast<unsigned __int128>(offsets[i]) + bytes <= capacity);
    }
}

void layout(Input input) {
    Layout layout{{}, {}, input.take<std::int64_t>(), kFloat32};
    const std::size_t extra = input.take<std::uint8_t>() % 2;
    const bool small = input.take<std::uint8_t>() % 2 != 0;
    if (small) layout.total_numel = static_cast<std::int64_t>(static_cast<std::uint64_t>(layout.total_numel) % 300);
    while (!input.empty() && layout.numels.size() < 40) {
        layout.numels.push_back(small ? input.take<std::int8_t>() : input.take<std::int64_t>());
        layout.offsets.push_back(small ? input.take<std::int16_t>() : input.take<std::int64_t>());
    }
    if (extra != 0) layout.offsets.push_back(0);
    try {
        layout.check();
    } catch (const std::invalid_argument&) {
        return;
    }
    CHECK(layout.numels.size() == layout.offsets.size());
    const bool fits = layout.total_numel >= 0 && layout.total_numel <= 1000;
    const std::unique_ptr<float[]> buffer(fits ? new float[static_cast<std::size_t>(layout.total_numel)]() : nullptr);
    for (std::size_t i = 0; i < layout.count(); ++i) {
        CHECK(layout.offsets[i] >= 0 && layout.numels[i] >= 0 && layout.offsets[i] + layout.numels[i] <= layout.total_numel);
        for (std::int64_t j = 0; fits && j < layout.numels[i]; ++j) CHECK(buffer[static_cast<std::size_t>(layout.offsets[i] + j)]++ == 0);
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    if (size == 0) return 0;
    const Input input(data + 1, size - 1);
    switch (data[0] % 4) {
        case 0: header(input); break;
        case 1: file(input); break;
        case 2: data_range(input); break;
        default: layout(input); break;
    }
    return 0;
}

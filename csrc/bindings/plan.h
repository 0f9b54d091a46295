// What every operation between tensors and a flat buffer shares: the layout, and the reading and checking of a call's tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ddpcomm/layout.h"
#include "tensor.h"

namespace ddpcomm {

enum class Direction { kIntoBuffer, kOutOfBuffer };

class Plan {
  public:
    // dtype: (code, bits) of the buffer. instruction_set: empty for the best.
    Plan(std::shared_ptr<TensorReader> reader, std::vector<std::int64_t> numels, std::vector<std::int64_t> offsets,
         std::int64_t total_numel, std::pair<int, int> dtype, const std::string& instruction_set);

  protected:
    // Work below this size keeps the interpreter's lock: handing it over can cost more than the copy.
    static constexpr std::int64_t kReleaseLockBytes = 256 << 10;

    // A dense tensor of this dtype and size, on any device.
    TensorView read_flat(pybind11::handle tensor, const char* name, Dtype dtype, std::int64_t numel) const;

    // The memory of such a tensor on the CPU.
    void* read_buffer(pybind11::handle tensor, const char* name, Dtype dtype, std::int64_t numel) const;
    void* read_buffer(pybind11::handle tensor) const { return read_buffer(tensor, "buffer", layout_.dtype, layout_.total_numel); }

    // The memory of a call's tensors, on `device`, checked against the layout. `buffer`: where the flat side lies; a tensor may overlap it
    // at its own place only. Throws before anything is written.
    std::vector<Piece> read_pieces(pybind11::handle tensors, const void* buffer, double scale, Direction direction, bool accumulate,
                                   Device device = {dlpack::kCpu, 0}) const;

    // The same, for kernels that take addresses: for each dtype that occurs, ((code, bits), addresses). In place of a tensor that is not
    // there stands 0 in the first entry and -1 in the others; -1 in place of one of another dtype. One entry at least.
    pybind11::list read_addresses(pybind11::handle tensors, const void* buffer, double scale, Direction direction, bool accumulate,
                                  Device device) const;

    Execution execution(int threads) const { return {threads, isa_}; }

    template <class Work>
    auto run(Work work) const {
        if (layout_.total_numel * static_cast<std::int64_t>(layout_.dtype.bytes()) < kReleaseLockBytes) return work();
        const pybind11::gil_scoped_release unlocked;
        return work();
    }

    Layout layout_;

  private:
    void check_piece(std::size_t i, const TensorView& view, const void* buffer, double scale, Direction direction, bool accumulate,
                     Device device) const;

    std::shared_ptr<TensorReader> reader_;
    Isa isa_;
};

}  // namespace ddpcomm

// Reads where a torch tensor's elements lie, without libtorch.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "ddpcomm/dtype.h"
#include "ddpcomm/span.h"
#include "dlpack.h"

namespace ddpcomm {

struct Device {
    std::int32_t type;  // as in DLPack
    std::int32_t index;

    bool is_cpu() const { return type == dlpack::kCpu; }
    bool operator!=(const Device& other) const { return type != other.type || (!is_cpu() && index != other.index); }
};

struct TensorView {
    void* data;
    Dtype dtype;
    std::int64_t numel;
    Device device;
    bool dense;  // its elements fill a stretch of memory, without gap or overlap, in any order of dimensions
};

// Shape, strides, dtype and device, in memory that somebody else keeps.
struct TensorKind {
    Dtype dtype;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t ndim;
    const std::int64_t* shape;
    const std::int64_t* strides;  // that of a dimension of size 1 or less is never taken
};

// What another tensor is compared with. `complete` is false where that can't be told fast: nothing matches then.
struct TensorDescription {
    bool complete = false;
    const void* data = nullptr;
    Dtype dtype{};
    std::int32_t device_type = 0;
    std::int32_t device_id = 0;
    std::vector<std::int64_t> shape;
    std::vector<std::int64_t> strides;

    TensorKind kind() const;
};

// Two ways to the same facts. Through DLPack's C interface a tensor takes some 15 ns; through attributes and methods (torch 2.9, which has
// no such interface) some 300 ns.
class TensorReader {
  public:
    // tensor_type: torch.Tensor. dtypes: torch.dtype -> (code, bits), for reading by attributes.
    TensorReader(pybind11::type tensor_type, pybind11::dict dtypes, bool use_dlpack);

    // Throws TypeError for anything but a dense-layout tensor.
    TensorView read(PyObject* object) const;

    // Through DLPack alone.
    TensorDescription describe(PyObject* object) const;

    // Where a tensor's elements lie. Empty for those that have no memory of their own, such as sparse ones and subclasses that wrap others.
    Span span(PyObject* object) const;

    // The stretches that its elements fill, for a tensor that has a span. Nothing if there are too many.
    std::vector<Span> runs(PyObject* object) const;

    // Whether a tensor is of this kind, and has memory where it needs some. Through DLPack alone, else false. `span` becomes as above.
    bool matches(PyObject* object, const TensorKind& kind, Span& span) const;

    // Whether a tensor is all that a description says, and lies where it says. Through DLPack alone, else false.
    bool lies_at(PyObject* object, const TensorDescription& place) const;

    bool uses_dlpack() const { return api_ != nullptr; }

  private:
    TensorView read_attributes(PyObject* object) const;
    Span span_by_attributes(PyObject* object) const;

    const dlpack::ExchangeApi* api_ = nullptr;
    pybind11::type tensor_type_;
    pybind11::dict dtypes_;
};

}  // namespace ddpcomm

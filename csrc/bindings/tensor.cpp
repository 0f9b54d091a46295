#include "tensor.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

namespace py = pybind11;

namespace ddpcomm {
namespace {

bool is_dense(std::int32_t ndim, const std::int64_t* shape, const std::int64_t* strides, std::int64_t numel) {
    if (numel < 2) return true;
    std::int64_t expected = 1;
    bool contiguous = true;
    for (std::int32_t i = ndim - 1; i >= 0 && contiguous; --i) {
        if (shape[i] != 1) contiguous = strides[i] == expected;
        expected *= shape[i];
    }
    if (contiguous) return true;
    std::vector<std::array<std::int64_t, 2>> dimensions;  // stride, size
    for (std::int32_t i = 0; i < ndim; ++i) {
        if (shape[i] != 1) dimensions.push_back({strides[i], shape[i]});
    }
    std::sort(dimensions.begin(), dimensions.end());
    expected = 1;
    for (const auto& [stride, size] : dimensions) {
        if (stride != expected) return false;
        expected *= size;
    }
    return true;
}

void* data_of(const dlpack::Tensor& tensor) { return static_cast<char*>(tensor.data) + tensor.byte_offset; }

bool is_empty(const dlpack::Tensor& tensor) {
    return std::any_of(tensor.shape, tensor.shape + tensor.ndim, [](std::int64_t size) { return size == 0; });
}

Span span_of_tensor(const dlpack::Tensor& tensor) {
    if (!tensor.data) return {};
    return span_of(data_of(tensor), tensor.dtype_bits / 8, tensor.ndim, tensor.shape, tensor.strides);
}

const dlpack::ExchangeApi* find_api(py::handle tensor_type) {
    if (!py::hasattr(tensor_type, "__dlpack_c_exchange_api__")) return nullptr;
    const py::object capsule = tensor_type.attr("__dlpack_c_exchange_api__");
    auto* api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!api) throw py::error_already_set();
    while (api && api->major_version != dlpack::kMajorVersion) api = api->previous;
    return api;
}

bool agrees(const dlpack::Tensor& tensor, const TensorKind& kind) {
    if (tensor.dtype_code != kind.dtype.code || tensor.dtype_bits != kind.dtype.bits || tensor.device_type != kind.device_type ||
        tensor.device_id != kind.device_id || tensor.ndim != kind.ndim)
        return false;
    for (std::int32_t i = 0; i < tensor.ndim; ++i) {
        if (tensor.shape[i] != kind.shape[i] || (tensor.shape[i] > 1 && tensor.strides[i] != kind.strides[i])) return false;
    }
    return true;
}

Device device_of(py::handle tensor) {
    if (tensor.attr("is_cpu").cast<bool>()) return {dlpack::kCpu, 0};
    const std::int32_t type = tensor.attr("is_cuda").cast<bool>() ? dlpack::kCuda : dlpack::kOther;
    return {type, tensor.attr("get_device")().cast<std::int32_t>()};
}

}  // namespace

TensorReader::TensorReader(py::type tensor_type, py::dict dtypes, bool use_dlpack)
    : tensor_type_(std::move(tensor_type)), dtypes_(std::move(dtypes)) {
    if (use_dlpack) api_ = find_api(tensor_type_);
}

TensorView TensorReader::read(PyObject* object) const {
    if (!PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_type_.ptr())))
        throw py::type_error(std::string("expected a tensor, got ") + Py_TYPE(object)->tp_name);
    if (!api_) return read_attributes(object);
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) throw py::error_already_set();
    std::int64_t numel = 1;
    for (std::int32_t i = 0; i < tensor.ndim; ++i) numel *= tensor.shape[i];
    return {data_of(tensor),
            {tensor.dtype_code, tensor.dtype_bits},
            numel,
            {tensor.device_type, tensor.device_id},
            is_dense(tensor.ndim, tensor.shape, tensor.strides, numel)};
}

TensorDescription TensorReader::describe(PyObject* object) const {
    dlpack::Tensor tensor;
    if (!api_) return {};
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
        PyErr_Clear();
        return {};
    }
    return {true,
            data_of(tensor),
            {tensor.dtype_code, tensor.dtype_bits},
            tensor.device_type,
            tensor.device_id,
            {tensor.shape, tensor.shape + tensor.ndim},
            {tensor.strides, tensor.strides + tensor.ndim}};
}

TensorKind TensorDescription::kind() const {
    return {dtype, device_type, device_id, static_cast<std::int32_t>(shape.size()), shape.data(), strides.data()};
}

Span TensorReader::span(PyObject* object) const {
    if (!api_) return span_by_attributes(object);
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
        PyErr_Clear();
        return {};
    }
    return span_of_tensor(tensor);
}

std::vector<Span> TensorReader::runs(PyObject* object) const {
    dlpack::Tensor tensor;
    if (api_) {
        if (api_->tensor_from_py_object(object, &tensor) != 0) throw py::error_already_set();
        return runs_of(data_of(tensor), tensor.dtype_bits / 8, tensor.ndim, tensor.shape, tensor.strides);
    }
    const py::handle attributes(object);
    const auto shape = attributes.attr("shape").cast<std::vector<std::int64_t>>();
    const auto strides = attributes.attr("stride")().cast<std::vector<std::int64_t>>();
    return runs_of(reinterpret_cast<const void*>(attributes.attr("data_ptr")().cast<std::uintptr_t>()),
                   attributes.attr("element_size")().cast<std::int64_t>(), static_cast<std::int32_t>(shape.size()), shape.data(),
                   strides.data());
}

bool TensorReader::matches(PyObject* object, const TensorKind& kind, Span& span) const {
    span = {};
    if (!api_) {
        span = span_by_attributes(object);
        return false;
    }
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    span = span_of_tensor(tensor);
    return agrees(tensor, kind) && (!span.empty() || is_empty(tensor));
}

bool TensorReader::lies_at(PyObject* object, const TensorDescription& place) const {
    if (!place.complete) return false;
    dlpack::Tensor tensor;
    if (api_->tensor_from_py_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    return data_of(tensor) == place.data && agrees(tensor, place.kind());
}

TensorView TensorReader::read_attributes(PyObject* object) const {
    const py::handle tensor(object);
    const py::object dtype = tensor.attr("dtype");
    if (!dtypes_.contains(dtype)) throw py::type_error("can't take a tensor of dtype " + std::string(py::str(dtype)));
    const auto code = dtypes_[dtype].cast<std::pair<int, int>>();
    const auto numel = tensor.attr("numel")().cast<std::int64_t>();
    bool dense = tensor.attr("is_contiguous")().cast<bool>();
    if (!dense) {
        const auto shape = tensor.attr("shape").cast<std::vector<std::int64_t>>();
        const auto strides = tensor.attr("stride")().cast<std::vector<std::int64_t>>();
        dense = is_dense(static_cast<std::int32_t>(shape.size()), shape.data(), strides.data(), numel);
    }
    return {reinterpret_cast<void*>(tensor.attr("data_ptr")().cast<std::uintptr_t>()),
            {static_cast<std::uint8_t>(code.first), static_cast<std::uint8_t>(code.second)},
            numel,
            device_of(tensor),
            dense};
}

Span TensorReader::span_by_attributes(PyObject* object) const {
    const py::handle tensor(object);
    try {
        const auto address = tensor.attr("data_ptr")().cast<std::uintptr_t>();
        const auto shape = tensor.attr("shape").cast<std::vector<std::int64_t>>();
        const auto strides = tensor.attr("stride")().cast<std::vector<std::int64_t>>();
        if (!address) return {};
        return span_of(reinterpret_cast<const void*>(address), tensor.attr("element_size")().cast<std::int64_t>(),
                       static_cast<std::int32_t>(shape.size()), shape.data(), strides.data());
    } catch (const py::error_already_set&) {  // a layout without strides or memory
        return {};
    }
}

}  // namespace ddpcomm

void bind_tensor(py::module_& module) {
    using ddpcomm::TensorReader;
    py::class_<TensorReader, std::shared_ptr<TensorReader>>(module, "TensorReader", "Reads where a torch tensor's elements lie.")
        .def(py::init<py::type, py::dict, bool>(), py::arg("tensor_type"), py::arg("dtypes"), py::arg("use_dlpack") = true)
        .def_property_readonly("uses_dlpack", &TensorReader::uses_dlpack)
        .def(
            "read",
            [](const TensorReader& reader, py::handle tensor) {
                const ddpcomm::TensorView view = reader.read(tensor.ptr());
                return py::make_tuple(reinterpret_cast<std::uintptr_t>(view.data), view.dtype.code, view.dtype.bits, view.numel,
                                      view.device.is_cpu(), view.dense);
            },
            py::arg("tensor"), "(address, dtype code, dtype bits, elements, on the CPU, dense) of a tensor.");
}

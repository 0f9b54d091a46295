#include "plan.h"

#include <algorithm>
#include <stdexcept>

#include "ddpcomm/copy.h"

namespace py = pybind11;

namespace ddpcomm {
namespace {

constexpr const char* kNoMemory = "has no memory of its own: it wraps other tensors, as DTensor does, or is on no real device";

Isa isa_named(const std::string& name) {
    if (name.empty()) return available_isas().front();
    for (Isa isa : available_isas()) {
        if (name == isa_name(isa)) return isa;
    }
    throw std::invalid_argument("this processor can't run the instruction set " + name);
}

}  // namespace

Plan::Plan(std::shared_ptr<TensorReader> reader, std::vector<std::int64_t> numels, std::vector<std::int64_t> offsets,
           std::int64_t total_numel, std::pair<int, int> dtype, const std::string& instruction_set)
    : layout_{std::move(numels), std::move(offsets), total_numel,
              Dtype{static_cast<std::uint8_t>(dtype.first), static_cast<std::uint8_t>(dtype.second)}},
      reader_(std::move(reader)),
      isa_(isa_named(instruction_set)) {
    layout_.check();
}

TensorView Plan::read_flat(py::handle tensor, const char* name, Dtype dtype, std::int64_t numel) const {
    const TensorView view = reader_->read(tensor.ptr());
    const std::string the = std::string("the ") + name;
    if (view.dtype != dtype) throw py::type_error(the + "'s dtype is not the one that the layout was made for");
    if (view.numel != numel) {
        throw std::invalid_argument(the + " has " + std::to_string(view.numel) + " elements, the layout " + std::to_string(numel));
    }
    if (!view.dense) throw std::invalid_argument(the + " is not contiguous");
    if (!view.data && numel > 0) throw std::invalid_argument(the + " " + kNoMemory);
    return view;
}

void* Plan::read_buffer(py::handle tensor, const char* name, Dtype dtype, std::int64_t numel) const {
    const TensorView view = read_flat(tensor, name, dtype, numel);
    if (!view.device.is_cpu()) throw std::invalid_argument(std::string("the ") + name + " is not on the CPU");
    return view.data;
}

std::vector<Piece> Plan::read_pieces(py::handle tensors, const void* buffer, double scale, Direction direction, bool accumulate,
                                     Device device) const {
    const auto sequence = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors must be a sequence"));
    if (!sequence) throw py::error_already_set();
    const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
    if (count != layout_.count()) {
        throw std::invalid_argument("there are " + std::to_string(count) + " tensors, the layout has " + std::to_string(layout_.count()));
    }
    PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
    std::vector<Piece> pieces(count);
    for (std::size_t i = 0; i < count; ++i) {
        if (items[i] == Py_None) continue;
        const TensorView view = reader_->read(items[i]);
        check_piece(i, view, buffer, scale, direction, accumulate, device);
        if (view.numel > 0) pieces[i] = {view.data, view.dtype};
    }
    return pieces;
}

py::list Plan::read_addresses(py::handle tensors, const void* buffer, double scale, Direction direction, bool accumulate,
                              Device device) const {
    constexpr std::int64_t absent = 0, other = -1;
    const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, direction, accumulate, device);
    std::vector<Dtype> dtypes;
    for (const Piece& piece : pieces) {
        if (piece.data && std::find(dtypes.begin(), dtypes.end(), piece.dtype) == dtypes.end()) dtypes.push_back(piece.dtype);
    }
    if (dtypes.empty()) dtypes.push_back(layout_.dtype);
    py::list groups;
    for (const Dtype dtype : dtypes) {
        const std::int64_t in_place_of_none = groups.empty() ? absent : other;
        py::list addresses(pieces.size());
        for (std::size_t i = 0; i < pieces.size(); ++i) {
            const Piece& piece = pieces[i];
            const auto address = static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(piece.data));
            PyList_SET_ITEM(addresses.ptr(), static_cast<Py_ssize_t>(i),
                            PyLong_FromLongLong(!piece.data            ? in_place_of_none
                                                : piece.dtype == dtype ? address
                                                                       : other));
        }
        groups.append(py::make_tuple(py::make_tuple(dtype.code, dtype.bits), addresses));
    }
    return groups;
}

void Plan::check_piece(std::size_t i, const TensorView& view, const void* buffer, double scale, Direction direction, bool accumulate,
                       Device device) const {
    const auto fail = [i](const std::string& what) { return "tensor " + std::to_string(i) + " " + what; };
    if (view.device != device) throw std::invalid_argument(fail(device.is_cpu() ? "is not on the CPU" : "is not on the buffer's device"));
    if (view.numel != layout_.numels[i]) {
        throw std::invalid_argument(
            fail("has " + std::to_string(view.numel) + " elements, the layout " + std::to_string(layout_.numels[i])));
    }
    if (!view.dense) throw std::invalid_argument(fail("is not dense in memory; make it contiguous first"));
    if (!view.data && view.numel > 0) throw std::invalid_argument(fail(kNoMemory));
    const Dtype from = direction == Direction::kIntoBuffer ? view.dtype : layout_.dtype;
    const Dtype to = direction == Direction::kIntoBuffer ? layout_.dtype : view.dtype;
    if (!Copier::supports(from, to, scale, accumulate)) {
        throw py::type_error(
            fail(from == to ? "has a dtype that can't be scaled or added to" : "has a dtype that can't be cast to or from the buffer's"));
    }
    const char* const begin = static_cast<const char*>(view.data);
    const char* const flat = static_cast<const char*>(buffer);
    const auto width = static_cast<std::int64_t>(view.dtype.bytes());
    const std::int64_t buffer_bytes = layout_.total_numel * static_cast<std::int64_t>(layout_.dtype.bytes());
    const bool overlaps = view.numel > 0 && begin < flat + buffer_bytes && flat < begin + view.numel * width;
    const bool in_place = from == to && begin == flat + layout_.offsets[i] * width;
    if (overlaps && !in_place) throw std::invalid_argument(fail("overlaps the buffer, but not at its own place in it"));
}

}  // namespace ddpcomm

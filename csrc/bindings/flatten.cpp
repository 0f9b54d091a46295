#include "ddpcomm/flatten.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "ddpcomm/copy.h"
#include "ddpcomm/unflatten.h"
#include "tensor.h"

namespace py = pybind11;

namespace ddpcomm {
namespace {

// Work below this size keeps the interpreter's lock: handing it over can cost more than the copy.
constexpr std::int64_t kReleaseLockBytes = 256 << 10;

Isa isa_named(const std::string& name) {
    for (Isa isa : available_isas()) {
        if (name == isa_name(isa)) return isa;
    }
    throw std::invalid_argument("this processor can't run the instruction set " + name);
}

// A layout and the memory that its calls need, so that one call costs little besides the copy.
class FlattenPlan {
  public:
    FlattenPlan(std::shared_ptr<TensorReader> reader, std::vector<std::int64_t> numels, std::vector<std::int64_t> offsets,
                std::int64_t total_numel, std::pair<int, int> dtype, const std::string& instruction_set)
        : reader_(std::move(reader)),
          layout_{std::move(numels), std::move(offsets), total_numel,
                  Dtype{static_cast<std::uint8_t>(dtype.first), static_cast<std::uint8_t>(dtype.second)}},
          isa_(instruction_set.empty() ? available_isas().front() : isa_named(instruction_set)) {
        layout_.check();
    }

    void flatten(py::handle tensors, py::handle out, double scale, int threads) {
        void* const buffer = read_buffer(out);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, true);
        run([&] { ddpcomm::flatten(layout_, pieces.data(), buffer, scale, {threads, isa_}); });
    }

    void unflatten(py::handle flat, py::handle tensors, double scale, int threads) {
        const void* const buffer = read_buffer(flat);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, false);
        run([&] { ddpcomm::unflatten(layout_, buffer, pieces.data(), scale, {threads, isa_}); });
    }

  private:
    std::int64_t total_bytes() const { return layout_.total_numel * static_cast<std::int64_t>(layout_.dtype.bytes()); }

    template <class Work>
    void run(Work work) {
        if (total_bytes() < kReleaseLockBytes) {
            work();
        } else {
            const py::gil_scoped_release unlocked;
            work();
        }
    }

    void* read_buffer(py::handle tensor) const {
        const TensorView view = reader_->read(tensor.ptr());
        if (!view.on_cpu) throw std::invalid_argument("the buffer is not on the CPU");
        if (view.dtype != layout_.dtype) throw py::type_error("the buffer's dtype is not the one that the layout was made for");
        if (view.numel != layout_.total_numel) {
            throw std::invalid_argument("the buffer has " + std::to_string(view.numel) + " elements, the layout " +
                                        std::to_string(layout_.total_numel));
        }
        if (!view.dense) throw std::invalid_argument("the buffer is not contiguous");
        return view.data;
    }

    std::vector<Piece> read_pieces(py::handle tensors, const void* buffer, double scale, bool into_buffer) const {
        const auto sequence = py::reinterpret_steal<py::object>(PySequence_Fast(tensors.ptr(), "tensors must be a sequence"));
        if (!sequence) throw py::error_already_set();
        const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence.ptr()));
        if (count != layout_.count()) {
            throw std::invalid_argument("there are " + std::to_string(count) + " tensors, the layout has " +
                                        std::to_string(layout_.count()));
        }
        PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
        std::vector<Piece> pieces(count);
        for (std::size_t i = 0; i < count; ++i) {
            if (items[i] == Py_None) continue;
            const TensorView view = reader_->read(items[i]);
            check_piece(i, view, buffer, scale, into_buffer);
            if (view.numel > 0) pieces[i] = {view.data, view.dtype};
        }
        return pieces;
    }

    void check_piece(std::size_t i, const TensorView& view, const void* buffer, double scale, bool into_buffer) const {
        const auto fail = [i](const std::string& what) { return "tensor " + std::to_string(i) + " " + what; };
        if (!view.on_cpu) throw std::invalid_argument(fail("is not on the CPU"));
        if (view.numel != layout_.numels[i]) {
            throw std::invalid_argument(
                fail("has " + std::to_string(view.numel) + " elements, the layout " + std::to_string(layout_.numels[i])));
        }
        if (!view.dense) throw std::invalid_argument(fail("is not dense in memory; make it contiguous first"));
        const Dtype from = into_buffer ? view.dtype : layout_.dtype;
        const Dtype to = into_buffer ? layout_.dtype : view.dtype;
        if (!Copier::supports(from, to, scale)) {
            throw py::type_error(
                fail(from == to ? "has a dtype that can't be scaled" : "has a dtype that can't be cast to or from the buffer's"));
        }
        const char* const begin = static_cast<const char*>(view.data);
        const char* const flat = static_cast<const char*>(buffer);
        const bool overlaps = begin < flat + total_bytes() && flat < begin + view.numel * static_cast<std::int64_t>(view.dtype.bytes());
        const bool in_place = from == to && begin == flat + layout_.offsets[i] * static_cast<std::int64_t>(from.bytes());
        if (view.numel > 0 && overlaps && !in_place)
            throw std::invalid_argument(fail("overlaps the buffer, but not at its own place in it"));
    }

    std::shared_ptr<TensorReader> reader_;
    Layout layout_;
    Isa isa_;
};

}  // namespace
}  // namespace ddpcomm

void bind_flatten(py::module_& module) {
    using ddpcomm::FlattenPlan;
    py::class_<FlattenPlan>(module, "FlattenPlan",
                            "Copies between tensors and their places in one flat buffer. See ddpcomm.ops.FlattenPlan.")
        .def(py::init<std::shared_ptr<ddpcomm::TensorReader>, std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t,
                      std::pair<int, int>, std::string>(),
             py::arg("reader"), py::arg("numels"), py::arg("offsets"), py::arg("total_numel"), py::arg("dtype"),
             py::arg("instruction_set") = "")
        .def("flatten", &FlattenPlan::flatten, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("threads"))
        .def("unflatten", &FlattenPlan::unflatten, py::arg("flat"), py::arg("tensors"), py::arg("scale"), py::arg("threads"));
}

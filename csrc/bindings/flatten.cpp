#include "ddpcomm/flatten.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "ddpcomm/norm.h"
#include "ddpcomm/unflatten.h"
#include "plan.h"

namespace py = pybind11;

namespace ddpcomm {
namespace {

class FlattenPlan : public Plan {
  public:
    using Plan::Plan;

    void flatten(py::handle tensors, py::handle out, double scale, int threads, bool accumulate) const {
        void* const buffer = read_buffer(out);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, Direction::kIntoBuffer, accumulate);
        run([&] { ddpcomm::flatten(layout_, pieces.data(), buffer, scale, accumulate, execution(threads)); });
    }

    py::list flatten_around(py::handle tensors, py::handle out, int threads, std::int64_t begin, std::int64_t end,
                            std::int64_t least_bytes) const {
        void* const buffer = read_buffer(out);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, 1.0, Direction::kIntoBuffer, false);
        const Skipped skipped{begin, end, least_bytes};
        run([&] { ddpcomm::flatten(layout_, pieces.data(), buffer, 1.0, false, execution(threads), skipped); });
        py::list found;
        for (const Skip& skip : skips(layout_, pieces.data(), buffer, skipped)) {
            found.append(py::make_tuple(skip.tensor, skip.first, skip.count, reinterpret_cast<std::uintptr_t>(skip.data)));
        }
        return found;
    }

    void unflatten(py::handle flat, py::handle tensors, double scale, int threads) const {
        const void* const buffer = read_buffer(flat);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, Direction::kOutOfBuffer, false);
        run([&] { ddpcomm::unflatten(layout_, buffer, pieces.data(), scale, execution(threads)); });
    }

    py::tuple unflatten_with_norm(py::handle flat, py::handle tensors, double scale, int threads) const {
        const void* const buffer = read_buffer(flat);
        const std::vector<Piece> pieces = read_pieces(tensors, buffer, scale, Direction::kOutOfBuffer, false);
        for (const Piece& piece : pieces) {
            if (piece.data) check_has_norm(piece.dtype);
        }
        return result(run([&] { return ddpcomm::unflatten_with_norm(layout_, buffer, pieces.data(), scale, execution(threads)); }));
    }

    py::tuple norm(py::handle flat, int threads) const {
        const void* const buffer = read_buffer(flat);
        check_has_norm(layout_.dtype);
        return result(run([&] { return ddpcomm::norm(layout_, buffer, execution(threads)); }));
    }

    py::list addresses(py::handle tensors, py::handle flat, double scale, bool into_buffer, bool accumulate) const {
        const TensorView buffer = read_flat(flat, "buffer", layout_.dtype, layout_.total_numel);
        const Direction direction = into_buffer ? Direction::kIntoBuffer : Direction::kOutOfBuffer;
        return read_addresses(tensors, buffer.data, scale, direction, accumulate, buffer.device);
    }

  private:
    static void check_has_norm(Dtype dtype) {
        const int index = float_index(dtype);
        if (index < 0 || index >= kWideTypes) throw py::type_error("a norm is taken of float32, float64, bfloat16 and float16 only");
    }

    static py::tuple result(Norm norm) { return py::make_tuple(norm.sum_of_squares, norm.nonfinite); }
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
        .def("flatten", &FlattenPlan::flatten, py::arg("tensors"), py::arg("out"), py::arg("scale"), py::arg("threads"),
             py::arg("accumulate") = false)
        .def("flatten_around", &FlattenPlan::flatten_around, py::arg("tensors"), py::arg("out"), py::arg("threads"), py::arg("begin"),
             py::arg("end"), py::arg("least_bytes"),
             "Leaves out what tensors of least_bytes or more have in [begin, end) of the buffer. Returns (tensor, first element in the "
             "buffer, count, "
             "address) "
             "of each such part.")
        .def("unflatten", &FlattenPlan::unflatten, py::arg("flat"), py::arg("tensors"), py::arg("scale"), py::arg("threads"))
        .def("unflatten_with_norm", &FlattenPlan::unflatten_with_norm, py::arg("flat"), py::arg("tensors"), py::arg("scale"),
             py::arg("threads"), "Returns (sum of squares, non-finite values) of what was written.")
        .def("addresses", &FlattenPlan::addresses, py::arg("tensors"), py::arg("flat"), py::arg("scale"), py::arg("into_buffer"),
             py::arg("accumulate"),
             "For kernels of other devices: checks a call, and returns for each dtype that occurs ((code, bits), addresses).")
        .def("norm", &FlattenPlan::norm, py::arg("flat"), py::arg("threads"),
             "Returns (sum of squares, non-finite values) of the tensors.");
}

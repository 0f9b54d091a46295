#include "ddpcomm/quantise.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "plan.h"

namespace py = pybind11;

namespace ddpcomm {
namespace {

class QuantisePlan : public Plan {
  public:
    // code: "int8", "float8_e4m3" or "float8_e5m2".
    QuantisePlan(std::shared_ptr<TensorReader> reader, std::vector<std::int64_t> numels, std::vector<std::int64_t> offsets,
                 std::int64_t total_numel, const std::string& code, const std::string& instruction_set)
        : Plan(std::move(reader), std::move(numels), std::move(offsets), total_numel, {kFloat32.code, kFloat32.bits}, instruction_set),
          code_(code_named(code)) {
        const auto block = static_cast<std::int64_t>(kQuantisedBlock);
        if (total_numel % block != 0) throw std::invalid_argument("the buffer's size must be a multiple of " + std::to_string(block));
        for (std::int64_t offset : layout_.offsets) {
            if (offset % block != 0) throw std::invalid_argument("every offset must be a multiple of " + std::to_string(block));
        }
    }

    void quantise(py::handle tensors, py::handle codes, py::handle scales, py::object residual, double scale, int threads) const {
        auto* const code_data = static_cast<std::uint8_t*>(read_buffer(codes, "buffer of codes", kUInt8, layout_.total_numel));
        auto* const scale_data = static_cast<float*>(read_buffer(scales, "buffer of scales", kFloat32, blocks()));
        auto* const residual_data =
            residual.is_none() ? nullptr : static_cast<float*>(read_buffer(residual, "residual", kFloat32, layout_.total_numel));
        const std::vector<Piece> pieces = read_pieces(tensors, nullptr, scale, Direction::kIntoBuffer, false);
        run([&] { ddpcomm::quantise(layout_, pieces.data(), scale, code_, residual_data, code_data, scale_data, execution(threads)); });
    }

    void dequantise(py::handle codes, py::handle scales, py::handle tensors, double scale, bool accumulate, int threads) const {
        const auto* const code_data = static_cast<const std::uint8_t*>(read_buffer(codes, "buffer of codes", kUInt8, layout_.total_numel));
        const auto* const scale_data = static_cast<const float*>(read_buffer(scales, "buffer of scales", kFloat32, blocks()));
        const std::vector<Piece> pieces = read_pieces(tensors, nullptr, scale, Direction::kOutOfBuffer, accumulate);
        run([&] { ddpcomm::dequantise(layout_, pieces.data(), scale, code_, accumulate, code_data, scale_data, execution(threads)); });
    }

    // As FlattenPlan::addresses; `codes` says on which device.
    py::list addresses(py::handle tensors, py::handle codes, double scale, bool into_buffer, bool accumulate) const {
        const TensorView buffer = read_flat(codes, "buffer of codes", kUInt8, layout_.total_numel);
        const Direction direction = into_buffer ? Direction::kIntoBuffer : Direction::kOutOfBuffer;
        return read_addresses(tensors, nullptr, scale, direction, accumulate, buffer.device);
    }

  private:
    std::int64_t blocks() const { return layout_.total_numel / static_cast<std::int64_t>(kQuantisedBlock); }

    static Code code_named(const std::string& name) {
        if (name == "int8") return Code::kInt8;
        if (name == "float8_e4m3") return Code::kFloat8E4M3;
        if (name == "float8_e5m2") return Code::kFloat8E5M2;
        throw std::invalid_argument("there is no code " + name);
    }

    Code code_;
};

}  // namespace
}  // namespace ddpcomm

void bind_quantise(py::module_& module) {
    using ddpcomm::QuantisePlan;
    py::class_<QuantisePlan>(module, "QuantisePlan",
                             "Tensors to 8-bit codes with a scale per block, and back. See ddpcomm.ops.QuantisePlan.")
        .def(py::init<std::shared_ptr<ddpcomm::TensorReader>, std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t,
                      std::string, std::string>(),
             py::arg("reader"), py::arg("numels"), py::arg("offsets"), py::arg("total_numel"), py::arg("code"),
             py::arg("instruction_set") = "")
        .def("quantise", &QuantisePlan::quantise, py::arg("tensors"), py::arg("codes"), py::arg("scales"), py::arg("residual"),
             py::arg("scale"), py::arg("threads"))
        .def("addresses", &QuantisePlan::addresses, py::arg("tensors"), py::arg("codes"), py::arg("scale"), py::arg("into_buffer"),
             py::arg("accumulate"))
        .def("dequantise", &QuantisePlan::dequantise, py::arg("codes"), py::arg("scales"), py::arg("tensors"), py::arg("scale"),
             py::arg("accumulate"), py::arg("threads"));
}

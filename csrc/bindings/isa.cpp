#include "ddpcomm/isa.h"

#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_isa(py::module_& module) {
    module.def(
        "instruction_sets",
        [] {
            py::list names;
            for (ddpcomm::Isa isa : ddpcomm::available_isas()) names.append(ddpcomm::isa_name(isa));
            return names;
        },
        "Names of the instruction sets that kernels can use on this processor, best first.");
}

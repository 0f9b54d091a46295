// The extension module ddpcomm._native. Each file of this folder binds one header and is called here once.
#include <pybind11/pybind11.h>

namespace py = pybind11;

void bind_isa(py::module_& module);
void bind_tensor(py::module_& module);
void bind_flatten(py::module_& module);
void bind_quantise(py::module_& module);
void bind_containers(py::module_& module);
void bind_countdown(py::module_& module);
void bind_gradients(py::module_& module);
void bind_shared_memory(py::module_& module);

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native kernels and transports of ddpcomm, free of libtorch.";
    bind_isa(module);
    bind_tensor(module);
    bind_flatten(module);
    bind_quantise(module);
    bind_containers(module);
    bind_countdown(module);
    bind_gradients(module);
    bind_shared_memory(module);
}

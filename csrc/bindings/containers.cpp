// Tells whether dictionaries still hold the objects that they held: 5 ns an entry, where a comprehension in Python takes 50.
#include <pybind11/pybind11.h>

#include <vector>

namespace py = pybind11;

namespace ddpcomm {
namespace {

class ContainerWatch {
  public:
    // Keeps the containers, and what is in them now, alive: an address can't come back as another object's.
    explicit ContainerWatch(const py::list& containers) {
        for (const py::handle container : containers) {
            const py::dict dictionary = py::reinterpret_borrow<py::object>(container).cast<py::dict>();
            containers_.push_back({dictionary, PyDict_GET_SIZE(dictionary.ptr())});
            for (const auto& entry : dictionary) values_.push_back(py::reinterpret_borrow<py::object>(entry.second));
        }
    }

    bool changed() const {
        std::size_t next = 0;
        for (const auto& [container, size] : containers_) {
            if (PyDict_GET_SIZE(container.ptr()) != size) return true;
            if (size == 0) continue;  // most are: what they would hold entries in need not be fetched
            PyObject* key = nullptr;
            PyObject* value = nullptr;
            Py_ssize_t position = 0;
            while (PyDict_Next(container.ptr(), &position, &key, &value)) {
                if (values_[next].ptr() != value) return true;
                ++next;
            }
        }
        return false;
    }

  private:
    struct Container {
        py::dict dictionary;
        Py_ssize_t size;
    };

    std::vector<Container> containers_;
    std::vector<py::object> values_;
};

}  // namespace
}  // namespace ddpcomm

void bind_containers(py::module_& module) {
    using ddpcomm::ContainerWatch;
    py::class_<ContainerWatch>(module, "ContainerWatch", "Whether dictionaries still hold what they held. See ddpcomm.parameters.")
        .def(py::init<const py::list&>(), py::arg("containers"))
        .def("changed", &ContainerWatch::changed);
}

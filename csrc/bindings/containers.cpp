// Tells whether modules still hold what they held: 5 ns an entry, where a comprehension in Python takes 50.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

namespace py = pybind11;

namespace ddpcomm {
namespace {

class ContainerWatch {
  public:
    // holders: objects' __dict__; names: of the entries in each that are dictionaries. Keeps them, and what is in them now, alive: an
    // address can't come back as another object's.
    ContainerWatch(const py::list& holders, const std::vector<std::string>& names) {
        for (const std::string& name : names) names_.push_back(py::reinterpret_steal<py::object>(PyUnicode_InternFromString(name.c_str())));
        for (const py::handle entry : holders) {
            holders_.push_back(py::reinterpret_borrow<py::object>(entry).cast<py::dict>());
            for (const py::object& name : names_) {
                const py::dict container = py::object(holders_.back()[name]).cast<py::dict>();
                containers_.push_back({container, PyDict_GET_SIZE(container.ptr())});
                for (const auto& item : container) values_.push_back(py::reinterpret_borrow<py::object>(item.second));
            }
        }
    }

    bool changed() const {
        auto container = containers_.begin();
        auto value = values_.begin();
        for (const py::dict& holder : holders_) {
            for (const py::object& name : names_) {
                PyObject* const dictionary = PyDict_GetItemWithError(holder.ptr(), name.ptr());
                if (dictionary != container->dictionary.ptr() || PyDict_GET_SIZE(dictionary) != container->size) {
                    PyErr_Clear();
                    return true;
                }
                // Most are empty: what they would hold entries in need not be fetched.
                if (container->size > 0 && !holds(dictionary, value)) return true;
                ++container;
            }
        }
        return false;
    }

  private:
    using Values = std::vector<py::object>::const_iterator;

    struct Container {
        py::dict dictionary;
        Py_ssize_t size;
    };

    static bool holds(PyObject* dictionary, Values& expected) {
        PyObject* key = nullptr;
        PyObject* value = nullptr;
        Py_ssize_t position = 0;
        while (PyDict_Next(dictionary, &position, &key, &value)) {
            if (expected->ptr() != value) return false;
            ++expected;
        }
        return true;
    }

    std::vector<py::object> names_;
    std::vector<py::dict> holders_;
    std::vector<Container> containers_;
    std::vector<py::object> values_;
};

}  // namespace
}  // namespace ddpcomm

void bind_containers(py::module_& module) {
    using ddpcomm::ContainerWatch;
    py::class_<ContainerWatch>(module, "ContainerWatch", "Whether dictionaries still hold what they held. See ddpcomm.parameters.")
        .def(py::init<const py::list&, const std::vector<std::string>&>(), py::arg("holders"), py::arg("names"))
        .def("changed", &ContainerWatch::changed);
}

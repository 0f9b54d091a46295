// Counts the gradients of a backward down: the hook that torch calls for each parameter. A closure in Python takes torch 0.25 us longer.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace py = pybind11;

namespace ddpcomm {
namespace {

struct Counts {
  public:
    std::vector<std::int64_t> fires_left;            // by parameter; below 0: more came than were expected
    std::vector<std::int64_t> bucket_left;           // by bucket: how many of its parameters are still missing
    std::vector<std::size_t> bucket_of;              // by parameter
    py::object full;                                 // called when a bucket has all its gradients
    py::object uncounted;                            // called with the parameter's index for a gradient that was not expected
    py::object current_stream;                       // tells the stream that a gradient was produced on; None where there are none
    std::vector<std::vector<std::int64_t>> streams;  // by bucket: those of its gradients

    // Returns false with a Python error set.
    bool count(std::size_t index) {
        const std::int64_t left = --fires_left[index];
        if (left >= 0 && !current_stream.is_none() && !note_stream(bucket_of[index])) return false;
        if (left > 0) return true;
        PyObject* result = nullptr;
        if (left == 0) {
            if (--bucket_left[bucket_of[index]] != 0) return true;
            result = PyObject_CallNoArgs(full.ptr());
        } else {
            const py::int_ argument(index);
            result = PyObject_CallOneArg(uncounted.ptr(), argument.ptr());
        }
        Py_XDECREF(result);
        return result != nullptr;
    }

  private:
    bool note_stream(std::size_t bucket) {
        PyObject* const result = PyObject_CallNoArgs(current_stream.ptr());
        if (!result) return false;
        const std::int64_t stream = PyLong_AsLongLong(result);
        Py_DECREF(result);
        if (PyErr_Occurred()) return false;
        std::vector<std::int64_t>& known = streams[bucket];
        if (std::find(known.begin(), known.end(), stream) == known.end()) known.push_back(stream);
        return true;
    }
};

// A callable of one argument, the parameter, called by way of the vectorcall protocol.
struct Hook {
    PyObject_HEAD vectorcallfunc call;
    std::size_t index;
    Counts* counts;
    std::shared_ptr<Counts>* owner;  // of the counts
};

PyObject* call_hook(PyObject* self, PyObject* const*, std::size_t, PyObject*) {
    Hook* const hook = reinterpret_cast<Hook*>(self);
    if (!hook->counts->count(hook->index)) return nullptr;
    Py_RETURN_NONE;
}

void free_hook(PyObject* self) {
    delete reinterpret_cast<Hook*>(self)->owner;
    Py_TYPE(self)->tp_free(self);
}

PyTypeObject hook_type = [] {
    PyTypeObject type{};
    type.ob_base = {PyObject_HEAD_INIT(nullptr) 0};
    type.tp_name = "ddpcomm._native.CountdownHook";
    type.tp_basicsize = sizeof(Hook);
    type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
    type.tp_vectorcall_offset = offsetof(Hook, call);
    type.tp_call = PyVectorcall_Call;
    type.tp_dealloc = free_hook;
    type.tp_doc = "Counts a parameter's gradient.";
    return type;
}();

class Countdown {
  public:
    Countdown(py::object full, py::object uncounted, py::object current_stream) : counts_(std::make_shared<Counts>()) {
        counts_->current_stream = std::move(current_stream);
        counts_->full = std::move(full);
        counts_->uncounted = std::move(uncounted);
    }

    void resize(std::size_t parameters) {
        armed_ = false;
        expected_.assign(parameters, 0);
        counts_->fires_left.assign(parameters, 0);
        counts_->bucket_of.assign(parameters, 0);
    }

    py::object hook(std::size_t index) const {
        if (index >= counts_->fires_left.size()) throw py::index_error("there is no such parameter");
        Hook* const hook = PyObject_New(Hook, &hook_type);
        if (!hook) throw py::error_already_set();
        hook->call = call_hook;
        hook->index = index;
        hook->counts = counts_.get();
        hook->owner = new std::shared_ptr<Counts>(counts_);
        return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(hook));
    }

    void arm(std::vector<std::int64_t> expected, std::vector<std::int64_t> bucket_counts, std::vector<std::size_t> bucket_of) {
        if (expected.size() != counts_->fires_left.size() || bucket_of.size() != expected.size())
            throw py::value_error("there must be one entry for each parameter");
        for (const std::size_t bucket : bucket_of) {
            if (bucket >= bucket_counts.size()) throw py::index_error("there is no such bucket");
        }
        counts_->streams.assign(bucket_counts.size(), {});
        counts_->fires_left = expected;
        counts_->bucket_left = std::move(bucket_counts);
        counts_->bucket_of = std::move(bucket_of);
        expected_ = std::move(expected);
        armed_ = true;
    }

    void rest() {
        armed_ = false;
        expected_.assign(expected_.size(), 0);
        counts_->fires_left.assign(expected_.size(), 0);
    }

    bool is_full(std::size_t bucket) const { return armed_ && counts_->bucket_left.at(bucket) == 0; }

    std::vector<std::int64_t> streams(std::size_t bucket) const { return counts_->streams.at(bucket); }

    std::vector<std::int64_t> fires() const {
        std::vector<std::int64_t> fires = expected_;
        for (std::size_t i = 0; i < fires.size(); ++i) fires[i] -= counts_->fires_left[i];
        return fires;
    }

    void forget(std::size_t index) { ++counts_->fires_left.at(index); }

    // As if the parameter received a gradient, but one that was not expected is not reported.
    void recount(std::size_t index) {
        if (counts_->fires_left.at(index) <= 0) {
            --counts_->fires_left[index];
        } else if (!counts_->count(index)) {
            throw py::error_already_set();
        }
    }

  private:
    std::shared_ptr<Counts> counts_;
    std::vector<std::int64_t> expected_;
    bool armed_ = false;
};

}  // namespace
}  // namespace ddpcomm

void bind_countdown(py::module_& module) {
    using ddpcomm::Countdown;
    if (PyType_Ready(&ddpcomm::hook_type) != 0) throw py::error_already_set();
    module.add_object("CountdownHook", reinterpret_cast<PyObject*>(&ddpcomm::hook_type));
    py::class_<Countdown>(module, "Countdown", "Counts the gradients of a backward down. See ddpcomm.countdown.")
        .def(py::init<py::object, py::object, py::object>(), py::arg("full"), py::arg("uncounted"), py::arg("current_stream"))
        .def("resize", &Countdown::resize, py::arg("parameters"))
        .def("hook", &Countdown::hook, py::arg("index"))
        .def("arm", &Countdown::arm, py::arg("expected"), py::arg("bucket_counts"), py::arg("bucket_of"))
        .def("rest", &Countdown::rest)
        .def("is_full", &Countdown::is_full, py::arg("bucket"))
        .def("streams", &Countdown::streams, py::arg("bucket"))
        .def("fires", &Countdown::fires)
        .def("forget", &Countdown::forget, py::arg("index"))
        .def("recount", &Countdown::recount, py::arg("index"));
}

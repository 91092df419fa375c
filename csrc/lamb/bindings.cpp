// Python's way to the CPU back end: addresses as integers, so that no header of PyTorch's is needed. ds_terapipe/optim/op/backends.py
// is the only caller, and keeps what the addresses point to alive.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

#include "lamb_cpu.h"

namespace py = pybind11;

namespace {

// The tables and the threads: what every call needs.
struct Call {
  lamb::Tables tables;
  int threads;
  const lamb::Kernels* kernels;
};

Call call_of(int64_t segments, int64_t segment_count, int64_t rules, int64_t rule_count, int64_t layer_count, int threads) {
  Call call;
  call.tables = {reinterpret_cast<const lamb::Segment*>(segments), segment_count, reinterpret_cast<const lamb::Rule*>(rules), rule_count,
                 layer_count};
  if (threads < 1) throw std::invalid_argument("threads must be 1 or more");
  call.threads = threads;
  lamb::check_tables(call.tables);
  call.kernels = &lamb::kernels_of(lamb::instruction_set());
  return call;
}

template <typename T>
T* array_at(int64_t address, int64_t count, const char* name) {
  if (!address && count) throw std::invalid_argument(std::string(name) + ": null address");
  return reinterpret_cast<T*>(address);
}

lamb::Control& control_at(int64_t address) {
  auto* control = array_at<lamb::Control>(address, 1, "control");
  if (!(control->grad_scale > 0) || control->grad_scale > 1e300) {
    throw std::invalid_argument("control: grad_scale must be positive and finite");
  }
  return *control;
}

void square_sum(int64_t segments, int64_t segment_count, int64_t rules, int64_t rule_count, int64_t layers, int64_t control, int threads) {
  const Call call = call_of(segments, segment_count, rules, rule_count, layers, threads);
  lamb::square_sum(call.tables, control_at(control), call.threads, *call.kernels);
}

void moments(int64_t segments, int64_t segment_count, int64_t rules, int64_t rule_count, int64_t layers, int64_t control, int64_t norms,
             int threads) {
  const Call call = call_of(segments, segment_count, rules, rule_count, layers, threads);
  lamb::moments(call.tables, control_at(control), array_at<double>(norms, layers, "norms"), call.threads, *call.kernels);
}

void apply(int64_t segments, int64_t segment_count, int64_t rules, int64_t rule_count, int64_t layers, int64_t control, int64_t norms,
           int64_t ratios, int threads) {
  const Call call = call_of(segments, segment_count, rules, rule_count, layers, threads);
  lamb::apply(call.tables, control_at(control), array_at<const double>(norms, layers, "norms"), array_at<double>(ratios, layers, "ratios"),
              call.threads, *call.kernels);
}

void step(lamb::Workspace& workspace, int64_t segments, int64_t segment_count, int64_t rules, int64_t rule_count, int64_t layers,
          int64_t control, int64_t norms, int64_t ratios, int threads) {
  const Call call = call_of(segments, segment_count, rules, rule_count, layers, threads);
  lamb::step(call.tables, control_at(control), array_at<double>(norms, layers, "norms"), array_at<double>(ratios, layers, "ratios"),
             call.threads, *call.kernels, workspace);
}

}  // namespace

#define LAMB_TEXT_OF(x) #x
#define LAMB_TEXT(x) LAMB_TEXT_OF(x)
#ifndef LAMB_DIGEST
#define LAMB_DIGEST unknown
#endif

PYBIND11_MODULE(_lamb_cpu, module) {
  module.doc() = "CPU back end of FusedLamb";
  module.attr("digest") = LAMB_TEXT(LAMB_DIGEST);  // of the sources
  py::class_<lamb::Workspace>(module, "Workspace").def(py::init<>());
  const py::call_guard<py::gil_scoped_release> released;
  module.def("instruction_set", &lamb::instruction_set);
  module.def("square_sum", &square_sum, released, py::arg("segments"), py::arg("segment_count"), py::arg("rules"), py::arg("rule_count"),
             py::arg("layers"), py::arg("control"), py::arg("threads"));
  module.def("moments", &moments, released, py::arg("segments"), py::arg("segment_count"), py::arg("rules"), py::arg("rule_count"),
             py::arg("layers"), py::arg("control"), py::arg("norms"), py::arg("threads"));
  module.def("apply", &apply, released, py::arg("segments"), py::arg("segment_count"), py::arg("rules"), py::arg("rule_count"),
             py::arg("layers"), py::arg("control"), py::arg("norms"), py::arg("ratios"), py::arg("threads"));
  module.def("step", &step, released, py::arg("workspace"), py::arg("segments"), py::arg("segment_count"), py::arg("rules"),
             py::arg("rule_count"), py::arg("layers"), py::arg("control"), py::arg("norms"), py::arg("ratios"), py::arg("threads"));
}

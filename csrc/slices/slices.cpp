// Linear layers and attention of slices in PyTorch's C++ autograd: the same calls of ATen as in ds_terapipe/pipeline/operators,
// which run where this is not compiled, without Python between them. On small layers, and on fast devices, that Python takes longer
// than the kernels.
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>

#include "attention.h"
#include "linear.h"

namespace py = pybind11;
using namespace slices;

PYBIND11_MODULE(_slices, module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<KeptLinear, std::shared_ptr<KeptLinear>>(module, "KeptLinear")
      .def_property_readonly("parameters", &KeptLinear::parameters)
      .def("has_from", &KeptLinear::has_from)
      .def("tensors", &KeptLinear::tensors)
      .def("node", &products_of);
  py::class_<Operands, std::shared_ptr<Operands>>(module, "Operands")
      .def(py::init<int64_t, std::string, std::string>())
      .def("begin", &Operands::begin)
      .def("end", &Operands::end)
      .def("layers", &Operands::layers)
      .def("micro_batches", &Operands::micro_batches)
      .def("clear", &Operands::clear);
  py::class_<KeyGradients, std::shared_ptr<KeyGradients>>(module, "KeyGradients")
      .def(py::init<int64_t>())
      .def_readonly("start", &KeyGradients::from)
      .def("add", &KeyGradients::add, Released());
  module.def("linear", &linear, Released());
  module.def("attention", &attention, Released());
}

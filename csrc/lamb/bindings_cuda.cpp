// The CUDA back end for Python. Addresses, of the device and of streams, come as integers; nothing of CUDA or PyTorch is included.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "lamb_cuda.h"

namespace py = pybind11;

namespace {

template <typename T>
T* at(int64_t address) {
  return reinterpret_cast<T*>(static_cast<uintptr_t>(address));
}

void check(const char* error, const char* what) {
  if (error != nullptr) throw std::runtime_error(std::string("FusedLamb on CUDA, ") + what + ": " + error);
}

lamb::cuda::Tables tables_of(int64_t segments, int64_t chunks, int64_t first_chunk, int64_t rules, int64_t partials, int64_t arrived,
                             int64_t chunk_count, int64_t layer_count, int64_t rule_count) {
  if (chunk_count < 0 || layer_count < 0 || rule_count < 0) throw std::invalid_argument("a count is negative");
  return {at<const lamb::Segment>(segments), at<const lamb::cuda::Chunk>(chunks), at<const int64_t>(first_chunk),
          at<lamb::Rule>(rules),             at<double>(partials),                at<uint32_t>(arrived),
          chunk_count,                       layer_count,                         rule_count};
}

py::tuple blocks_of_device() {
  lamb::cuda::Blocks blocks = {};
  check(lamb::cuda::blocks_of_device(&blocks), "occupancy");
  return py::make_tuple(blocks.square_sum, blocks.moments, blocks.apply);
}

void square_sum(const lamb::cuda::Tables& tables, int64_t control, int blocks, int64_t stream) {
  check(lamb::cuda::square_sum(tables, at<double>(control), blocks, at<void>(stream)), "square_sum");
}

void moments(const lamb::cuda::Tables& tables, int64_t norms, int64_t control, int blocks, int64_t stream) {
  check(lamb::cuda::moments(tables, at<double>(norms), at<const double>(control), blocks, at<void>(stream)), "moments");
}

void apply(const lamb::cuda::Tables& tables, int64_t norms, int64_t control, int64_t ratios, bool advance, int blocks, int64_t stream) {
  check(lamb::cuda::apply(tables, at<const double>(norms), at<const double>(control), at<double>(ratios), advance, blocks,
                          at<void>(stream)),
        "apply");
}

void copy_rules(int64_t to, int64_t from, int64_t rows, int64_t stream) {
  check(lamb::cuda::copy_rules(at<lamb::Rule>(to), at<const lamb::Rule>(from), rows, at<void>(stream)), "copy_rules");
}

void upload_now(int64_t device, int64_t host, int64_t bytes) {
  check(lamb::cuda::upload_now(at<void>(device), at<const void>(host), bytes), "upload_now");
}

}  // namespace

#define LAMB_TEXT_OF(x) #x
#define LAMB_TEXT(x) LAMB_TEXT_OF(x)
#ifndef LAMB_DIGEST
#define LAMB_DIGEST unknown
#endif

PYBIND11_MODULE(_lamb_cuda, module) {
  module.doc() = "CUDA back end of FusedLamb";
  module.attr("digest") = LAMB_TEXT(LAMB_DIGEST);  // of the sources
  module.attr("CHUNK_ELEMENTS") = lamb::cuda::chunk_elements();
  // Local, because a process may hold this module of two versions.
  py::class_<lamb::cuda::Tables>(module, "Tables", py::module_local())
      .def(py::init(&tables_of), py::kw_only(), py::arg("segments"), py::arg("chunks"), py::arg("first_chunk"), py::arg("rules"),
           py::arg("partials"), py::arg("arrived"), py::arg("chunk_count"), py::arg("layer_count"), py::arg("rule_count"));
  const py::call_guard<py::gil_scoped_release> released;
  module.def("blocks_of_device", &blocks_of_device);
  module.def("square_sum", &square_sum, released, py::arg("tables"), py::arg("control"), py::arg("blocks"), py::arg("stream"));
  module.def("moments", &moments, released, py::arg("tables"), py::arg("norms"), py::arg("control"), py::arg("blocks"), py::arg("stream"));
  module.def("apply", &apply, released, py::arg("tables"), py::arg("norms"), py::arg("control"), py::arg("ratios"), py::arg("advance"),
             py::arg("blocks"), py::arg("stream"));
  module.def("copy_rules", &copy_rules, released, py::arg("to"), py::arg("from_"), py::arg("rows"), py::arg("stream"));
  module.def("upload_now", &upload_now, released, py::arg("device"), py::arg("host"), py::arg("bytes"));
}

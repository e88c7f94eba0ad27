// SPDX-License-Identifier: Apache-2.0
// The Python module `ipex_xpu_kernels._programs`: starts kernels of this package and of users. It
// needs no torch. Queues belong to torch's streams, by their addresses: of this package or of a
// torch with XPU.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/source.h"

namespace py = pybind11;
namespace ipex::xpu {
namespace {

// Arguments that point are addresses of tensors, marked by a tuple.
std::vector<KernelArgument> kernel_arguments(const py::sequence& arguments) {
  std::vector<KernelArgument> values;
  values.reserve(arguments.size());
  for (const py::handle& one : arguments) {
    if (py::isinstance<py::tuple>(one)) {
      values.emplace_back(one.cast<py::tuple>()[0].cast<std::uintptr_t>());
    } else if (py::isinstance<py::float_>(one)) {
      values.emplace_back(one.cast<double>());
    } else {
      values.emplace_back(one.cast<std::int64_t>());
    }
  }
  return values;
}

sycl::queue& queue_at(std::uintptr_t address) { return *reinterpret_cast<sycl::queue*>(address); }

}  // namespace

PYBIND11_MODULE(_programs, m) {
  m.def("launch", [](const std::string& kernel, int device, std::uintptr_t queue,
                     std::vector<std::size_t> global, std::vector<std::size_t> local,
                     const py::sequence& arguments) {
    const auto values = kernel_arguments(arguments);
    const py::gil_scoped_release no_gil;
    launch(kernel, device, queue_at(queue), {std::move(global), std::move(local)}, values);
  });
  py::class_<SourceProgram>(m, "SourceProgram", py::module_local())
      .def(py::init([](std::string source, std::vector<std::string> kernels,
                       std::map<std::string, std::string> headers, std::vector<std::string> options,
                       std::uintptr_t queue) {
             return std::make_unique<SourceProgram>(std::move(source), std::move(kernels),
                                                    std::move(headers), std::move(options),
                                                    queue_at(queue));
           }),
           py::call_guard<py::gil_scoped_release>())
      .def("parameters", &SourceProgram::parameters)
      .def("launch", [](SourceProgram& program, const std::string& kernel, std::uintptr_t queue,
                        std::vector<std::size_t> global, std::vector<std::size_t> local,
                        const py::sequence& arguments) {
        const auto values = kernel_arguments(arguments);
        const py::gil_scoped_release no_gil;
        program.launch(kernel, queue_at(queue), {std::move(global), std::move(local)}, values);
      });
}

}  // namespace ipex::xpu

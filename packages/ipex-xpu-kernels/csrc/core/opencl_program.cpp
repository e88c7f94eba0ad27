// SPDX-License-Identifier: Apache-2.0
#include "opencl_program.h"

#include <CL/cl.h>
#include <dlfcn.h>

#include <stdexcept>

namespace ipex::xpu {
namespace {

// The OpenCL loader is in the process already, brought by SYCL's adapter. Linking it would need a
// search path of its own.
struct Api {
  decltype(&clCreateProgramWithIL) create_with_il;
  decltype(&clCreateProgramWithBinary) create_with_binary;
  decltype(&clBuildProgram) build;
  decltype(&clGetProgramBuildInfo) build_info;
  decltype(&clGetProgramInfo) info;
  decltype(&clCreateKernel) create_kernel;
  decltype(&clReleaseKernel) release_kernel;
  decltype(&clReleaseProgram) release;
};

template <typename F>
void find(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(::dlsym(library, name));
  if (function == nullptr)
    throw std::runtime_error(std::string("the OpenCL loader has no ") + name);
}

const Api& api() {
  static const Api found = [] {
    void* library = ::dlopen("libOpenCL.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (library == nullptr) throw std::runtime_error("the OpenCL loader is not in the process");
    Api a{};
    find(library, "clCreateProgramWithIL", a.create_with_il);
    find(library, "clCreateProgramWithBinary", a.create_with_binary);
    find(library, "clBuildProgram", a.build);
    find(library, "clGetProgramBuildInfo", a.build_info);
    find(library, "clGetProgramInfo", a.info);
    find(library, "clCreateKernel", a.create_kernel);
    find(library, "clReleaseKernel", a.release_kernel);
    find(library, "clReleaseProgram", a.release);
    return a;
  }();
  return found;
}

void check(cl_int status, const char* what) {
  if (status != CL_SUCCESS)
    throw std::runtime_error(std::string(what) + ": OpenCL error " + std::to_string(status));
}

}  // namespace

OpenClProgram OpenClProgram::from_spirv(const sycl::context& context, const sycl::device& device,
                                        const std::vector<std::byte>& spirv) {
  cl_int status = CL_SUCCESS;
  cl_program made = api().create_with_il(sycl::get_native<sycl::backend::opencl>(context),
                                         spirv.data(), spirv.size(), &status);
  check(status, "SPIR-V was refused");
  OpenClProgram program(context, made);
  program.build(device);
  return program;
}

OpenClProgram OpenClProgram::from_binary(const sycl::context& context, const sycl::device& device,
                                         const std::vector<unsigned char>& binary) {
  cl_int status = CL_SUCCESS;
  cl_int loaded = CL_SUCCESS;
  const cl_device_id id = sycl::get_native<sycl::backend::opencl>(device);
  const std::size_t size = binary.size();
  const unsigned char* data = binary.data();
  cl_program made = api().create_with_binary(sycl::get_native<sycl::backend::opencl>(context), 1,
                                             &id, &size, &data, &loaded, &status);
  check(status, "a cached binary was refused");
  OpenClProgram program(context, made);
  program.build(device);
  return program;
}

OpenClProgram::~OpenClProgram() {
  if (program_ != nullptr) api().release(program_);
}

void OpenClProgram::build(const sycl::device& device) {
  const cl_device_id id = sycl::get_native<sycl::backend::opencl>(device);
  if (api().build(program_, 1, &id, nullptr, nullptr, nullptr) == CL_SUCCESS) return;
  std::size_t size = 0;
  api().build_info(program_, id, CL_PROGRAM_BUILD_LOG, 0, nullptr, &size);
  std::string log(size, '\0');
  api().build_info(program_, id, CL_PROGRAM_BUILD_LOG, size, log.data(), nullptr);
  throw std::runtime_error(log.empty() ? "the driver's compiler failed" : log);
}

std::vector<unsigned char> OpenClProgram::binary() const {
  std::size_t devices_bytes = 0;
  check(api().info(program_, CL_PROGRAM_BINARY_SIZES, 0, nullptr, &devices_bytes), "no binary");
  std::vector<std::size_t> sizes(devices_bytes / sizeof(std::size_t));
  check(api().info(program_, CL_PROGRAM_BINARY_SIZES, devices_bytes, sizes.data(), nullptr),
        "no binary");
  // A context of several devices has one slot for each, of which only the slot of the built device
  // is filled.
  std::vector<std::vector<unsigned char>> binaries;
  std::vector<unsigned char*> pointers;
  for (const std::size_t size : sizes) binaries.emplace_back(size);
  for (auto& one : binaries) pointers.push_back(one.empty() ? nullptr : one.data());
  check(api().info(program_, CL_PROGRAM_BINARIES, pointers.size() * sizeof(unsigned char*),
                   pointers.data(), nullptr),
        "no binary");
  for (auto& one : binaries) {
    if (!one.empty()) return std::move(one);
  }
  throw std::runtime_error("no binary");
}

sycl::kernel OpenClProgram::kernel(const std::string& symbol) const {
  cl_int status = CL_SUCCESS;
  cl_kernel made = api().create_kernel(program_, symbol.c_str(), &status);
  check(status, ("no kernel " + symbol).c_str());
  sycl::kernel result = sycl::make_kernel<sycl::backend::opencl>(made, context_);
  api().release_kernel(made);  // SYCL holds a reference of its own
  return result;
}

}  // namespace ipex::xpu

// SPDX-License-Identifier: Apache-2.0
// A program of the OpenCL back end. SYCL builds SPIR-V, too, but neither caches the result nor
// hands it out.
#pragma once

#include <cstddef>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace ipex::xpu {

class OpenClProgram {
 public:
  // Both throw std::runtime_error with the text of the driver's compiler.
  static OpenClProgram from_spirv(const sycl::context& context, const sycl::device& device,
                                  const std::vector<std::byte>& spirv);
  static OpenClProgram from_binary(const sycl::context& context, const sycl::device& device,
                                   const std::vector<unsigned char>& binary);
  ~OpenClProgram();
  OpenClProgram(OpenClProgram&& other) noexcept
      : context_(other.context_), program_(std::exchange(other.program_, nullptr)) {}
  OpenClProgram(const OpenClProgram&) = delete;
  OpenClProgram& operator=(const OpenClProgram&) = delete;
  OpenClProgram& operator=(OpenClProgram&&) = delete;

  std::vector<unsigned char> binary() const;
  sycl::kernel kernel(const std::string& symbol) const;

 private:
  OpenClProgram(const sycl::context& context, cl_program program)
      : context_(context), program_(program) {}
  void build(const sycl::device& device);

  sycl::context context_;
  cl_program program_;
};

}  // namespace ipex::xpu

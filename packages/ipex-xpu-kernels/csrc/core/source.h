// SPDX-License-Identifier: Apache-2.0
// Kernels whose arguments come as a list: of this package by their name, and SYCL source of users
// that the compiler of the run-time translates in this process.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <sycl/sycl.hpp>
#include <variant>
#include <vector>

namespace ipex::xpu {

// For each kernel a module of its own: in libsycl 2026.1 the table of the kernels of a module keeps
// names that are gone by the time the next kernel of that module is looked up.
inline const char* const kOneModuleEach = "-fsycl-device-code-split=per_kernel";

// What a kernel is called with: the address of device memory, or a number.
using KernelArgument = std::variant<std::uintptr_t, std::int64_t, double>;

// Headers for kernels of users, by the names by which they are included, from the folder of the
// kernels.
std::map<std::string, std::string> user_headers();

struct WorkSize {
  std::vector<std::size_t> global;  // 1 to 3 dimensions
  std::vector<std::size_t> local;   // as many, which divide them
};

// To be called before a program is compiled for a GPU. What the compiler of the run-time (2026.1)
// compiles first in a process keeps calls of its device library, also of barriers and positions;
// later programs have them in line. So the first one is of no use to anybody.
void ready_compiler(const sycl::context& context, const sycl::device& device);

// Starts a kernel of this package in a queue of the device. Throws std::invalid_argument where the
// arguments do not match the kernel.
void launch(const std::string& kernel, int device, sycl::queue& queue, const WorkSize& size,
            const std::vector<KernelArgument>& arguments);

// A program and its kernels; free functions of pointers and numbers, made kernels by their
// property nd_range_kernel.
class SourceProgram {
 public:
  // Compiles for the device of a queue, so that errors come at once. `headers` are further files by
  // the names by which the source includes them. Throws std::runtime_error with the compiler's
  // text.
  SourceProgram(std::string source, std::vector<std::string> kernels,
                std::map<std::string, std::string> headers, std::vector<std::string> options,
                const sycl::queue& queue);

  // Types of a kernel's parameters as C++ has them, such as "float const*".
  const std::vector<std::string>& parameters(const std::string& kernel) const;
  // Starts a kernel in a queue. Throws std::invalid_argument where the arguments do not match
  // the kernel.
  void launch(const std::string& kernel, sycl::queue& queue, const WorkSize& size,
              const std::vector<KernelArgument>& arguments);

 private:
  using Kernels = std::map<std::string, sycl::kernel>;
  Kernels build(const sycl::queue& queue);

  std::string source_;
  std::vector<std::string> names_;
  std::map<std::string, std::string> headers_;
  std::vector<std::string> options_;
  std::map<std::string, std::vector<std::string>> parameters_;
  std::mutex mutex_;
  // A kernel belongs to a context and a device; there are few of them.
  std::vector<std::pair<std::pair<sycl::context, sycl::device>, Kernels>> built_;
};

}  // namespace ipex::xpu

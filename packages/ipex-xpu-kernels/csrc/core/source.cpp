// SPDX-License-Identifier: Apache-2.0
#include "source.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <type_traits>

#include "core.h"

namespace ipex::xpu {
namespace {

namespace experimental = sycl::ext::oneapi::experimental;

// "__sycl_kernel_f(float const*, sycl::_V1::vec<float, 4>, long)" -> its three types
std::vector<std::string> parameter_types(const std::string& symbol) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  const std::string text = status == 0 ? demangled : "";
  std::free(demangled);
  const std::size_t begin = text.find('(');
  if (begin == std::string::npos || text.back() != ')') return {};
  std::vector<std::string> types;
  std::string type;
  int depth = 0;
  for (std::size_t i = begin + 1; i + 1 < text.size(); ++i) {
    const char c = text[i];
    if (c == '<' || c == '(') ++depth;
    if (c == '>' || c == ')') --depth;
    if (c == ',' && depth == 0) {
      types.push_back(type);
      type.clear();
    } else if (c != ' ' || !type.empty()) {
      type += c;
    }
  }
  if (!type.empty()) types.push_back(type);
  return types;
}

struct SetArgument {
  sycl::handler& handler;
  int index;
  const std::string& type;

  void operator()(std::uintptr_t address) const {
    // The size of what it points to does not matter here.
    handler.set_arg(index, reinterpret_cast<void*>(address));
  }
  template <typename Number>
  void operator()(Number value) const {
    if (type == "float") return set<float>(value);
    if (type == "double") return set<double>(value);
    if (type == "int") return set<int>(value);
    if (type == "long" || type == "long long") return set<std::int64_t>(value);
    if (type == "unsigned int") return set<unsigned>(value);
    if (type == "unsigned long" || type == "unsigned long long") return set<std::uint64_t>(value);
    if (type == "bool") return set<bool>(value);
    if (type == "short") return set<short>(value);
    if (type == "unsigned short") return set<unsigned short>(value);
    if (type == "char" || type == "signed char") return set<signed char>(value);
    if (type == "unsigned char") return set<unsigned char>(value);
    throw std::invalid_argument("numbers of the type " + type + " cannot be passed");
  }
  template <typename T, typename Number>
  void set(Number value) const {
    handler.set_arg(index, static_cast<T>(value));
  }
};

template <int N>
sycl::nd_range<N> range(const WorkSize& size) {
  sycl::range<N> global = [&] {
    if constexpr (N == 1) return sycl::range<1>(size.global[0]);
    if constexpr (N == 2) return sycl::range<2>(size.global[0], size.global[1]);
    if constexpr (N == 3) return sycl::range<3>(size.global[0], size.global[1], size.global[2]);
  }();
  sycl::range<N> local = global;
  for (int i = 0; i < N; ++i) local[i] = size.local[static_cast<std::size_t>(i)];
  return {global, local};
}

void check(const WorkSize& size) {
  if (size.global.empty() || size.global.size() > 3 || size.local.size() != size.global.size())
    throw std::invalid_argument(
        "WorkSize: global and local must have 1 to 3 sizes, as many each, got " +
        std::to_string(size.global.size()) + " and " + std::to_string(size.local.size()));
  for (std::size_t i = 0; i < size.global.size(); ++i) {
    if (size.local[i] == 0 || size.global[i] % size.local[i] != 0) {
      throw std::invalid_argument(
          "WorkSize: each global size must be a multiple of its local size, got " +
          std::to_string(size.global[i]) + " and " + std::to_string(size.local[i]));
    }
  }
}

void check(const std::vector<std::string>& types, const std::vector<KernelArgument>& arguments) {
  if (arguments.size() != types.size()) {
    throw std::invalid_argument("the kernel takes " + std::to_string(types.size()) +
                                " arguments, got " + std::to_string(arguments.size()));
  }
  for (std::size_t i = 0; i < types.size(); ++i) {
    const bool pointer = types[i].back() == '*';
    if (pointer != std::holds_alternative<std::uintptr_t>(arguments[i])) {
      throw std::invalid_argument("argument " + std::to_string(i + 1) + " of the kernel is " +
                                  types[i] + ", got a " + (pointer ? "number" : "tensor"));
    }
  }
}

void start(const std::string& name, const sycl::kernel& kernel, sycl::queue& queue,
           const WorkSize& size, const std::vector<std::string>& types,
           const std::vector<KernelArgument>& arguments) {
  submit(queue, name, [&](sycl::handler& handler) {
    for (std::size_t i = 0; i < arguments.size(); ++i)
      std::visit(SetArgument{handler, static_cast<int>(i), types[i]}, arguments[i]);
    switch (size.global.size()) {
      case 1:
        return handler.parallel_for(range<1>(size), kernel);
      case 2:
        return handler.parallel_for(range<2>(size), kernel);
      default:
        return handler.parallel_for(range<3>(size), kernel);
    }
  });
}

// Parameters of the kernels of this package, whose symbols are in the manifests.
const std::vector<std::string>& types_of(const std::string& kernel) {
  static std::mutex mutex;
  static std::map<std::string, std::vector<std::string>> known;
  const std::lock_guard lock(mutex);
  const auto found = known.find(kernel);
  if (found != known.end()) return found->second;
  return known.emplace(kernel, parameter_types(kernel_symbol(kernel))).first->second;
}

}  // namespace

SourceProgram::SourceProgram(std::string source, std::vector<std::string> kernels,
                             std::map<std::string, std::string> headers,
                             std::vector<std::string> options, const sycl::queue& queue)
    : source_(std::move(source)),
      names_(std::move(kernels)),
      headers_(std::move(headers)),
      options_(std::move(options)) {
  built_.emplace_back(std::pair(queue.get_context(), queue.get_device()), build(queue));
}

SourceProgram::Kernels SourceProgram::build(const sycl::queue& queue) {
  experimental::include_files headers;
  for (const auto& [name, text] : headers_) headers.add(name, text);
  ready_compiler(queue.get_context(), queue.get_device());
  auto source = experimental::create_kernel_bundle_from_source(
      queue.get_context(), experimental::source_language::sycl, source_,
      experimental::properties{headers});
  std::vector<std::string> options{kOneModuleEach};
  options.insert(options.end(), options_.begin(), options_.end());
  auto bundle =
      experimental::build(source, std::vector<sycl::device>{queue.get_device()},
                          experimental::properties{experimental::build_options{options},
                                                   experimental::registered_names{names_}});
  Kernels found;
  for (const std::string& name : names_) {
    if (!bundle.ext_oneapi_has_kernel(name)) {
      throw std::invalid_argument("the source has no kernel named " + name +
                                  " (a free function with the property nd_range_kernel)");
    }
    found.emplace(name, bundle.ext_oneapi_get_kernel(name));
    parameters_.try_emplace(name, parameter_types(bundle.ext_oneapi_get_raw_kernel_name(name)));
  }
  return found;
}

void ready_compiler(const sycl::context& context, const sycl::device& device) {
  static std::once_flag begun;
  if (device.is_cpu()) return;
  std::call_once(begun, [&] {
    static const std::string nothing =
        R"(#include <sycl/ext/oneapi/kernel_properties/properties.hpp>
SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((sycl::ext::oneapi::experimental::nd_range_kernel<1>))
void nothing(int*) {}
)";
    auto source = experimental::create_kernel_bundle_from_source(
        context, experimental::source_language::sycl, nothing);
    experimental::build(source, std::vector<sycl::device>{device});
  });
}

const std::vector<std::string>& SourceProgram::parameters(const std::string& kernel) const {
  return parameters_.at(kernel);
}

void SourceProgram::launch(const std::string& kernel, sycl::queue& queue, const WorkSize& size,
                           const std::vector<KernelArgument>& arguments) {
  const auto known = parameters_.find(kernel);
  if (known == parameters_.end())
    throw std::invalid_argument("the program has no kernel named " + kernel);
  const auto& types = known->second;
  check(types, arguments);
  check(size);
  std::optional<sycl::kernel> found;
  {
    const std::lock_guard lock(mutex_);
    const std::pair place(queue.get_context(), queue.get_device());
    auto at = std::find_if(built_.begin(), built_.end(),
                           [&](const auto& one) { return one.first == place; });
    if (at == built_.end()) at = built_.emplace(built_.end(), place, build(queue));
    // Copied: the list may grow while the kernel is started.
    found = at->second.at(kernel);
  }
  start(kernel, *found, queue, size, types, arguments);
}

void launch(const std::string& name, int device, sycl::queue& queue, const WorkSize& size,
            const std::vector<KernelArgument>& arguments) {
  const auto& types = types_of(name);
  check(types, arguments);
  check(size);
  start(name, kernel(name, device), queue, size, types, arguments);
}

}  // namespace ipex::xpu

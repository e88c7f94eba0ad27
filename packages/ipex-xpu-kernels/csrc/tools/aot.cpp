// SPDX-License-Identifier: Apache-2.0
// Compiles a file of SYCL kernels to SPIR-V at build time, with the compiler that is part of the
// SYCL run-time:
//   aot OUTPUT SOURCE HEADER...
// writes OUTPUT.spv (the modules, one per kernel) and OUTPUT.txt (name symbol offset size
// arguments).
#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <sycl/sycl.hpp>
#include <vector>

namespace experimental = sycl::ext::oneapi::experimental;

namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  std::stringstream text;
  text << file.rdbuf();
  return text.str();
}

struct EntryPoint {
  std::string symbol;
  std::size_t arguments = 0;
};

// Entry points of a module and how many parameters their functions have (SPIR-V 1.x, section 2.3: a
// header of five words, then instructions whose first word holds their length and code).
std::vector<EntryPoint> entry_points(const std::string& module) {
  constexpr std::uint32_t kMagic = 0x07230203, kEntryPoint = 15, kFunction = 54,
                          kFunctionParameter = 55, kFunctionEnd = 56;
  std::vector<std::uint32_t> words(module.size() / 4);
  std::memcpy(words.data(), module.data(), words.size() * 4);
  if (words.size() < 5 || words[0] != kMagic)
    throw std::runtime_error("the compiler did not make SPIR-V");
  std::map<std::uint32_t, EntryPoint> found;
  std::uint32_t function = 0;
  for (std::size_t i = 5; i < words.size();) {
    const std::uint32_t code = words[i] & 0xffff;
    const std::uint32_t length = words[i] >> 16;
    if (length == 0) throw std::runtime_error("the SPIR-V is damaged");
    if (code == kEntryPoint)
      found[words[i + 2]].symbol = reinterpret_cast<const char*>(&words[i + 3]);
    if (code == kFunction) function = words[i + 2];
    if (code == kFunctionParameter && found.count(function) != 0) ++found[function].arguments;
    if (code == kFunctionEnd) function = 0;
    i += length;
  }
  std::vector<EntryPoint> result;
  for (const auto& [id, entry] : found) result.push_back(entry);
  return result;
}

// "_Z..__sycl_kernel_binaryI3addfE.." -> "binary<add,float>"
std::string readable(const std::string& symbol) {
  int status = 0;
  char* demangled = abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status);
  std::string text = status == 0 ? demangled : symbol;
  std::free(demangled);
  const std::string prefix = "__sycl_kernel_";
  const std::size_t begin = text.find(prefix);
  if (begin == std::string::npos) throw std::runtime_error("not a free-function kernel: " + text);
  text = text.substr(begin + prefix.size());
  text = text.substr(0, text.find('('));
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (std::size_t at = text.find(from); at != std::string::npos; at = text.find(from, at))
      text.replace(at, from.size(), to);
  };
  replace("sycl::_V1::detail::half_impl::half", "half");
  replace("ipex::", "");
  replace(" ", "");
  return text;
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc < 3) throw std::runtime_error("usage: aot OUTPUT SOURCE HEADER...");
  const std::string output = argv[1];
  const std::string source_file = argv[2];
  experimental::include_files headers;
  for (int i = 3; i < argc; ++i)
    headers.add(std::filesystem::path(argv[i]).filename().string(), read(argv[i]));
  // The modules are also compiled for the CPU device, which is of no use here: fast rather than
  // well. With its optimizations, a file of unrolled kernels takes 25 times as long.
  setenv("SYCL_PROGRAM_COMPILE_OPTIONS", "-cl-opt-disable", 1);
  const sycl::queue queue{sycl::cpu_selector_v};
  auto source = experimental::create_kernel_bundle_from_source(
      queue.get_context(), experimental::source_language::sycl, read(source_file),
      experimental::properties{headers});
  const auto bundle = [&] {
    try {
      return experimental::build(
          source, experimental::properties{experimental::build_options{
                      std::vector<std::string>{"-O2", "-fsycl-device-code-split=per_kernel"}}});
    } catch (const std::exception& e) {
      throw std::runtime_error(source_file + ":\n" + e.what());
    }
  }();
  // Sorted: the compiler gives the modules in any order, and builds are to be equal.
  std::vector<std::string> images;
  for (const auto& image : bundle) {
    const auto content = image.ext_oneapi_get_backend_content();
    images.emplace_back(reinterpret_cast<const char*>(content.data()), content.size());
  }
  std::sort(images.begin(), images.end());
  std::ofstream modules(output + ".spv", std::ios::binary);
  std::map<std::string, std::string> rows;  // sorted, for the same reason
  std::size_t offset = 0;
  for (const std::string& bytes : images) {
    for (const EntryPoint& entry : entry_points(bytes)) {
      const std::string name = readable(entry.symbol);
      std::ostringstream row;
      row << name << ' ' << entry.symbol << ' ' << offset << ' ' << bytes.size() << ' '
          << entry.arguments;
      if (!rows.emplace(name, row.str()).second)
        throw std::runtime_error("two kernels are named " + name);
    }
    modules << bytes;
    offset += bytes.size();
  }
  modules.close();
  std::ofstream manifest(output + ".txt");
  manifest << "# name symbol offset size arguments\n";
  for (const auto& [name, row] : rows) manifest << row << '\n';
  manifest.close();
  if (!modules || !manifest) throw std::runtime_error("cannot write to " + output);
  return 0;
} catch (const std::exception& e) {
  std::cerr << "aot: " << e.what() << '\n';
  return 1;
}

// SPDX-License-Identifier: Apache-2.0
// prebuild KERNELS CACHE: compiles all kernels of the folder KERNELS for the first GPU and keeps
// the results in the folder CACHE, as the package does when a kernel is first used.
#include <exception>
#include <iostream>

#include "core/core.h"

int main(int argc, char** argv) try {
  using namespace ipex::xpu;
  if (argc != 3) throw std::runtime_error("usage: prebuild KERNELS CACHE");
  if (initialize("gpu") == 0) throw std::runtime_error(why_no_device());
  set_kernel_library(argv[1]);
  set_cache_directory(argv[2]);
  for (const auto& name : kernel_names()) (void)kernel(name, 0);
  const LoadStats stats = load_stats();
  std::cout << kernel_names().size() << " kernels, " << stats.compiled << " files compiled, "
            << stats.from_cache << " kernels from the cache, " << stats.cache_errors
            << " errors of the cache\n";
  return stats.cache_errors == 0 ? 0 : 1;
} catch (const std::exception& error) {
  std::cerr << "prebuild: " << error.what() << '\n';
  return 1;
}

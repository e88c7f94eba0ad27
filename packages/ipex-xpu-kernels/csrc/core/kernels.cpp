// SPDX-License-Identifier: Apache-2.0
// Kernels: SPIR-V from the wheel, translated when a kernel is first used, and kept on disk as
// device binaries. A device that takes no SPIR-V gets them from their source, file by file.
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <unordered_map>

#include "binary_cache.h"
#include "core.h"
#include "opencl_program.h"
#include "source.h"

namespace ipex::xpu {
namespace {

namespace experimental = sycl::ext::oneapi::experimental;

struct Entry {
  std::string symbol;
  std::string file;    // the modules of its source file
  std::string source;  // that source file
  std::size_t offset = 0;
  std::size_t size = 0;
  std::size_t arguments = 0;
};

struct Library {
  std::mutex mutex;
  std::map<std::string, Entry, std::less<>> entries;
  // A kernel belongs to the context and device that it was built for. Nodes of a map stay where
  // they are.
  std::map<std::tuple<int, std::string>, std::unique_ptr<sycl::kernel>, std::less<>> built;
  // What source files have been compiled to, by device and file.
  std::map<std::pair<int, std::string>, sycl::kernel_bundle<sycl::bundle_state::executable>>
      compiled;
  std::string headers;  // folder of the files that sources include
  bool from_source = false;
  BinaryCache cache;
  LoadStats stats;
};

Library& library() {
  static Library* instance =
      new Library;  // outlives the static objects of everybody who launches kernels
  return *instance;
}

std::vector<std::byte> read_module(const Entry& entry) {
  std::ifstream file(entry.file, std::ios::binary);
  std::vector<std::byte> bytes(entry.size);
  file.seekg(static_cast<std::streamoff>(entry.offset));
  file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
  if (!file)
    throw std::runtime_error("xpu: " + entry.file +
                             " is truncated: pip install --force-reinstall ipex-xpu-kernels");
  return bytes;
}

sycl::kernel build_from_spirv(const std::vector<std::byte>& spirv, const Entry& entry, int device) {
  auto source = experimental::create_kernel_bundle_from_source(
      sycl_context(device), experimental::source_language::spirv, spirv);
  auto bundle = experimental::build(source, std::vector<sycl::device>{sycl_device(device)});
  return bundle.ext_oneapi_get_kernel(entry.symbol);
}

std::string read_text(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file)
    throw std::runtime_error("xpu: " + path.string() +
                             " cannot be read: pip install --force-reinstall ipex-xpu-kernels");
  return text.str();
}

// All kernels of a source file: to compile the file for one takes as long.
sycl::kernel_bundle<sycl::bundle_state::executable> compile(const Library& lib, const Entry& entry,
                                                            int device) {
  experimental::include_files headers;
  for (const auto& item : std::filesystem::directory_iterator(lib.headers)) {
    if (item.path().extension() == ".h")
      headers.add(item.path().filename().string(), read_text(item.path()));
  }
  auto source = experimental::create_kernel_bundle_from_source(
      sycl_context(device), experimental::source_language::sycl, read_text(entry.source),
      experimental::properties{headers});
  std::vector<std::string> options{"-O2", kOneModuleEach};
  if (!device_info(device).is_cpu) {
    options.emplace_back("-DIPEX_GPU");
    options.push_back("-DIPEX_SUB_GROUP=" + std::to_string(device_info(device).joint_sub_group));
  }
  return experimental::build(source, std::vector<sycl::device>{sycl_device(device)},
                             experimental::properties{experimental::build_options{options}});
}

sycl::kernel build_from_source(Library& lib, const Entry& entry, int device) {
  const std::pair key(device, entry.source);
  auto found = lib.compiled.find(key);
  if (found == lib.compiled.end()) {
    found = lib.compiled.emplace(key, compile(lib, entry, device)).first;
    ++lib.stats.compiled;
  }
  return found->second.ext_oneapi_get_kernel(entry.symbol);
}

bool takes_spirv(int device) {
  const auto backend = sycl_device(device).get_backend();
  return backend == sycl::backend::opencl || backend == sycl::backend::ext_oneapi_level_zero;
}

bool compiled_here(const Library& lib, int device) {
  return lib.from_source || !takes_spirv(device);
}

sycl::kernel build(Library& lib, const Entry& entry, int device) {
  // Without SPIR-V: of a device that the build had not at hand.
  if (compiled_here(lib, device) || entry.size == 0) return build_from_source(lib, entry, device);
  const auto spirv = read_module(entry);
  if (sycl_device(device).get_backend() != sycl::backend::opencl) {
    ++lib.stats.translated;  // Level Zero drivers keep binaries themselves
    return build_from_spirv(spirv, entry, device);
  }
  const DeviceInfo& info = device_info(device);
  const std::string key =
      lib.cache.key(spirv, info.name + '\n' + info.driver_version + '\n' + info.version);
  if (const auto binary = lib.cache.read(key)) {
    try {
      auto found = OpenClProgram::from_binary(sycl_context(device), sycl_device(device), *binary)
                       .kernel(entry.symbol);
      ++lib.stats.from_cache;
      return found;
    } catch (const std::exception&) {
      ++lib.stats.cache_errors;  // of another driver, or damaged: made again below
    }
  }
  const auto program = OpenClProgram::from_spirv(sycl_context(device), sycl_device(device), spirv);
  ++lib.stats.translated;
  if (!lib.cache.write(key, program.binary())) ++lib.stats.cache_errors;
  return program.kernel(entry.symbol);
}

const Entry& entry_of(const Library& lib, std::string_view name) {
  const auto entry = lib.entries.find(name);
  if (entry == lib.entries.end())
    throw std::runtime_error("xpu: there is no kernel named " + std::string(name));
  return entry->second;
}

}  // namespace

void set_kernel_library(const std::string& directory) {
  std::map<std::string, Entry, std::less<>> entries;
  for (const auto& item : std::filesystem::directory_iterator(directory)) {
    if (item.path().extension() != ".txt") continue;
    const std::string manifest = item.path().string();
    std::ifstream file(manifest);
    for (std::string line; std::getline(file, line);) {
      if (line.empty() || line[0] == '#') continue;
      std::istringstream fields(line);
      std::string name;
      Entry entry;
      entry.file = std::filesystem::path(manifest).replace_extension(".spv").string();
      entry.source = std::filesystem::path(manifest).replace_extension(".sycl.cpp").string();
      if (!(fields >> name >> entry.symbol >> entry.offset >> entry.size >> entry.arguments)) {
        throw std::runtime_error("xpu: " + manifest + " has the unreadable line: " + line);
      }
      if (!entries.emplace(name, entry).second)
        throw std::runtime_error("xpu: " + directory + " has two kernels named " + name);
    }
  }
  if (entries.empty()) throw std::runtime_error("xpu: there are no kernels in " + directory);
  Library& lib = library();
  const std::lock_guard lock(lib.mutex);
  lib.entries = std::move(entries);
  lib.headers = directory;
}

void set_kernels_from_source(bool always) {
  Library& lib = library();
  const std::lock_guard lock(lib.mutex);
  lib.from_source = always;
}

void set_cache_directory(const std::string& directory) {
  Library& lib = library();
  const std::lock_guard lock(lib.mutex);
  lib.cache = BinaryCache(directory);
}

std::vector<std::string> kernel_names() {
  std::vector<std::string> names;
  for (const auto& [name, entry] : library().entries) names.push_back(name);
  return names;
}

std::string kernel_symbol(std::string_view name) { return entry_of(library(), name).symbol; }

int bytes_of_item(int device) {
  return !device_info(device).is_cpu && compiled_here(library(), device) ? 16 : 0;
}

LoadStats load_stats() {
  Library& lib = library();
  const std::lock_guard lock(lib.mutex);
  return lib.stats;
}

const sycl::kernel& kernel(std::string_view name, int device) {
  Library& lib = library();
  const std::lock_guard lock(lib.mutex);
  const std::tuple<int, std::string> key(device, name);
  if (const auto found = lib.built.find(key); found != lib.built.end()) return *found->second;
  const Entry& entry = entry_of(lib, name);
  try {
    auto made = std::make_unique<sycl::kernel>(build(lib, entry, device));
    // Adapters of devices without SPIR-V count what was set, not what the kernel takes.
    const auto arguments = takes_spirv(device) && entry.size != 0
                               ? made->get_info<sycl::info::kernel::num_args>()
                               : entry.arguments;
    if (arguments != entry.arguments) {
      throw std::runtime_error("it has " + std::to_string(arguments) +
                               " arguments, the manifest says " + std::to_string(entry.arguments));
    }
    return *lib.built.emplace(key, std::move(made)).first->second;
  } catch (const std::exception& e) {
    throw std::runtime_error("xpu: the kernel " + std::string(name) + " cannot be built for " +
                             device_info(device).name + ": " + e.what());
  }
}

}  // namespace ipex::xpu

// SPDX-License-Identifier: Apache-2.0
// Kernels: SPIR-V from the wheel, translated when a kernel is first used, and kept on disk as
// device binaries. A device that takes no SPIR-V gets them from their source, file by file; what
// the compiler makes of a file is kept on disk, too.
#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <tuple>

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

using Executable = sycl::kernel_bundle<sycl::bundle_state::executable>;

// A source file, as it is compiled for a device.
struct SourceFile {
  std::string text;
  std::map<std::string, std::string> headers;
  std::vector<std::string> options;
  std::string all;                     // everything that the result depends on
  std::optional<Executable> compiled;  // all kernels: to compile the file for one takes as long
};

struct Library {
  std::mutex mutex;
  std::map<std::string, Entry, std::less<>> entries;
  // A kernel belongs to the context and device that it was built for. Nodes of a map stay where
  // they are.
  std::map<std::tuple<int, std::string>, std::unique_ptr<sycl::kernel>, std::less<>> built;
  std::map<std::pair<int, std::string>, SourceFile> sources;  // by device and file
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

// From SPIR-V, or from what a source was compiled to for this device.
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

// What a source says whose kernels need no numbers below the normal ones on a GPU.
constexpr const char* kNoSubnormals = "// Subnormal numbers may be zero.";

SourceFile read_source(const Library& lib, const Entry& entry, int device) {
  SourceFile file;
  file.text = read_text(entry.source);
  for (const auto& item : std::filesystem::directory_iterator(lib.headers)) {
    if (item.path().extension() == ".h")
      file.headers.emplace(item.path().filename().string(), read_text(item.path()));
  }
  const DeviceInfo& info = device_info(device);
  file.options = {"-O2", kOneModuleEach};
  if (!info.is_cpu) {
    file.options.emplace_back("-DIPEX_GPU");
    file.options.push_back("-DIPEX_SUB_GROUP=" + std::to_string(info.joint_sub_group));
    // Powers of 2 take several instructions more where numbers below the normal ones count.
    if (file.text.find(kNoSubnormals) != std::string::npos)
      file.options.emplace_back("-fdenormal-fp-math=preserve-sign");
  }
  // The variable chooses among the architectures of such devices.
  const char* target = std::getenv("SYCL_JIT_AMDGCN_PTX_TARGET_CPU");
  file.all = file.text;
  for (const auto& [name, text] : file.headers) file.all += '\n' + name + '\n' + text;
  for (const std::string& option : file.options) file.all += '\n' + option;
  file.all += '\n' + info.platform + '\n' + info.version + '\n' + (target ? target : "") + '\n' +
              std::to_string(__LIBSYCL_MAJOR_VERSION) + '.' +
              std::to_string(__LIBSYCL_MINOR_VERSION);
  return file;
}

Executable compile(const SourceFile& file, int device) {
  ready_compiler(sycl_context(device), sycl_device(device));
  experimental::include_files headers;
  for (const auto& [name, text] : file.headers) headers.add(name, text);
  auto source = experimental::create_kernel_bundle_from_source(
      sycl_context(device), experimental::source_language::sycl, file.text,
      experimental::properties{headers});
  return experimental::build(source, std::vector<sycl::device>{sycl_device(device)},
                             experimental::properties{experimental::build_options{file.options}});
}

// Name of the place of a kernel in the cache.
std::string cache_key(const Library& lib, const SourceFile& file, const Entry& entry) {
  std::vector<std::byte> symbol(entry.symbol.size());
  std::memcpy(symbol.data(), entry.symbol.data(), symbol.size());
  return lib.cache.key(symbol, file.all);
}

// Whether a module has a symbol, and not one that begins with it.
bool mentions(const std::vector<unsigned char>& module, const std::string& symbol) {
  const auto inside = [](unsigned char c) { return std::isalnum(c) != 0 || c == '_'; };
  const std::boyer_moore_searcher searcher(symbol.begin(), symbol.end());
  for (auto at = module.begin();;) {
    at = std::search(at, module.end(), searcher);
    if (at == module.end()) return false;
    at += static_cast<std::ptrdiff_t>(symbol.size());
    if (at == module.end() || !inside(*at)) return true;
  }
}

// Writes the modules of a file, one for each kernel, to the cache.
void keep(Library& lib, const SourceFile& file, const Entry& entry) {
  std::vector<const Entry*> left;
  for (const auto& [name, other] : lib.entries) {
    if (other.source == entry.source) left.push_back(&other);
  }
  for (const auto& image : *file.compiled) {
    const auto content = image.ext_oneapi_get_backend_content();
    std::vector<unsigned char> module(content.size());
    std::memcpy(module.data(), content.data(), module.size());
    const auto found = std::find_if(left.begin(), left.end(), [&](const Entry* other) {
      return mentions(module, other->symbol);
    });
    if (found == left.end()) continue;
    if (!lib.cache.write(cache_key(lib, file, **found), module)) ++lib.stats.cache_errors;
    left.erase(found);
  }
}

sycl::kernel build_from_source(Library& lib, const Entry& entry, int device) {
  const std::pair place(device, entry.source);
  auto found = lib.sources.find(place);
  if (found == lib.sources.end())
    found = lib.sources.emplace(place, read_source(lib, entry, device)).first;
  SourceFile& file = found->second;
  if (!file.compiled) {
    if (const auto kept = lib.cache.read(cache_key(lib, file, entry))) {
      try {
        std::vector<std::byte> module(kept->size());
        std::memcpy(module.data(), kept->data(), module.size());
        auto made = build_from_spirv(module, entry, device);
        ++lib.stats.from_cache;
        return made;
      } catch (const std::exception&) {
        ++lib.stats.cache_errors;  // damaged, or the device takes sources only
      }
    }
    file.compiled = compile(file, device);
    ++lib.stats.compiled;
    keep(lib, file, entry);
  }
  return file.compiled->ext_oneapi_get_kernel(entry.symbol);
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

std::map<std::string, std::string> user_headers() {
  const std::filesystem::path folder = library().headers;
  return {{"ipex/xpu.h", read_text(folder / "prelude.h")},
          {"ipex/bfloat16.h", read_text(folder / "bfloat16.h")}};
}

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

// SPDX-License-Identifier: Apache-2.0
#include "device/onednn/onednn_library.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace ipex::xpu::onednn {
namespace {

// The interface above belongs to this major release.
constexpr int kMajor = 3;

std::atomic<Mode> g_mode{Mode::Auto};
std::atomic<std::uint64_t> g_runs{0};

struct Loaded {
  std::once_flag once;
  std::string path;
  std::string why;
  std::string version;
  Library functions;
  bool usable = false;
};

Loaded& loaded() {
  static Loaded* instance = new Loaded;  // outlives the static objects of everybody
  return *instance;
}

std::string last_error() {
  const char* text = ::dlerror();
  return text == nullptr ? "unknown error" : text;
}

// The library's wheel does not say where the libraries are that it needs: next to it.
void* open_with_neighbors(const std::string& path) {
  void* handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) return handle;
  const std::string folder = path.substr(0, path.rfind('/') + 1);
  for (const char* name : {"libintlc.so.5", "libimf.so", "libsvml.so", "libtbb.so.12"})
    ::dlopen((folder + name).c_str(), RTLD_NOW | RTLD_LOCAL);
  return ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
}

void load(Loaded& to) {
  if (to.path.empty()) return;
  void* handle = open_with_neighbors(to.path);
  if (handle == nullptr) {
    to.why = last_error();
    return;
  }
  const char* missing = nullptr;
#define IPEX_ONEDNN_LOOK_UP(name, result, arguments)                                         \
  to.functions.name = reinterpret_cast<result(*) arguments>(::dlsym(handle, "dnnl_" #name)); \
  if (to.functions.name == nullptr && missing == nullptr) missing = "dnnl_" #name;
  IPEX_ONEDNN_FUNCTIONS(IPEX_ONEDNN_LOOK_UP)
#undef IPEX_ONEDNN_LOOK_UP
  if (missing != nullptr) {
    to.why = to.path + " has no " + missing + ": it is not oneDNN for SYCL";
    return;
  }
  const Version* found = to.functions.version();
  to.version = std::to_string(found->major) + '.' + std::to_string(found->minor) + '.' +
               std::to_string(found->patch);
  to.usable = found->major == kMajor;
  if (!to.usable) to.why = to.path + " is oneDNN " + to.version + ", not 3";
}

Loaded& load_once() {
  Loaded& all = loaded();
  std::call_once(all.once, [&] { load(all); });
  return all;
}

}  // namespace

void set_mode(Mode mode) { g_mode = mode; }
Mode mode() { return g_mode; }

void set_path(const std::string& path, const std::string& why) {
  loaded().path = path;
  loaded().why = why;
}

const Library* library() {
  if (g_mode == Mode::Off) return nullptr;
  const Loaded& all = load_once();
  return all.usable ? &all.functions : nullptr;
}

State state() {
  const Loaded& all = load_once();
  return {all.path, all.usable ? all.version : "", all.why, g_runs};
}

void count_run() { ++g_runs; }

}  // namespace ipex::xpu::onednn

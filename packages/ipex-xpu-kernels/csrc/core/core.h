// SPDX-License-Identifier: Apache-2.0
// SYCL devices, queues and kernels, without torch: what both modes of the package share.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <sycl/sycl.hpp>
#include <type_traits>
#include <utility>
#include <vector>

// Contract version of this package; must equal the version of the core.
#define IPEX_KERNEL_API_VERSION 1

namespace ipex::xpu {

// What torch.xpu.get_device_properties reports, and what kernels ask for.
struct DeviceInfo {
  std::string name;
  std::string vendor;
  std::string platform;
  std::string driver_version;
  std::string version;
  bool is_cpu = false;
  // Memory of malloc_device can be read and written by the host; kernels are then optional.
  bool host_accessible = false;
  bool has_fp16 = false;
  bool has_fp64 = false;
  bool has_atomic64 = false;
  std::uint64_t total_memory = 0;    // bytes
  std::uint64_t max_allocation = 0;  // bytes of one allocation
  std::uint64_t local_memory = 0;    // bytes for each work-group
  std::uint32_t compute_units = 0;
  std::uint32_t max_work_group_size = 0;
  std::uint32_t max_num_sub_groups = 0;
  std::vector<std::size_t> sub_group_sizes;
  // Of kernels of joint_matrix, where the device multiplies 16 x 16 x 16 numbers of bfloat16 and
  // half; 0 where it does not.
  std::uint32_t joint_sub_group = 0;
  std::string
      uuid;  // 16 bytes in hexadecimal; derived from name and index where the driver has none
};

// Finds the devices once. `request` is the value of IPEX_XPU_DEVICE: "" or "gpu" (GPUs only),
// "cpu", "cpu:N" (the CPU device in N parts), "auto" (GPUs, else the CPU). Returns their number;
// never throws, see `why_no_device`.
int initialize(const std::string& request);
// The devices and contexts of these queues instead: queues of a torch that has XPU itself.
void adopt(const std::vector<sycl::queue*>& queues);
int device_count() noexcept;
const std::string& why_no_device() noexcept;
const DeviceInfo& device_info(int device);
sycl::device& sycl_device(int device);
sycl::context& sycl_context(int device);

// A queue of the pools of a device: 0 is the default stream, the others are handed out round robin
// by the caller, first normal, then high and low priority. In order.
inline constexpr int kStreamsOfPool = 32;
inline constexpr int kStreamsPerDevice = 1 + 3 * kStreamsOfPool;
// 0, -1 for high and 1 for low, as torch numbers them.
constexpr int priority_of(std::int64_t stream) {
  if (stream <= kStreamsOfPool) return 0;
  return stream <= 2 * kStreamsOfPool ? -1 : 1;
}
sycl::queue& queue(int device, int stream);
// The number of the stream that has this queue.
std::optional<int> stream_of(const sycl::queue* queue, int device);
// Device and stream of a queue; the stream is -1 for a queue of others.
std::pair<int, int> place_of(const sycl::queue& queue);
void synchronize(int device);
// Waits for all queues of all devices and lets no further queue be made: before the SYCL run-time
// goes away.
void shutdown() noexcept;

// Kernels
// ----------------------------------------------------------------------------------------------------------

// Reads the manifests that the build made: for each source file NAME.sycl.cpp, which is there too,
// one NAME.txt of lines "name symbol offset size arguments" and one NAME.spv of SPIR-V modules. A
// kernel of size 0 has no SPIR-V and is compiled from its source on every device.
// Throws std::runtime_error.
void set_kernel_library(const std::string& directory);
// Whether kernels are compiled from their source on every device, not only on devices whose driver
// takes no SPIR-V. Holds for kernels that are built afterwards.
void set_kernels_from_source(bool always);
// Folder for device binaries, so that a kernel is translated once for each driver; empty turns the
// cache off.
void set_cache_directory(const std::string& directory);
std::vector<std::string> kernel_names();
// The C++ symbol of a kernel, mangled. Throws std::runtime_error.
std::string kernel_symbol(std::string_view name);
// Number of kernels translated from SPIR-V, of source files compiled, and of kernels read from the
// cache since the start.
struct LoadStats {
  std::uint64_t translated = 0;
  std::uint64_t compiled = 0;
  std::uint64_t from_cache = 0;
  std::uint64_t cache_errors = 0;
};
LoadStats load_stats();
// The kernel for the device of a queue; built or read from the cache at its first use. Throws
// std::runtime_error.
const sycl::kernel& kernel(std::string_view name, int device);

// Bytes of each operand that an item of a kernel of this device moves at once (map_elements in
// prelude.h): 16 on a GPU whose kernels are compiled for it, 0 where an item moves one number.
int bytes_of_item(int device);

// Times of kernels
// --------------------------------------------------------------------------------------------------

// When the device began a kernel and ended it, in nanoseconds of its clock.
struct KernelTime {
  std::string name;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};
// From now on the event of each kernel is kept; those kept before are dropped.
void start_kernel_times();
// Waits for the kept kernels and returns their times in the order of their starts; no more are
// kept. Throws std::runtime_error where a queue does not measure.
std::vector<KernelTime> stop_kernel_times();

enum class Work : std::uint8_t { Kernel, Copy, Fill };
// What a device did while a profile was open. Times are nanoseconds of the host's clock since 1970.
struct ProfiledWork {
  std::string name;
  Work kind = Work::Kernel;
  int device = 0;
  int stream = 0;
  std::int64_t begin = 0;  // on the device
  std::int64_t end = 0;
  std::int64_t submit_begin = 0;  // on the host
  std::int64_t submit_end = 0;
  int thread = 0;                          // the system's number of the thread that submitted
  std::uint64_t op = 0;                    // the innermost op of that thread, see push_op; 0: none
  std::vector<std::uint64_t> annotations;  // its open annotations, the outermost first
};
// A profile beside kernel_times, with copies. There is one at a time: starting another one drops
// what was kept.
void start_profile();
// Waits for what was kept. Throws std::runtime_error where a queue does not measure.
std::vector<ProfiledWork> stop_profile();
// The op that the calling thread is in, by a number that is not 0, and what its user calls it.
void push_op(std::uint64_t id);
void pop_op();
void push_annotation(std::uint64_t id);
void pop_annotation();

// Whether times are kept, and what was submitted meanwhile; `begin` is host_time() before that.
bool keeps_times();
std::int64_t host_time();
void keep_time(const sycl::queue& q, std::string_view name, Work kind, std::int64_t begin,
               const sycl::event& event);

// Submits what starts a kernel. An event costs the host and the device microseconds, and queues are
// in order: there is one only while times are kept.
template <typename F>
void submit(sycl::queue& q, std::string_view name, F start) {
  if (keeps_times()) {
    const std::int64_t begin = host_time();
    keep_time(q, name, Work::Kernel, begin, q.submit(start));
  } else {
    sycl::ext::oneapi::experimental::submit(q, start);
  }
}

// As the functions of a queue.
sycl::event submit_copy(sycl::queue& q, void* to, const void* from, std::size_t bytes);
sycl::event submit_fill(sycl::queue& q, void* to, int value, std::size_t bytes);

// Starts a kernel: `global` must be divisible by `local` (a GPU refuses anything else, a CPU device
// does not say so).
template <int N, typename... Args>
void launch(sycl::queue& q, int device, std::string_view name, sycl::range<N> global,
            sycl::range<N> local, Args... args) {
  static_assert(((std::is_pointer_v<Args> || std::is_arithmetic_v<Args>) && ...),
                "kernels take pointers and scalars");
  const sycl::kernel& found = kernel(name, device);
  submit(q, name, [&](sycl::handler& handler) {
    handler.set_args(args...);
    handler.parallel_for(sycl::nd_range<N>(global, local), found);
  });
}

// One work-item for each of `count` elements, in groups that divide the range; kernels test their
// index against the count.
template <typename... Args>
void launch_elements(sycl::queue& q, int device, std::string_view name, std::size_t count,
                     Args... args) {
  constexpr std::size_t kGroup = 256;
  if (count == 0) return;
  const std::size_t groups = (count + kGroup - 1) / kGroup;
  launch<1>(q, device, name, sycl::range<1>(groups * kGroup), sycl::range<1>(kGroup), args...);
}

}  // namespace ipex::xpu

// SPDX-License-Identifier: Apache-2.0
// The xpu device of a torch that has none: what the parts of this folder share.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/TensorBody.h>
#include <ATen/core/stack.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace c10 {
class OperatorHandle;
}
namespace sycl {
inline namespace _V1 {
class queue;
}
}  // namespace sycl

namespace ipex::xpu {

// Registers the devices that were found with torch (program.cpp).
void register_device();

// Devices and streams of the calling thread (guard.cpp).
void check_device(c10::DeviceIndex device);  // raises unless there is such a device
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device) noexcept;
c10::Stream pool_stream(c10::DeviceIndex device, int priority);
sycl::queue& queue_of(const c10::Stream& stream);
sycl::queue& current_queue(c10::DeviceIndex device);
void register_guard();

// Memory (allocator.cpp, pinned.cpp).
c10::DeviceAllocator& allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
bool is_device_pointer(const void* pointer, c10::DeviceIndex& device);
void register_allocator();
void set_memory_fraction(double fraction, c10::DeviceIndex device);
double memory_fraction(c10::DeviceIndex device);
std::vector<c10::CachingDeviceAllocator::SegmentInfo> memory_snapshot();
struct Trace;
void record_memory_history(std::size_t limit);
std::vector<std::vector<Trace>> memory_history();

// Random numbers (generator.cpp).
const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator make_generator(c10::DeviceIndex device);
// The generator of the host that ops without a kernel of their own draw from.
at::Generator host_generator(const at::Generator& generator);
// Seed and offset of a Philox stream, after having moved the offset past `count` numbers of each
// work-item.
std::pair<std::uint64_t, std::uint64_t> next_philox(const at::Generator& generator,
                                                    std::uint64_t count);

// Hooks (hooks.cpp). Raises if autograd has sized its queues before, since then a backward pass
// would abort.
void register_hooks();

// Starts autograd's threads of the devices; raises if a backward pass has run before, which is too
// early (autograd_threads.cpp).
void start_autograd_threads();
// Ends autograd's threads for good, so that none of them outlives the interpreter; false if one did
// not end in time.
bool stop_autograd_threads();

// Ops without a kernel of their own (fallback.cpp, host_memory.cpp).
enum class FallbackMode : std::uint8_t { Silent, WarnOnce, Error };
void set_fallback_mode(FallbackMode mode);
void set_zero_copy(
    bool on);  // off: stages through host copies even where the host could read the memory
std::vector<std::pair<std::string, std::uint64_t>> fallback_stats();
void reset_fallback_stats();
void count_fallback(const char* op);
void register_fallback();
// Runs an op on the host: what kernels call for arguments that they do not have.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack);

FallbackMode fallback_mode();
// Whether the host works on the memory of the device itself, so that a fallback costs no copies.
bool host_readable(c10::DeviceIndex device);

// The same values for the host: a view of the same memory where the host can read it (the caller
// then must not use it after the tensor), a copy otherwise. The queue is empty afterwards.
at::Tensor to_host(const at::Tensor& tensor);
// Writes back what an op did to the result of to_host(tensor).
void from_host(const at::Tensor& host, const at::Tensor& tensor);
// A new tensor on the device with the values, sizes and strides of one on the host.
at::Tensor to_device(const at::Tensor& host, c10::DeviceIndex device);

void register_tensor_ops();  // tensor_ops.cpp
void register_composites();  // composites.cpp
void register_kernels();     // kernel_ops.cpp
// Kernels of the ops torch.ops.ipex, which a torch that has XPU itself takes, too.
void register_ipex_kernels();
void register_collectives();  // collectives.cpp

// Whether collectives read the memory of other processes on the device (direct.cpp): where the
// device gives it to others and it pays off, never, or wherever possible, which on a device whose
// memory is the host's means memory that they share.
enum class CollectiveMode : std::uint8_t { Auto, Host, Direct };
void set_collective_mode(CollectiveMode mode);
// The timeout of the collectives of a group by its name; 30 minutes without.
void set_group_timeout(const std::string& group, double seconds);
// How many have been started so.
std::uint64_t direct_collectives();
// Lets the ones in flight end, some seconds at most; later ones go through the host.
void stop_collectives();

}  // namespace ipex::xpu

// SPDX-License-Identifier: Apache-2.0
// Calls of oneDNN: objects that release themselves, tensors as it sees them, and plans, which are
// made once for each kind of call and kept.
#pragma once

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/onednn/onednn_library.h"

namespace ipex::xpu::onednn {

template <typename T, auto destroy>
struct Destroyer {
  const Library* library;
  void operator()(T* object) const { (library->*destroy)(object); }
};
template <typename T, auto destroy>
using Handle = std::unique_ptr<T, Destroyer<T, destroy>>;
using DescHandle = Handle<Desc, &Library::memory_desc_destroy>;
using MemoryHandle = Handle<Memory, &Library::memory_destroy>;
using AttributesHandle = Handle<Attributes, &Library::primitive_attr_destroy>;
using PostOpsHandle = Handle<PostOps, &Library::post_ops_destroy>;
using PrimitiveDescHandle = Handle<PrimitiveDesc, &Library::primitive_desc_destroy>;
using PrimitiveHandle = Handle<Primitive, &Library::primitive_destroy>;

// What the library does not do; somebody else then does it.
struct Refused {};

inline void check(int status) {
  if (status != 0) throw Refused{};
}

// make(&object) creates an object, or says why not.
template <typename H, typename Make>
H created(const Library& library, Make&& make) {
  typename H::pointer object = nullptr;
  check(make(&object));
  return H(object, {&library});
}

using Numbers = std::vector<std::int64_t>;

// A tensor as the library sees it.
struct Shape {
  Numbers sizes;
  Numbers strides;
  int type;

  DescHandle desc(const Library& library) const {
    return created<DescHandle>(library, [&](Desc** to) {
      return library.memory_desc_create_with_strides(to, static_cast<int>(sizes.size()),
                                                     sizes.data(), type, strides.data());
    });
  }
  DescHandle any_layout(const Library& library) const {
    return created<DescHandle>(library, [&](Desc** to) {
      return library.memory_desc_create_with_tag(to, static_cast<int>(sizes.size()), sizes.data(),
                                                 type, onednn::kAnyLayout);
    });
  }
  void add_to(Numbers& key) const {
    key.push_back(type);
    key.push_back(static_cast<std::int64_t>(sizes.size()));
    key.insert(key.end(), sizes.begin(), sizes.end());
    key.insert(key.end(), strides.begin(), strides.end());
  }
};

// Raises Refused for a dtype that the library does not have.
Shape shape_of(const at::Tensor& x);

AttributesHandle attributes(const Library& library);

// One device's part of the library; null if it does not take the device.
struct Context;
Context* context_of(const Library& library, c10::DeviceIndex device);
Engine* engine_of(const Context& context);

struct Wanted {
  int index;
  Shape shape;
  bool written = false;
};

// The plan for a key, made by `describe` at first; null if the library has no fast one.
struct Plan;
std::shared_ptr<const Plan> plan_for(const Library& library, Context& context, const Numbers& key,
                                     const std::vector<Wanted>& operands,
                                     const std::function<PrimitiveDescHandle()>& describe);

// Runs a plan on tensors in the order of its operands, in the current stream of the device.
void run(const Library& library, Context& context, c10::DeviceIndex device, const Plan& plan,
         const std::vector<at::Tensor>& tensors);

}  // namespace ipex::xpu::onednn

// SPDX-License-Identifier: Apache-2.0
#include "onednn_ops.h"

#include <ATen/Functions.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

#include "core/core.h"
#include "kernel_ops.h"
#include "onednn_library.h"
#include "runtime.h"

namespace ipex::xpu {
namespace {

using at::Tensor;
using onednn::Argument;
using onednn::Attributes;
using onednn::Desc;
using onednn::Dims;
using onednn::Engine;
using onednn::Library;
using onednn::Memory;
using onednn::PostOps;
using onednn::Primitive;
using onednn::PrimitiveDesc;
using onednn::Stream;

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

void check(int status) {
  if (status != 0) throw Refused{};
}

void must(int status) {
  TORCH_CHECK(status == 0, "xpu: oneDNN failed with status ", status,
              "; IPEX_XPU_ONEDNN=0 does without it");
}

// make(&object) creates an object, or says why not.
template <typename H, typename Make>
H created(const Library& library, Make&& make) {
  typename H::pointer object = nullptr;
  check(make(&object));
  return H(object, {&library});
}

int data_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return onednn::kFloat32;
    case at::kBFloat16:
      return onednn::kBFloat16;
    case at::kHalf:
      return onednn::kFloat16;
    default:
      throw Refused{};
  }
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

Shape shape_of(const Tensor& x) {
  return {x.sizes().vec(), x.strides().vec(), data_type(x.scalar_type())};
}

// Something to run, with memory of ours to work in, so that several streams can at once.
struct Step {
  PrimitiveDescHandle desc;
  PrimitiveHandle primitive;
  const Desc* scratch = nullptr;
  std::int64_t scratch_bytes = 0;

  Step(const Library& library, PrimitiveDescHandle from) : desc(std::move(from)) {
    primitive = created<PrimitiveHandle>(
        library, [&](Primitive** to) { return library.primitive_create(to, desc.get()); });
    scratch = library.primitive_desc_query_md(desc.get(), onednn::kScratchDesc, 0);
    if (scratch != nullptr)
      scratch_bytes = static_cast<std::int64_t>(library.memory_desc_get_size(scratch));
  }
};

struct Operand {
  int index;
  bool written;
  DescHandle own;
  const Desc* wanted;             // of the primitive
  std::int64_t bytes;             // of the wanted layout
  std::unique_ptr<Step> reorder;  // where the layouts differ
};

struct Plan {
  std::unique_ptr<Step> step;
  std::vector<Operand> operands;
};

AttributesHandle attributes(const Library& library) {
  auto result = created<AttributesHandle>(
      library, [&](Attributes** to) { return library.primitive_attr_create(to); });
  check(library.primitive_attr_set_scratchpad_mode(result.get(), onednn::kScratchOfUser));
  return result;
}

// One device's part of the library, and what its streams still use.
struct Context {
  Engine* engine = nullptr;
  bool cpu = false;
  std::map<const sycl::queue*, Stream*> streams;
  std::deque<std::pair<sycl::event, std::vector<MemoryHandle>>> in_use;
  std::map<Numbers, std::shared_ptr<const Plan>> plans;  // null: refused
  std::mutex mutex;
};

// Plans of so many shapes are kept; more are made again.
constexpr std::size_t kMaxPlans = 4096;

// Null if the library does not take the device.
Context* context_of(const Library& library, c10::DeviceIndex device) {
  static auto* contexts = new std::map<c10::DeviceIndex, std::unique_ptr<Context>>;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  auto& found = (*contexts)[device];
  if (found == nullptr) {
    found = std::make_unique<Context>();
    found->cpu = device_info(device).is_cpu;
    if (library.sycl_interop_engine_create(&found->engine, &sycl_device(device),
                                           &sycl_context(device)) != 0)
      found->engine = nullptr;
  }
  return found->engine == nullptr ? nullptr : found.get();
}

// Reference implementations are slower than our kernels; on a CPU so are those of bfloat16 and
// float16 without instructions for them, which convert whole matrices.
bool fast(const Library& library, const PrimitiveDesc* desc, bool cpu) {
  const char* name = nullptr;
  if (library.primitive_desc_query(desc, onednn::kImplementation, 0, &name) != 0 || name == nullptr)
    return false;
  const std::string_view implementation(name);
  if (onednn::mode() == onednn::Mode::Prefer) return true;
  if (cpu && implementation.starts_with("gemm")) return false;
  return implementation.find("ref") == std::string_view::npos;
}

// The library's calls of one op, in order, on the current stream.
class Execution {
 public:
  Execution(const Library& library, Context& context, c10::DeviceIndex device)
      : library_(library), context_(context), queue_(current_queue(device)), device_(device) {
    const std::lock_guard lock(context.mutex);
    auto& found = context.streams[&queue_];
    if (found == nullptr) must(library.sycl_interop_stream_create(&found, context.engine, &queue_));
    stream_ = found;
    auto& in_use = context.in_use;
    while (!in_use.empty() &&
           in_use.front().first.get_info<sycl::info::event::command_execution_status>() ==
               sycl::info::event_command_status::complete)
      in_use.pop_front();
  }
  Execution(const Execution&) = delete;
  Execution& operator=(const Execution&) = delete;
  ~Execution() {
    const std::lock_guard lock(context_.mutex);
    context_.in_use.emplace_back(last_, std::move(memories_));
  }

  Argument bind(int index, const Desc* desc, void* data) {
    Memory* memory = nullptr;
    must(library_.sycl_interop_memory_create(&memory, desc, context_.engine, onednn::kUsm, data));
    memories_.emplace_back(memory, MemoryHandle::deleter_type{&library_});
    return {index, memories_.back().get()};
  }
  // The allocator hands memory that is released here to later work of the same stream only.
  Tensor workspace(std::int64_t bytes) const {
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(c10::kXPU, device_));
  }
  void run(const Step& step, std::vector<Argument> arguments) {
    Tensor scratch;
    if (step.scratch_bytes != 0) {
      scratch = workspace(step.scratch_bytes);
      arguments.push_back(bind(onednn::kScratch, step.scratch, scratch.mutable_data_ptr()));
    }
    must(library_.sycl_interop_primitive_execute(step.primitive.get(), stream_,
                                                 static_cast<int>(arguments.size()),
                                                 arguments.data(), nullptr, &last_));
  }

 private:
  const Library& library_;
  Context& context_;
  sycl::queue& queue_;
  c10::DeviceIndex device_;
  Stream* stream_ = nullptr;
  std::vector<MemoryHandle> memories_;
  sycl::event last_;
};

void run(const Library& library, Context& context, c10::DeviceIndex device, const Plan& plan,
         const std::vector<Tensor>& tensors) {
  onednn::count_run();
  Execution execution(library, context, device);
  std::vector<Argument> arguments;
  std::vector<Tensor> copies;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Operand& operand = plan.operands[i];
    void* data = const_cast<void*>(tensors[i].const_data_ptr());
    if (operand.reorder != nullptr) {
      copies.push_back(execution.workspace(operand.bytes));
      void* copy = copies.back().mutable_data_ptr();
      if (!operand.written) {
        execution.run(*operand.reorder, {execution.bind(onednn::kSource, operand.own.get(), data),
                                         execution.bind(onednn::kResult, operand.wanted, copy)});
      }
      data = copy;
    }
    arguments.push_back(execution.bind(operand.index, operand.wanted, data));
  }
  execution.run(*plan.step, arguments);
  for (std::size_t i = 0, copied = 0; i < tensors.size(); ++i) {
    const Operand& operand = plan.operands[i];
    if (operand.reorder == nullptr) continue;
    const Tensor& copy = copies[copied++];
    if (operand.written) {
      execution.run(
          *operand.reorder,
          {execution.bind(onednn::kSource, operand.wanted, copy.mutable_data_ptr()),
           execution.bind(onednn::kResult, operand.own.get(), tensors[i].mutable_data_ptr())});
    }
  }
}

std::unique_ptr<Step> reorder(const Library& library, Engine* engine, const Desc* from,
                              const Desc* to) {
  const auto with = attributes(library);
  return std::make_unique<Step>(
      library, created<PrimitiveDescHandle>(library, [&](PrimitiveDesc** desc) {
        return library.reorder_primitive_desc_create(desc, from, engine, to, engine, with.get());
      }));
}

struct Wanted {
  int index;
  Shape shape;
  bool written = false;
};

// The plan for a key, made by `describe` at first; null if the library has no fast one.
template <typename Describe>
std::shared_ptr<const Plan> plan_for(const Library& library, Context& context, const Numbers& key,
                                     const std::vector<Wanted>& operands, Describe&& describe) {
  const std::lock_guard lock(context.mutex);
  if (const auto found = context.plans.find(key); found != context.plans.end())
    return found->second;
  if (context.plans.size() >= kMaxPlans) context.plans.clear();
  std::shared_ptr<const Plan>& result = context.plans[key];
  try {
    PrimitiveDescHandle desc = describe();
    if (!fast(library, desc.get(), context.cpu)) return nullptr;
    auto plan = std::make_shared<Plan>();
    for (const Wanted& one : operands) {
      Operand operand{one.index, one.written, one.shape.desc(library), nullptr, 0, nullptr};
      operand.wanted =
          library.primitive_desc_query_md(desc.get(), onednn::kArgumentDesc, one.index);
      if (operand.wanted == nullptr) throw Refused{};
      operand.bytes = static_cast<std::int64_t>(library.memory_desc_get_size(operand.wanted));
      if (library.memory_desc_equal(operand.own.get(), operand.wanted) == 0) {
        operand.reorder = one.written
                              ? reorder(library, context.engine, operand.wanted, operand.own.get())
                              : reorder(library, context.engine, operand.own.get(), operand.wanted);
      }
      plan->operands.push_back(std::move(operand));
    }
    plan->step = std::make_unique<Step>(library, std::move(desc));
    result = std::move(plan);
  } catch (const Refused&) {
  }
  return result;
}

// Products of matrices
// ------------------------------------------------------------------------------------------------

// Matrices by rows or by columns, of one or of all batches; false for anything else.
bool normalize(Shape& x) {
  const std::size_t rows = x.sizes.size() - 2;
  const std::size_t columns = rows + 1;
  // Strides of dimensions of size 1 mean nothing.
  if (x.sizes[columns] == 1) x.strides[columns] = 1;
  if (x.sizes[rows] == 1) x.strides[rows] = x.strides[columns] == 1 ? x.sizes[columns] : 1;
  if (rows == 1 && (x.sizes[0] == 1 || x.strides[0] == 0)) {
    x.sizes[0] = 1;
    x.strides[0] = std::max(x.sizes[rows] * x.strides[rows], x.sizes[columns] * x.strides[columns]);
  }
  const auto by = [&](std::size_t outer, std::size_t inner) {
    return x.strides[inner] == 1 && x.strides[outer] >= x.sizes[inner];
  };
  return by(rows, columns) || by(columns, rows);
}

// A row that is added to all rows.
bool is_row(const Tensor& x) {
  for (std::int64_t d = 0; d + 1 < x.dim(); ++d) {
    if (x.stride(d) != 0 && x.size(d) != 1) return false;
  }
  return x.stride(-1) == 1;
}

std::int64_t bits_of(float value) { return c10::bit_cast<std::int32_t>(value); }

// Convolutions
// ------------------------------------------------------------------------------------------------

// The layout that is asked for: channels-last where the tensor has it, else the library's choice,
// which is much faster than plain channels-first.
DescHandle layout_for(const Library& library, const Tensor& x) {
  const Shape shape = shape_of(x);
  const bool channels_last =
      !x.is_contiguous() && (x.is_contiguous(at::MemoryFormat::ChannelsLast) ||
                             x.is_contiguous(at::MemoryFormat::ChannelsLast3d));
  return channels_last ? shape.desc(library) : shape.any_layout(library);
}

Shape weight_shape(const Tensor& weight, std::int64_t groups) {
  Shape shape = shape_of(weight);
  if (groups == 1) return shape;
  shape.sizes[0] /= groups;
  shape.sizes.insert(shape.sizes.begin(), groups);
  shape.strides.insert(shape.strides.begin(), shape.sizes[1] * shape.strides[0]);
  return shape;
}

// Steps between taps are 0 where taps are neighbours; padding after the last element is what the
// sizes ask for.
struct Window {
  Dims strides{}, gaps{}, before{}, after{};
  Window(const Tensor& input, const Tensor& weight, const Tensor& output, const Convolution& conv) {
    const auto at = [](at::IntArrayRef v, std::int64_t d) {
      return v[v.size() == 1 ? 0 : static_cast<std::size_t>(d)];
    };
    for (std::int64_t d = 0; d + 2 < input.dim(); ++d) {
      strides[d] = at(conv.stride, d);
      gaps[d] = at(conv.dilation, d) - 1;
      before[d] = at(conv.padding, d);
      after[d] = (output.size(d + 2) - 1) * strides[d] + (weight.size(d + 2) - 1) * (gaps[d] + 1) +
                 1 - input.size(d + 2) - before[d];
    }
  }
  void add_to(Numbers& key, std::int64_t dims) const {
    for (const Dims* one : {&strides, &gaps, &before, &after})
      key.insert(key.end(), *one, *one + dims);
  }
};

}  // namespace

bool onednn_matmul(const Tensor& out, const Tensor& a, const Tensor& b, const Tensor* addend,
                   float beta, float alpha) {
  const Library* library = onednn::library();
  if (library == nullptr || out.numel() == 0 || a.numel() == 0) return false;
  if (out.stride(-1) != 1 && out.stride(-2) == 1) {
    const Tensor other = addend == nullptr ? Tensor() : addend->mT();
    return onednn_matmul(out.mT(), b.mT(), a.mT(), addend == nullptr ? nullptr : &other, beta,
                         alpha);
  }
  const auto device = static_cast<c10::DeviceIndex>(out.get_device());
  Context* context = context_of(*library, device);
  if (context == nullptr) return false;
  Shape left = shape_of(a);
  Shape right = shape_of(b);
  Shape result = shape_of(out);
  if (!normalize(left) || !normalize(right) || !normalize(result) || result.strides.back() != 1)
    return false;
  // Outer products of batches, which release 3.11 gets wrong.
  if (out.dim() == 3 && out.size(0) > 1 && a.size(-1) == 1) return false;
  const bool added = addend != nullptr && beta != 0.f;
  const bool in_place = added && addend->const_data_ptr() == out.const_data_ptr();
  const bool bias = added && !in_place && alpha == 1.f && beta == 1.f && is_row(*addend);
  Numbers key{0,
              static_cast<std::int64_t>(onednn::mode()),
              bias,
              added && !bias,
              bits_of(alpha),
              bits_of(added ? beta : 0.f)};
  std::vector<Wanted> operands{{onednn::kSource, left}, {onednn::kWeight, right}};
  std::vector<Tensor> tensors{a, b};
  if (bias) {
    Shape row{Numbers(result.sizes.size(), 1), Numbers(result.sizes.size(), result.sizes.back()),
              result.type};
    row.sizes.back() = result.sizes.back();
    row.strides.back() = 1;
    operands.push_back({onednn::kBias, row});
    tensors.push_back(*addend);
  }
  operands.push_back({onednn::kResult, result, true});
  tensors.push_back(out);
  for (const Wanted& one : operands) one.shape.add_to(key);
  const auto plan = plan_for(*library, *context, key, operands, [&] {
    const auto with = attributes(*library);
    const auto after = created<PostOpsHandle>(
        *library, [&](PostOps** to) { return library->post_ops_create(to); });
    if (alpha != 1.f)
      check(library->post_ops_append_eltwise(after.get(), onednn::kLinear, alpha, 0.f));
    if (added && !bias) check(library->post_ops_append_sum(after.get(), beta, 0, /*type=*/0));
    check(library->primitive_attr_set_post_ops(with.get(), after.get()));
    std::vector<DescHandle> descs;
    for (const Wanted& one : operands) descs.push_back(one.shape.desc(*library));
    return created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      return library->matmul_primitive_desc_create(to, context->engine, descs[0].get(),
                                                   descs[1].get(), bias ? descs[2].get() : nullptr,
                                                   descs.back().get(), with.get());
    });
  });
  if (plan == nullptr) return false;
  if (added && !bias && !in_place) out.copy_(*addend);
  run(*library, *context, device, *plan, tensors);
  return true;
}

bool onednn_convolution(ConvolutionResult kind, const Tensor& input, const Tensor& weight,
                        const Tensor& output, const Convolution& conv) {
  const Library* library = onednn::library();
  if (library == nullptr) return false;
  const auto device = static_cast<c10::DeviceIndex>(input.get_device());
  Context* context = context_of(*library, device);
  if (context == nullptr) return false;
  // On a CPU nothing else was measured to be faster.
  if (context->cpu && input.scalar_type() != at::kFloat && onednn::mode() != onednn::Mode::Prefer)
    return false;
  const bool forward = kind == ConvolutionResult::Output;
  const bool to_input = kind == ConvolutionResult::InputGradient;
  const std::vector<Wanted> operands{
      {to_input ? onednn::kSourceGradient : onednn::kSource, shape_of(input), to_input},
      {kind == ConvolutionResult::WeightGradient ? onednn::kWeightGradient : onednn::kWeight,
       weight_shape(weight, conv.groups), kind == ConvolutionResult::WeightGradient},
      {forward ? onednn::kResult : onednn::kResultGradient, shape_of(output), forward}};
  const Window window(input, weight, output, conv);
  Numbers key{1, static_cast<std::int64_t>(onednn::mode()), static_cast<std::int64_t>(kind),
              conv.groups};
  window.add_to(key, input.dim() - 2);
  for (const Wanted& one : operands) one.shape.add_to(key);
  const auto plan = plan_for(*library, *context, key, operands, [&] {
    const auto with = attributes(*library);
    const DescHandle source = layout_for(*library, input);
    const DescHandle kernel = operands[1].shape.any_layout(*library);
    const DescHandle result = layout_for(*library, output);
    auto ahead = created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      return library->convolution_forward_primitive_desc_create(
          to, context->engine, onednn::kForwardTraining, onednn::kDirect, source.get(),
          kernel.get(), nullptr, result.get(), window.strides, window.gaps, window.before,
          window.after, with.get());
    });
    if (forward) return ahead;
    return created<PrimitiveDescHandle>(*library, [&](PrimitiveDesc** to) {
      if (to_input) {
        return library->convolution_backward_data_primitive_desc_create(
            to, context->engine, onednn::kDirect, source.get(), kernel.get(), result.get(),
            window.strides, window.gaps, window.before, window.after, ahead.get(), with.get());
      }
      return library->convolution_backward_weights_primitive_desc_create(
          to, context->engine, onednn::kDirect, source.get(), kernel.get(), nullptr, result.get(),
          window.strides, window.gaps, window.before, window.after, ahead.get(), with.get());
    });
  });
  if (plan == nullptr) return false;
  run(*library, *context, device, *plan, {input, weight, output});
  return true;
}

}  // namespace ipex::xpu

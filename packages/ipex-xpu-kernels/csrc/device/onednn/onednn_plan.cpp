// SPDX-License-Identifier: Apache-2.0
#include "device/onednn/onednn_plan.h"

#include <ATen/Functions.h>

#include <deque>
#include <map>
#include <mutex>
#include <string_view>

#include "core/core.h"
#include "device/core/runtime.h"

namespace ipex::xpu::onednn {

using at::Tensor;

namespace {

void must(int status) {
  TORCH_CHECK(status == 0, "xpu: oneDNN failed with status ", status,
              "; IPEX_XPU_ONEDNN=0 does without it");
}

int data_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return kFloat32;
    case at::kBFloat16:
      return kBFloat16;
    case at::kHalf:
      return kFloat16;
    default:
      throw Refused{};
  }
}

}  // namespace

// Something to run, with memory of ours to work in, so that several streams can at once.
struct Step {
  PrimitiveDescHandle desc;
  PrimitiveHandle primitive;
  const Desc* scratch = nullptr;
  std::int64_t scratch_bytes = 0;

  Step(const Library& library, PrimitiveDescHandle from) : desc(std::move(from)) {
    primitive = created<PrimitiveHandle>(
        library, [&](Primitive** to) { return library.primitive_create(to, desc.get()); });
    scratch = library.primitive_desc_query_md(desc.get(), kScratchDesc, 0);
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

// One device's part of the library, and what its streams still use.
struct Context {
  Engine* engine = nullptr;
  bool cpu = false;
  std::map<const sycl::queue*, Stream*> streams;
  std::deque<std::pair<sycl::event, std::vector<MemoryHandle>>> in_use;
  std::map<Numbers, std::shared_ptr<const Plan>> plans;  // null: refused
  std::mutex mutex;
};

namespace {

// Plans of so many shapes are kept; more are made again.
constexpr std::size_t kMaxPlans = 4096;

// Reference implementations are slower than our kernels; on a CPU so are implementations in
// bfloat16 and float16 without instructions for them, which convert whole matrices.
bool fast(const Library& library, const PrimitiveDesc* desc, bool cpu) {
  const char* name = nullptr;
  if (library.primitive_desc_query(desc, kImplementation, 0, &name) != 0 || name == nullptr)
    return false;
  const std::string_view implementation(name);
  if (mode() == Mode::Prefer) return true;
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
    must(library_.sycl_interop_memory_create(&memory, desc, context_.engine, kUsm, data));
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
      arguments.push_back(bind(kScratch, step.scratch, scratch.mutable_data_ptr()));
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

std::unique_ptr<Step> reorder(const Library& library, Engine* engine, const Desc* from,
                              const Desc* to) {
  const auto with = attributes(library);
  return std::make_unique<Step>(
      library, created<PrimitiveDescHandle>(library, [&](PrimitiveDesc** desc) {
        return library.reorder_primitive_desc_create(desc, from, engine, to, engine, with.get());
      }));
}

}  // namespace

Shape shape_of(const Tensor& x) {
  return {x.sizes().vec(), x.strides().vec(), data_type(x.scalar_type())};
}

AttributesHandle attributes(const Library& library) {
  auto result = created<AttributesHandle>(
      library, [&](Attributes** to) { return library.primitive_attr_create(to); });
  check(library.primitive_attr_set_scratchpad_mode(result.get(), kScratchOfUser));
  return result;
}

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

Engine* engine_of(const Context& context) { return context.engine; }

void run(const Library& library, Context& context, c10::DeviceIndex device, const Plan& plan,
         const std::vector<Tensor>& tensors) {
  count_run();
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
        execution.run(*operand.reorder, {execution.bind(kSource, operand.own.get(), data),
                                         execution.bind(kResult, operand.wanted, copy)});
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
      execution.run(*operand.reorder,
                    {execution.bind(kSource, operand.wanted, copy.mutable_data_ptr()),
                     execution.bind(kResult, operand.own.get(), tensors[i].mutable_data_ptr())});
    }
  }
}

std::shared_ptr<const Plan> plan_for(const Library& library, Context& context, const Numbers& key,
                                     const std::vector<Wanted>& operands,
                                     const std::function<PrimitiveDescHandle()>& describe) {
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
      operand.wanted = library.primitive_desc_query_md(desc.get(), kArgumentDesc, one.index);
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

}  // namespace ipex::xpu::onednn

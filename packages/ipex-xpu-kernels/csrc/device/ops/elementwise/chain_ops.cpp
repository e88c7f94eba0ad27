// SPDX-License-Identifier: Apache-2.0
// ipex_xpu::chain: up to four element-wise ops in one pass (chain.sycl.cpp), as fused TorchScript
// programs have it. What the kernel does not have runs op by op, also where gradients are wanted.
#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "device/core/strided.h"

namespace ipex::xpu {
namespace {

using at::Tensor;

constexpr std::size_t kMostSteps = 4;
constexpr std::size_t kMostOperands = 3;

struct Kind {
  std::string_view name;
  std::size_t numbers;
  bool binary;
  // What the op is in ops of torch, of its value, its other operand and its numbers.
  std::function<Tensor(const Tensor&, const Tensor&, double, double)> composed;
};

#define IPEX_UNARY(name) \
  {#name, 0, false, [](const Tensor& x, const Tensor&, auto, auto) { return at::name(x); }}

// In the order of the codes of the kernel, from 1.
const std::array<Kind, 25>& kinds() {
  static const std::array<Kind, 25> all{{
      IPEX_UNARY(relu),
      IPEX_UNARY(sigmoid),
      IPEX_UNARY(tanh),
      IPEX_UNARY(silu),
      {"gelu", 0, false, [](const Tensor& x, const Tensor&, auto, auto) { return at::gelu(x); }},
      {"gelu_tanh", 0, false,
       [](const Tensor& x, const Tensor&, auto, auto) { return at::gelu(x, "tanh"); }},
      IPEX_UNARY(exp),
      IPEX_UNARY(log),
      IPEX_UNARY(sqrt),
      IPEX_UNARY(abs),
      IPEX_UNARY(square),
      IPEX_UNARY(reciprocal),
      {"leaky_relu", 1, false,
       [](const Tensor& x, const Tensor&, double p, auto) { return at::leaky_relu(x, p); }},
      {"clamp", 2, false,
       [](const Tensor& x, const Tensor&, double p, double q) {
         return at::clamp(x, at::Scalar(p), at::Scalar(q));
       }},
      {"elu", 1, false,
       [](const Tensor& x, const Tensor&, double p, auto) { return at::elu(x, p); }},
      IPEX_UNARY(hardsigmoid),
      IPEX_UNARY(hardswish),
      IPEX_UNARY(mish),
      IPEX_UNARY(round),
      {"pow", 1, false,
       [](const Tensor& x, const Tensor&, double p, auto) { return at::pow(x, p); }},
      {"affine", 2, false,
       [](const Tensor& x, const Tensor&, double p, double q) {
         const Tensor scaled = p == 1 ? x : at::mul(x, p);
         return q == 0 ? scaled : at::add(scaled, q);
       }},
      {"add", 1, true,
       [](const Tensor& x, const Tensor& other, double p, auto) { return at::add(x, other, p); }},
      {"add_to", 1, true,
       [](const Tensor& x, const Tensor& other, double p, auto) { return at::add(other, x, p); }},
      {"mul", 0, true,
       [](const Tensor& x, const Tensor& other, auto, auto) { return at::mul(x, other); }},
      {"div", 0, true,
       [](const Tensor& x, const Tensor& other, auto, auto) { return at::div(x, other); }},
  }};
  return all;
}

struct Step {
  const Kind* kind;
  std::uint32_t code;
  std::size_t operand;  // of a binary one
  double p = 0;
  double q = 0;
};

std::vector<Step> parse(std::string_view text, std::size_t operands, at::ArrayRef<double> numbers) {
  std::vector<Step> steps;
  std::size_t binary = 0;
  std::size_t used = 0;
  const auto all = text;
  while (!text.empty()) {
    const auto space = text.find(' ');
    const std::string_view name = text.substr(0, space);
    text = space == std::string_view::npos ? std::string_view{} : text.substr(space + 1);
    const auto& known = kinds();
    const auto* found = std::find_if(known.begin(), known.end(),
                                     [&](const Kind& kind) { return kind.name == name; });
    TORCH_CHECK_VALUE(found != known.end(),
                      "chain: steps must be names of ops that are known, got ", name);
    Step step{found, static_cast<std::uint32_t>(found - known.begin()) + 1, binary};
    if (found->binary) ++binary;
    const auto next = [&] {
      const std::size_t place = used++;
      return place < numbers.size() ? numbers[place] : 0.0;
    };
    if (found->numbers > 0) step.p = next();
    if (found->numbers > 1) step.q = next();
    steps.push_back(step);
  }
  TORCH_CHECK_VALUE(used == numbers.size(), "chain: numbers must be ", used, " for the steps ", all,
                    ", got ", numbers.size());
  TORCH_CHECK_VALUE(binary == operands, "chain: others must be ", binary, " tensors for the steps ",
                    all, ", got ", operands);
  return steps;
}

// Passes that have a kernel of their own, of dense or of strided operands.
struct Known {
  std::string_view text;
  bool dense;
  bool strided;
  const char* kernel;
};
constexpr std::array<Known, 11> kKnown{{
    {"add relu", true, true, "add_relu"},
    {"add add relu", false, true, "add_add_relu"},
    {"add silu", false, true, "add_silu"},
    {"add sigmoid", false, true, "add_sigmoid"},
    {"add gelu", false, true, "add_gelu"},
    {"add clamp", false, true, "add_clamp"},
    {"add hardswish", false, true, "add_hardswish"},
    {"relu add", true, false, "relu_add"},
    {"gelu add", true, false, "gelu_add"},
    {"clamp", true, false, "clamp_"},
    {"hardswish", true, false, "hardswish"},
}};
const char* kernel_of(std::string_view text, std::size_t operands, bool dense) {
  for (const Known& known : kKnown) {
    if (known.text == text && (dense ? known.dense : known.strided)) return known.kernel;
  }
  constexpr std::array<const char*, kMostOperands + 1> kOfAny{"none", "one", "two", "three"};
  return dense ? kOfAny[operands] : "any";
}

bool wants_gradient(const Tensor& x, at::TensorList others) {
  if (!c10::GradMode::is_enabled()) return false;
  return x.requires_grad() || std::any_of(others.begin(), others.end(), [](const Tensor& other) {
           return other.requires_grad();
         });
}

// One kernel; an undefined tensor where no kernel takes these.
Tensor by_kernel(const Tensor& x, at::TensorList others, std::string_view text,
                 const std::vector<Step>& steps) {
  const auto dtype = kernel_dtype(x.scalar_type());
  if (!dtype || steps.size() > kMostSteps || others.size() > kMostOperands) return {};
  for (const Tensor& other : others) {
    if (!other.defined() || other.scalar_type() != x.scalar_type()) return {};
  }
  const torch::jit::Stack stack{x, others.vec()};
  const auto device = detail::common_device(stack, stack.size(), /*numbers=*/false).device;
  if (!device || !use_kernel(*device, KernelSpeed::NotSlower)) return {};
  const c10::DeviceGuard guard(c10::Device(c10::kXPU, *device));

  std::vector<std::int64_t> shape = x.sizes().vec();
  for (const Tensor& other : others) shape = at::infer_size(shape, other.sizes());
  const Tensor out =
      x.sizes() == at::IntArrayRef(shape) ? at::empty_like(x) : at::empty(shape, x.options());
  if (out.numel() >= kMaxElements) return {};
  std::array<Tensor, kMostOperands> operands;
  for (std::size_t i = 0; i < kMostOperands; ++i) operands[i] = i < others.size() ? others[i] : x;
  auto iter = iterator(out, x, operands[0], operands[1], operands[2]);

  std::uint32_t code = 0;
  std::array<float, kMostSteps> p{};
  std::array<float, kMostSteps> q{};
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const Step& step = steps[i];
    const auto operand = static_cast<std::uint32_t>(step.kind->binary ? step.operand : 0);
    code |= (step.code | operand << 6) << (8 * i);
    p[i] = static_cast<float>(step.p);
    q[i] = static_cast<float>(step.q);
  }
  const bool dense = iter.is_contiguous();
  const auto name =
      kernel_name(dense ? "chain" : "chain_strided", kernel_of(text, others.size(), dense), *dtype);
  if (!dense) {
    const bool started =
        launch_strided<5>(iter, name, code, p[0], q[0], p[1], q[1], p[2], q[2], p[3], q[3]);
    return started ? out : Tensor();
  }
  const auto input = [&](int i) { return static_cast<const void*>(iter.data_ptr(i)); };
  launch_map(out, name, iter.numel(), iter.data_ptr(0), input(1), input(2), input(3), input(4),
             ulong(iter.numel()), code, p[0], q[0], p[1], q[1], p[2], q[2], p[3], q[3]);
  return out;
}

Tensor chain(const Tensor& x, at::TensorList others, c10::string_view text,
             at::ArrayRef<double> numbers) {
  const std::string_view all(text.data(), text.size());
  const auto steps = parse(all, others.size(), numbers);
  if (!wants_gradient(x, others)) {
    Tensor done = by_kernel(x, others, all, steps);
    if (done.defined()) return done;
  }
  Tensor value = x;
  for (const Step& step : steps) {
    const Tensor other = step.kind->binary ? others[step.operand] : Tensor();
    value = step.kind->composed(value, other, step.p, step.q);
  }
  return value;
}

}  // namespace

void register_chain() {
  static torch::Library library(torch::Library::FRAGMENT, "ipex_xpu", std::nullopt, __FILE__,
                                __LINE__);
  // Numbers of all ops one after the other; the other operands in the order of the binary ones.
  library.def("chain(Tensor x, Tensor[] others, str steps, float[] numbers) -> Tensor", &chain);
}

}  // namespace ipex::xpu

// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "optimizer_step/lists.h"
#include "optimizer_step/step_glue.h"

namespace ipex {
namespace {

const auto sgd_kernels = IPEX_KERNELS("sgd_fused_step", sgd_step);
const auto adagrad_kernels = IPEX_KERNELS("adagrad_fused_step", adagrad_step);
const auto adam_kernels = IPEX_KERNELS("adam_fused_step", adam_step);
const auto lamb_state_kernels = IPEX_KERNELS("lamb_fused_step", lamb_state);
const auto lamb_apply_kernels = IPEX_KERNELS("lamb_fused_step", lamb_apply);
const auto lars_sums_kernels = IPEX_KERNELS("lars_fused_step", lars_sums);
const auto lars_kernels = IPEX_KERNELS("lars_fused_step", sgd_step);

// The same for lists, where one is told which kernels an op has.
const auto sgd_of_lists = IPEX_KERNELS("sgd_fused_steps", sgd_step);
const auto adagrad_of_lists = IPEX_KERNELS("adagrad_fused_steps", adagrad_step);
const auto adam_of_lists = IPEX_KERNELS("adam_fused_steps", adam_step);
const auto lamb_of_lists = IPEX_KERNELS("lamb_fused_steps", lamb_state);
const auto lars_of_lists = IPEX_KERNELS("lars_fused_steps", lars_sums);

float as_float(double x) { return static_cast<float>(x); }

void check_step(const char* op, double step) {
  IPEX_CHECK(step >= 1, op, ": step must be at least 1, got ", step);
}

void check_eps(const char* op, double eps) {
  IPEX_CHECK(eps >= 0, op, ": eps must not be negative, got ", eps);
}

// Shares of former means.
void check_shares(const char* op, double beta1, double beta2) {
  const double shares[2] = {beta1, beta2};
  for (int i = 0; i < 2; ++i)
    IPEX_CHECK(shares[i] >= 0 && shares[i] < 1, op, ": beta", i + 1,
               " must be from 0 to below 1, got ", shares[i]);
}

template <class Kernels, class Args>
void run(const Kernels& kernels, Step& step, const Args& args) {
  step.arrays();
  kernels.visit(step.dtype(), [&]<class T>(auto* kernel) {
    step.for_parts([&](const StepArrays& part, int64_t n) { kernel(part, n, args); });
  });
  step.finish();
}

void sgd_fused_step(const Tensor& param, const Tensor& grad, const OptionalTensor& momentum_buffer,
                    const OptionalTensor& param2, double momentum, double lr, double weight_decay,
                    double dampening, bool nesterov, bool first, bool maximize) {
  Step step("sgd_fused_step", param, grad, param2);
  if (momentum_buffer) step.add_state("momentum_buffer", *momentum_buffer);
  run(sgd_kernels, step,
      SgdStep{maximize ? -1.0f : 1.0f, 1.0f, as_float(weight_decay), as_float(momentum),
              as_float(1.0 - dampening), as_float(lr), nesterov, first});
}

void adagrad_fused_step(const Tensor& param, const Tensor& grad, const Tensor& state_sum,
                        const OptionalTensor& param2, double step_number, double lr,
                        double weight_decay, double lr_decay, double eps, bool maximize) {
  check_step("adagrad_fused_step", step_number);
  check_eps("adagrad_fused_step", eps);
  Step step("adagrad_fused_step", param, grad, param2);
  step.add_state("state_sum", state_sum);
  run(adagrad_kernels, step,
      AdagradStep{maximize ? -1.0f : 1.0f, as_float(weight_decay),
                  as_float(lr / (1.0 + (step_number - 1.0) * lr_decay)), as_float(eps)});
}

void adam_fused_step(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                     const OptionalTensor& max_exp_avg_sq, const Tensor& grad,
                     const OptionalTensor& param2, bool amsgrad, double step_number, double beta1,
                     double beta2, double lr, double weight_decay, double eps, bool decoupled,
                     bool maximize) {
  constexpr char kOp[] = "adam_fused_step";
  check_step(kOp, step_number);
  check_shares(kOp, beta1, beta2);
  check_eps(kOp, eps);
  IPEX_CHECK(!amsgrad || max_exp_avg_sq.has_value(), kOp,
             ": max_exp_avg_sq must be given with amsgrad, got None");
  Step step(kOp, param, grad, param2);
  step.add_state("exp_avg", exp_avg);
  step.add_state("exp_avg_sq", exp_avg_sq);
  if (amsgrad) step.add_state("max_exp_avg_sq", *max_exp_avg_sq);
  AdamStep args{};
  args.sign = maximize ? -1.0f : 1.0f;
  args.weight_decay = decoupled ? 0.0f : as_float(weight_decay);
  args.shrink = decoupled ? as_float(1.0 - lr * weight_decay) : 1.0f;
  args.beta1 = as_float(beta1);
  args.rest1 = as_float(1.0 - beta1);
  args.beta2 = as_float(beta2);
  args.rest2 = as_float(1.0 - beta2);
  args.root2 = as_float(std::sqrt(1.0 - std::pow(beta2, step_number)));
  args.eps = as_float(eps);
  args.lr = as_float(lr / (1.0 - std::pow(beta1, step_number)));
  run(adam_kernels, step, args);
}

// A ratio of two norms, or 1 where one of them is 0.
double trust(double numerator, double denominator) {
  return numerator > 0 && denominator > 0 ? numerator / denominator : 1.0;
}

void lamb_fused_step(const Tensor& param, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                     const Tensor& grad, const OptionalTensor& param2, int64_t step_number,
                     double beta1, double beta2, double lr, double weight_decay, double eps) {
  constexpr char kOp[] = "lamb_fused_step";
  check_step(kOp, static_cast<double>(step_number));
  check_shares(kOp, beta1, beta2);
  check_eps(kOp, eps);
  Step step(kOp, param, grad, param2);
  step.add_state("exp_avg", exp_avg);
  step.add_state("exp_avg_sq", exp_avg_sq);
  LambStep args{};
  args.weight_decay = as_float(weight_decay);
  args.beta1 = as_float(beta1);
  args.rest1 = as_float(1.0 - beta1);
  args.beta2 = as_float(beta2);
  args.rest2 = as_float(1.0 - beta2);
  args.correction1 = as_float(1.0 - std::pow(beta1, static_cast<double>(step_number)));
  args.correction2 = as_float(1.0 - std::pow(beta2, static_cast<double>(step_number)));
  args.eps = as_float(eps);
  step.arrays();
  double sums[2];
  lamb_state_kernels.visit(step.dtype(), [&]<class T>(auto* kernel) {
    step.sums([&](const StepArrays& part, int64_t n, double* out) { kernel(part, n, args, out); },
              sums);
  });
  args.lr = as_float(lr * trust(std::sqrt(sums[0]), std::sqrt(sums[1])));
  lamb_apply_kernels.visit(step.dtype(), [&]<class T>(auto* kernel) {
    step.for_parts([&](const StepArrays& part, int64_t n) { kernel(part, n, args); });
  });
  step.finish();
}

void lars_fused_step(const Tensor& param, const Tensor& grad, const OptionalTensor& momentum_buffer,
                     const OptionalTensor& param2, double momentum, double lr, double eeta,
                     double eps, double weight_decay, double dampening, bool nesterov, bool first) {
  check_eps("lars_fused_step", eps);
  Step step("lars_fused_step", param, grad, param2);
  if (momentum_buffer) step.add_state("momentum_buffer", *momentum_buffer);
  step.arrays();
  double sums[2];
  lars_sums_kernels.visit(step.dtype(), [&]<class T>(auto* kernel) {
    step.sums([&](const StepArrays& part, int64_t n, double* out) { kernel(part, n, out); }, sums);
  });
  const double weight = std::sqrt(sums[0]), gradient = std::sqrt(sums[1]);
  const bool scaled = weight > 0 && gradient > 0;
  const double ratio = scaled ? eeta * weight / (gradient + weight_decay * weight + eps) : 1.0;
  const SgdStep args{1.0f,
                     as_float(ratio),
                     as_float(weight_decay),
                     as_float(momentum),
                     as_float(1.0 - dampening),
                     as_float(lr),
                     nesterov,
                     first};
  lars_kernels.visit(step.dtype(), [&]<class T>(auto* kernel) {
    step.for_parts([&](const StepArrays& part, int64_t n) { kernel(part, n, args); });
  });
  step.finish();
}

void sgd_fused_steps(const TensorList& params, const TensorList& grads,
                     const TensorList& momentum_buffers, const TensorList& params2, double momentum,
                     double lr, double weight_decay, double dampening, bool nesterov, bool first,
                     bool maximize) {
  check_lists(
      "sgd_fused_steps", params,
      {{"grads", grads}, {"momentum_buffers", momentum_buffers, true}, {"param2s", params2, true}});
  for (size_t i = 0; i < params.size(); ++i)
    sgd_fused_step(params[i], grads[i], element(momentum_buffers, i), element(params2, i), momentum,
                   lr, weight_decay, dampening, nesterov, first, maximize);
}

void adagrad_fused_steps(const TensorList& params, const TensorList& grads,
                         const TensorList& state_sums, const TensorList& params2,
                         double step_number, double lr, double weight_decay, double lr_decay,
                         double eps, bool maximize) {
  check_lists("adagrad_fused_steps", params,
              {{"grads", grads}, {"state_sums", state_sums}, {"param2s", params2, true}});
  for (size_t i = 0; i < params.size(); ++i)
    adagrad_fused_step(params[i], grads[i], state_sums[i], element(params2, i), step_number, lr,
                       weight_decay, lr_decay, eps, maximize);
}

void adam_fused_steps(const TensorList& params, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, const TensorList& max_exp_avg_sqs,
                      const TensorList& grads, const TensorList& params2, bool amsgrad,
                      double step_number, double beta1, double beta2, double lr,
                      double weight_decay, double eps, bool decoupled, bool maximize) {
  check_lists("adam_fused_steps", params,
              {{"exp_avgs", exp_avgs},
               {"exp_avg_sqs", exp_avg_sqs},
               {"max_exp_avg_sqs", max_exp_avg_sqs, true},
               {"grads", grads},
               {"param2s", params2, true}});
  for (size_t i = 0; i < params.size(); ++i)
    adam_fused_step(params[i], exp_avgs[i], exp_avg_sqs[i], element(max_exp_avg_sqs, i), grads[i],
                    element(params2, i), amsgrad, step_number, beta1, beta2, lr, weight_decay, eps,
                    decoupled, maximize);
}

void lamb_fused_steps(const TensorList& params, const TensorList& exp_avgs,
                      const TensorList& exp_avg_sqs, const TensorList& grads,
                      const TensorList& params2, int64_t step_number, double beta1, double beta2,
                      double lr, double weight_decay, double eps) {
  check_lists("lamb_fused_steps", params,
              {{"exp_avgs", exp_avgs},
               {"exp_avg_sqs", exp_avg_sqs},
               {"grads", grads},
               {"param2s", params2, true}});
  for (size_t i = 0; i < params.size(); ++i)
    lamb_fused_step(params[i], exp_avgs[i], exp_avg_sqs[i], grads[i], element(params2, i),
                    step_number, beta1, beta2, lr, weight_decay, eps);
}

void lars_fused_steps(const TensorList& params, const TensorList& grads,
                      const TensorList& momentum_buffers, const TensorList& params2,
                      double momentum, double lr, double eeta, double eps, double weight_decay,
                      double dampening, bool nesterov, bool first) {
  check_lists(
      "lars_fused_steps", params,
      {{"grads", grads}, {"momentum_buffers", momentum_buffers, true}, {"param2s", params2, true}});
  for (size_t i = 0; i < params.size(); ++i)
    lars_fused_step(params[i], grads[i], element(momentum_buffers, i), element(params2, i),
                    momentum, lr, eeta, eps, weight_decay, dampening, nesterov, first);
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "sgd_fused_step", ipex::sgd_fused_step);
  IPEX_IMPL(m, "sgd_fused_steps", ipex::sgd_fused_steps);
  IPEX_IMPL(m, "adagrad_fused_step", ipex::adagrad_fused_step);
  IPEX_IMPL(m, "adagrad_fused_steps", ipex::adagrad_fused_steps);
  IPEX_IMPL(m, "adam_fused_step", ipex::adam_fused_step);
  IPEX_IMPL(m, "adam_fused_steps", ipex::adam_fused_steps);
  IPEX_IMPL(m, "lamb_fused_step", ipex::lamb_fused_step);
  IPEX_IMPL(m, "lamb_fused_steps", ipex::lamb_fused_steps);
  IPEX_IMPL(m, "lars_fused_step", ipex::lars_fused_step);
  IPEX_IMPL(m, "lars_fused_steps", ipex::lars_fused_steps);
}

// SPDX-License-Identifier: Apache-2.0
// Random numbers on the kernels of random.sycl.cpp. Which numbers a tensor gets depends on the
// generator and the tensor's sizes alone, whatever its strides. Arguments are checked by torch's
// own functions; other dtypes draw from the generator of the host.
#include <ATen/native/DistributionTemplates.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/multinomial_native.h>
#include <c10/util/BFloat16-math.h>

#include <bit>
#include <cmath>
#include <limits>
#include <tuple>

#include "device/core/ipex_ops.h"
#include "device/core/strided.h"
#include "device/ops/random/random_ops.h"

namespace ipex::xpu {

Philox draw_from(const at::Tensor& like, const std::optional<at::Generator>& generator) {
  const bool given = generator && generator->defined();
  TORCH_CHECK(!given || generator->device().type() == c10::kXPU,
              "Expected a 'xpu' device type for generator but found '",
              given ? generator->device().type() : c10::kXPU, "'");
  const auto [seed, offset] = next_philox(
      given ? *generator : default_generator(static_cast<c10::DeviceIndex>(like.get_device())), 4);
  return {ulong(static_cast<std::int64_t>(seed)), ulong(static_cast<std::int64_t>(offset))};
}

namespace {

using at::Generator;
using at::Tensor;
using std::optional;

// Calls f with a dense tensor of this dtype, whose elements are then copied to `self`.
template <typename F>
void in_order(const Tensor& self, at::ScalarType dtype, F f) {
  const bool itself = self.is_contiguous() && self.scalar_type() == dtype;
  const Tensor dense = itself ? self : at::empty(self.sizes(), self.options().dtype(dtype));
  f(dense);
  if (!itself) self.copy_(dense);
}
bool draws(const Tensor& self) { return kernel_dtype(self.scalar_type()).has_value(); }
// Numbers with a fraction of these dtypes are drawn as float32.
bool draws_as_float(const Tensor& self) {
  return draws(self) || (c10::isIntegralType(self.scalar_type(), false) &&
                         !c10::isBarebonesUnsignedType(self.scalar_type()));
}
at::ScalarType drawn_dtype(const Tensor& self) {
  return draws(self) ? self.scalar_type() : at::kFloat;
}

void draw(const char* distribution, const Tensor& self, const optional<Generator>& generator,
          double a, double b = 0, double c = 0, double d = 0) {
  const Philox philox = draw_from(self, generator);
  const bool bytes = self.scalar_type() == at::kBool;
  in_order(self, bytes ? at::kBool : drawn_dtype(self), [&](const Tensor& y) {
    const auto n = ulong(y.numel());
    const unsigned long quarter = (n + 3) / 4;
    const std::string dtype = bytes ? "unsignedchar" : *kernel_dtype(y.scalar_type());
    launch_for(y, kernel_name("draw", distribution, dtype), static_cast<std::int64_t>(quarter),
               out_data(y), n, quarter, static_cast<float>(a), static_cast<float>(b),
               static_cast<float>(c), static_cast<float>(d), philox.seed, philox.offset);
  });
}

// Numbers with a fraction
// -----------------------------------------------------------------------------------------------

template <typename>
struct Normal {
  void operator()(const Tensor& self, double mean, double deviation,
                  const optional<Generator>& generator) const {
    at::assert_no_internal_overlap(self);
    draw("normal", self, generator, mean, deviation);
  }
};
template <typename>
struct Uniform {
  void operator()(const at::TensorIterator& iter, double from, double to,
                  const optional<Generator>& generator) const {
    const Tensor& self = iter.tensor(0);
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, self.scalar_type(), "uniform_", [&] {
      const auto [first, last] = limits<scalar_t>(from, to);
      draw("uniform", self, generator, from, to - from, first, last);
    });
  }

  // The smallest and the largest number of the dtype in [from, to), or what is nearest to `from`.
  template <typename T>
  static std::pair<double, double> limits(double from, double to) {
    const auto value = [](T number) { return static_cast<double>(number); };
    T first = static_cast<T>(from), last = static_cast<T>(to);
    if (value(first) < from) first = std::nextafter(first, std::numeric_limits<T>::max());
    if (value(last) >= to) last = std::nextafter(last, std::numeric_limits<T>::lowest());
    if (value(first) > value(last)) first = last = static_cast<T>(from);
    return {value(first), value(last)};
  }
};
#define DISTRIBUTION(Name, name)                                        \
  template <typename>                                                   \
  struct Name {                                                         \
    void operator()(const at::TensorIterator& iter, double a, double b, \
                    const optional<Generator>& generator) const {       \
      draw(name, iter.tensor(0), generator, a, b);                      \
    }                                                                   \
  };
DISTRIBUTION(LogNormal, "log_normal")
DISTRIBUTION(Cauchy, "cauchy")
#undef DISTRIBUTION
template <typename>
struct Exponential {
  void operator()(const at::TensorIterator& iter, double lambda,
                  const optional<Generator>& generator) const {
    draw("exponential", iter.tensor(0), generator, 1 / lambda);
  }
};
template <typename>
struct Geometric {
  void operator()(const at::TensorIterator& iter, double p,
                  const optional<Generator>& generator) const {
    draw("geometric", iter.tensor(0), generator, 1 / std::log1p(-p));
  }
};

namespace templates = at::native::templates;
struct Ours {};

// complex32 and complex64 are pairs of what kernels take.
bool takes_parts(const Tensor& self) {
  return draws(self) || self.scalar_type() == at::kComplexFloat ||
         self.scalar_type() == at::kComplexHalf;
}
bool normal_(Tensor& self, double mean, double std, optional<Generator> generator) {
  if (!takes_parts(self)) return false;
  templates::normal_impl_<Normal, Ours>(self, mean, std, std::move(generator));
  return true;
}
bool uniform_(Tensor& self, double from, double to, optional<Generator> generator) {
  if (!takes_parts(self)) return false;
  templates::uniform_impl_<Uniform, Ours>(self, from, to, std::move(generator));
  return true;
}
bool log_normal_(Tensor& self, double mean, double std, optional<Generator> generator) {
  if (!draws(self)) return false;
  templates::log_normal_impl_<LogNormal, Ours>(self, mean, std, std::move(generator));
  return true;
}
bool exponential_(Tensor& self, double lambda, optional<Generator> generator) {
  if (!draws(self)) return false;
  templates::exponential_impl_<Exponential, Ours>(self, lambda, std::move(generator));
  return true;
}
bool cauchy_(Tensor& self, double median, double sigma, optional<Generator> generator) {
  if (!draws(self)) return false;
  templates::cauchy_impl_<Cauchy, Ours>(self, median, sigma, std::move(generator));
  return true;
}
bool geometric_(Tensor& self, double p, optional<Generator> generator) {
  if (!draws_as_float(self)) return false;
  templates::geometric_impl_<Geometric, Ours>(self, p, std::move(generator));
  return true;
}

// Mean and deviation as tensors.
template <typename Mean, typename Deviation>
optional<Tensor> normal(const Mean& mean, const Deviation& std, optional<Generator> generator) {
  if constexpr (std::is_same_v<Mean, Tensor>) {
    if (!draws(mean)) return std::nullopt;
  }
  if constexpr (std::is_same_v<Deviation, Tensor>) {
    if (!draws(std)) return std::nullopt;
  }
  return templates::normal_impl<Normal, Ours>(mean, std, std::move(generator));
}
template <typename Mean, typename Deviation>
bool normal_out(const Mean& mean, const Deviation& std, optional<Generator> generator,
                Tensor& out) {
  if (!draws(out)) return false;
  templates::normal_out_impl<Normal, Ours>(out, mean, std, std::move(generator));
  return true;
}

// Truth values and whole numbers
// -----------------------------------------------------------------------------------------------

bool draws_bernoulli(const Tensor& self) {
  return draws_as_float(self) || self.scalar_type() == at::kBool ||
         self.scalar_type() == at::kDouble;
}
template <typename>
struct Bernoulli {
  void operator()(const Tensor& self, double p, const optional<Generator>& generator) const {
    draw("bernoulli", self, generator, p);
  }
};
bool bernoulli_(Tensor& self, double p, optional<Generator> generator) {
  if (!draws_bernoulli(self)) return false;
  templates::bernoulli_impl_<Bernoulli, Ours>(self, p, std::move(generator));
  return true;
}
template <typename>
struct BernoulliEach {
  void operator()(const Tensor& self, const Tensor& p, const optional<Generator>& generator) const {
    const Philox philox = draw_from(self, generator);
    const bool bytes = self.scalar_type() == at::kBool;
    const Tensor shares = p.to(at::kFloat).expand(self.sizes()).contiguous();
    in_order(self, bytes ? at::kBool : drawn_dtype(self), [&](const Tensor& y) {
      const auto n = ulong(y.numel());
      const unsigned long quarter = (n + 3) / 4;
      const std::string dtype = bytes ? "unsignedchar" : *kernel_dtype(y.scalar_type());
      DeviceCheck check;
      check.check = [&](void* flag) {
        launch_for(y, kernel_name("bernoulli_each", dtype), static_cast<std::int64_t>(quarter),
                   out_data(y), data(shares), n, quarter, philox.seed, philox.offset, flag);
      };
      check.message = [](std::size_t, std::int64_t bits) {
        return c10::str("bernoulli_: p must be in [0, 1], got ",
                        std::bit_cast<float>(static_cast<std::uint32_t>(bits)));
      };
      check.is_index = false;
      check_on_device(y, std::move(check));
    });
  }
};
bool bernoulli_tensor_(Tensor& self, const Tensor& p, optional<Generator> generator) {
  if (!draws_bernoulli(self) || !c10::isFloatingType(p.scalar_type()) || !p.is_xpu() ||
      !at::is_expandable_to(p.sizes(), self.sizes()))
    return false;
  templates::bernoulli_impl_<BernoulliEach, Ours>(self, p, std::move(generator));
  return true;
}
bool bernoulli_out(const Tensor& p, optional<Generator> generator, Tensor& out) {
  if (!draws_bernoulli(out) || !c10::isFloatingType(p.scalar_type())) return false;
  templates::bernoulli_out_impl<BernoulliEach, Ours>(out, p, std::move(generator));
  return true;
}

// base + [0, range)
void draw_whole(const Tensor& self, unsigned long range, std::int64_t base,
                const optional<Generator>& generator) {
  const Philox philox = draw_from(self, generator);
  const auto known = number_dtype(self.scalar_type());
  in_order(self, known ? self.scalar_type() : at::kLong, [&](const Tensor& y) {
    const auto n = ulong(y.numel());
    const unsigned long half = (n + 1) / 2;
    launch_for(y, kernel_name("draw_whole", *number_dtype(y.scalar_type())),
               static_cast<std::int64_t>(half), out_data(y), n, half, range,
               static_cast<long>(base), philox.seed, philox.offset);
  });
}
template <typename>
struct FromTo {
  void operator()(const at::TensorIterator& iter, std::uint64_t range, std::int64_t base,
                  const optional<Generator>& generator) const {
    draw_whole(iter.tensor(0), range, base, generator);
  }
  // All numbers of 64 bits.
  void operator()(const at::TensorIterator& iter, const optional<Generator>& generator) const {
    draw_whole(iter.tensor(0), 0, 0, generator);
  }
};
// From 0 to the largest whole number that, like all below it, the dtype has.
template <typename>
struct Whole {
  void operator()(const at::TensorIterator& iter, const optional<Generator>& generator) const {
    const Tensor& self = iter.tensor(0);
    const auto largest = [&]() -> unsigned long {
      switch (self.scalar_type()) {
        case at::kBool:
          return 1;
        case at::kFloat:
          return 1ul << std::numeric_limits<float>::digits;
        case at::kHalf:
          return 1ul << std::numeric_limits<c10::Half>::digits;
        case at::kBFloat16:
          return 1ul << std::numeric_limits<c10::BFloat16>::digits;
        default:
          return (1ul << (8 * self.element_size() - (self.scalar_type() == at::kByte ? 0 : 1))) - 1;
      }
    };
    draw_whole(self, largest() + 1, 0, generator);
  }
};
bool draws_whole(const Tensor& self) {
  return draws_as_float(self) || self.scalar_type() == at::kBool;
}
bool random_(Tensor& self, optional<Generator> generator) {
  if (!draws_whole(self)) return false;
  templates::random_impl<Whole, Ours>(self, std::move(generator));
  return true;
}
bool random_from_(Tensor& self, std::int64_t from, optional<std::int64_t> to,
                  optional<Generator> generator) {
  if (!draws_whole(self)) return false;
  templates::random_from_to_impl<FromTo, Ours>(self, from, to, std::move(generator));
  return true;
}
bool random_to_(Tensor& self, std::int64_t to, optional<Generator> generator) {
  return random_from_(self, 0, to, std::move(generator));
}

bool randperm_out(std::int64_t n, optional<Generator> generator, Tensor& out) {
  if (!draws_whole(out)) return false;
  TORCH_CHECK(n >= 0, "n must be non-negative, got", n);
  at::native::check_supported_max_int_with_precision(n, out);
  out.resize_({n});
  if (n == 0) return true;
  const Philox philox = draw_from(out, generator);
  int bits = 2;
  while ((std::int64_t{1} << (2 * bits)) <= n) ++bits;
  in_order(out, out.scalar_type() == at::kInt ? at::kInt : at::kLong, [&](const Tensor& y) {
    launch_for(y, kernel_name("permutation", *number_dtype(y.scalar_type())), n, out_data(y),
               ulong(n), bits, philox.seed, philox.offset);
  });
  return true;
}

// torch's own function divides by exponential numbers and takes the largest, which draws one
// without replacement, or several. Draws with replacement are draws of one in rows of their own.
bool multinomial_out(const Tensor& p, std::int64_t count, bool replacement,
                     optional<Generator> generator, Tensor& out) {
  constexpr std::int64_t kMostNumbers = std::int64_t{1} << 26;  // to draw
  if (!draws(p)) return false;
  if (!replacement || count == 1) {
    at::native::multinomial_out(p.to(at::kFloat), count, replacement, std::move(generator), out);
    return true;
  }
  if (p.dim() < 1 || p.dim() > 2 || count < 1 || out.scalar_type() != at::kLong ||
      p.numel() > kMostNumbers / count)
    return false;
  const Tensor rows =
      p.unsqueeze(-2).expand(p.dim() == 1 ? std::vector<std::int64_t>{count, p.size(0)}
                                          : std::vector<std::int64_t>{p.size(0), count, p.size(1)});
  Tensor drawn = at::empty({0}, out.options());
  at::native::multinomial_out(rows.reshape({-1, p.size(-1)}).to(at::kFloat), 1, false,
                              std::move(generator), drawn);
  const Tensor result = p.dim() == 1 ? drawn.view({count}) : drawn.view({p.size(0), count});
  out.resize_(result.sizes());
  out.copy_(result);
  return true;
}
optional<Tensor> multinomial(const Tensor& p, std::int64_t count, bool replacement,
                             optional<Generator> generator) {
  Tensor out = at::empty({0}, p.options().dtype(at::kLong));
  return multinomial_out(p, count, replacement, std::move(generator), out) ? optional(out)
                                                                           : std::nullopt;
}

}  // namespace

void register_random() {
  static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::XPU, __FILE__,
                             __LINE__);
  add_kernel<&normal_>(aten, "normal_");
  add_kernel<&uniform_>(aten, "uniform_");
  add_kernel<&log_normal_>(aten, "log_normal_");
  add_kernel<&exponential_>(aten, "exponential_");
  add_kernel<&cauchy_>(aten, "cauchy_");
  add_kernel<&geometric_>(aten, "geometric_");
  add_kernel<&normal<Tensor, double>>(aten, "normal.Tensor_float");
  add_kernel<&normal<double, Tensor>>(aten, "normal.float_Tensor");
  add_kernel<&normal<Tensor, Tensor>>(aten, "normal.Tensor_Tensor");
  add_kernel<&normal_out<Tensor, double>>(aten, "normal.Tensor_float_out");
  add_kernel<&normal_out<double, Tensor>>(aten, "normal.float_Tensor_out");
  add_kernel<&normal_out<Tensor, Tensor>>(aten, "normal.Tensor_Tensor_out");
  add_kernel<&bernoulli_>(aten, "bernoulli_.float");
  add_kernel<&bernoulli_tensor_, KernelSpeed::NotSlower, true>(aten, "bernoulli_.Tensor");
  add_kernel<&bernoulli_out>(aten, "bernoulli.out");
  add_kernel<&random_>(aten, "random_");
  add_kernel<&random_from_>(aten, "random_.from");
  add_kernel<&random_to_>(aten, "random_.to");
  add_kernel<&randperm_out>(aten, "randperm.generator_out");
  add_kernel<&multinomial>(aten, "multinomial");
  add_kernel<&multinomial_out>(aten, "multinomial.out");
  register_dropout(aten);
}

}  // namespace ipex::xpu

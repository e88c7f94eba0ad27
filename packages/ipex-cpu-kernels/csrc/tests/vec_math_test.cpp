// SPDX-License-Identifier: Apache-2.0
// Checks vec.h and vec_math.h of one ISA level against double precision. Needs neither torch nor a
// test framework: compiled once per level with that level's flags, it prints what failed and
// returns the number of failures.
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <vector>

#include "ipex/kernel/vec.h"
#include "ipex/kernel/vec_loops.h"
#include "ipex/kernel/vec_math.h"

namespace {

using ipex::BFloat16;
using ipex::Half;
using ipex::kLanes;
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
int failures = 0;

void expect(bool ok, const char* what, double input, double got, double want) {
  if (ok) return;
  if (++failures <= 40)
    std::printf("FAIL %s(%.9g) = %.9g, expected %.9g\n", what, input, got, want);
}

uint32_t bits_of(float a) { return std::bit_cast<uint32_t>(a); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }

// ---- conversions ------------------------------------------------------------------------------

float bf16_value(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }
float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  const float sign = bits & 0x8000 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? kNaN : sign * kInf;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(mantissa), -24);
  return sign * std::ldexp(static_cast<float>(mantissa + 1024), exponent - 25);
}

// Rounds by comparing with the two neighbors in the 16-bit format; `value` maps patterns to
// numbers.
template <typename Value>
uint16_t nearest_even(float a, Value value, uint16_t infinity) {
  const uint16_t sign = std::signbit(a) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(a));
  if (std::isinf(a)) return sign | infinity;
  uint16_t low = 0;
  for (uint16_t step = 0x4000; step; step >>= 1) {
    const auto next = static_cast<uint16_t>(low + step);
    if (next < infinity && static_cast<double>(value(next)) <= magnitude) low = next;
  }
  const auto high = static_cast<uint16_t>(low + 1);
  const double below = value(low);
  // The pattern after the largest finite one stands for infinity but rounds as the next binade
  // would.
  const double above =
      high == infinity ? 2 * below - value(static_cast<uint16_t>(low - 1)) : value(high);
  const double middle = (below + above) / 2;
  if (magnitude < middle) return sign | low;
  if (magnitude > middle) return sign | high;
  return sign | (low & 1 ? high : low);
}

template <typename T>
void store_and_compare(float a, uint16_t want, bool flushes_denormals) {
  T out[2 * kLanes];
  const auto same = [&](uint16_t got) {
    const bool ok = got == want || (flushes_denormals && got == (want & 0x8000));
    expect(ok, "store", static_cast<double>(a), got, want);
  };
  ipex::store(out, ipex::set1(a));
  same(out[kLanes - 1].bits);
  const ipex::f32v2 stored = ipex::store2(out, {ipex::set1(a), ipex::set1(a)});
  same(out[0].bits);
  same(out[2 * kLanes - 1].bits);
  float lanes[2 * kLanes];
  float expected[kLanes];
  ipex::storeu(lanes, stored.a);
  ipex::storeu(lanes + kLanes, stored.b);
  ipex::storeu(expected, ipex::load(out));
  expect(lanes[0] == expected[0] && lanes[2 * kLanes - 1] == expected[0], "store2 result",
         static_cast<double>(a), static_cast<double>(lanes[0]), static_cast<double>(expected[0]));
}

// Pairs: store2 undoes the lane order of load2, and load2_as meets it.
template <typename T>
void test_pairs() {
  T in[2 * kLanes];
  T out[2 * kLanes];
  float wide[2 * kLanes];
  for (int64_t i = 0; i < 2 * kLanes; ++i) wide[i] = static_cast<float>(3 * i + 1);
  for (int64_t i = 0; i < 2 * kLanes; i += kLanes) ipex::store(in + i, ipex::loadu(wide + i));
  const ipex::f32v2 a = ipex::load2(in);
  const ipex::f32v2 b = ipex::load2_as<T>(wide);
  float first[2 * kLanes];
  float second[2 * kLanes];
  ipex::store2(first, a);
  ipex::store2(second, b);
  for (int64_t i = 0; i < 2 * kLanes; ++i) {
    expect(first[i] == second[i], "load2_as", static_cast<double>(i),
           static_cast<double>(second[i]), static_cast<double>(first[i]));
  }
  ipex::store2(out, a);
  float back[2 * kLanes];
  for (int64_t i = 0; i < 2 * kLanes; i += kLanes) ipex::storeu(back + i, ipex::load(out + i));
  for (int64_t i = 0; i < 2 * kLanes; ++i) {
    expect(back[i] == wide[i], "store2", static_cast<double>(i), static_cast<double>(back[i]),
           static_cast<double>(wide[i]));
  }
}

template <typename T, typename Value>
void test_conversion(const char* name, Value value, uint16_t infinity) {
  const bool bf16 = infinity == 0x7f80;
  for (uint32_t p = 0; p < 65536; p += static_cast<uint32_t>(2 * kLanes)) {
    T in[2 * kLanes];
    T out[2 * kLanes];
    for (uint32_t i = 0; i < 2 * kLanes; ++i) in[i].bits = static_cast<uint16_t>(p + i);
    ipex::store2(out, ipex::load2(in));
    for (uint32_t i = 0; i < 2 * kLanes; ++i) {
      const uint16_t pattern = in[i].bits;
      const bool nan = (pattern & 0x7fff) > infinity;
      const bool flushed = IPEX_HAVE_AVX512_BF16 && bf16 && (pattern & 0x7f80) == 0 &&
                           out[i].bits == (pattern & 0x8000);
      const bool ok = nan ? (out[i].bits & 0x7fff) > infinity : out[i].bits == pattern || flushed;
      expect(ok, "load2/store2", pattern, out[i].bits, pattern);
    }
  }
  for (uint32_t p = 0; p < 65536; p += static_cast<uint32_t>(kLanes)) {
    T in[kLanes];
    T out[kLanes];
    float wide[kLanes];
    for (uint32_t i = 0; i < kLanes; ++i) in[i].bits = static_cast<uint16_t>(p + i);
    ipex::storeu(wide, ipex::load(in));
    ipex::store(out, ipex::load(in));
    for (uint32_t i = 0; i < kLanes; ++i) {
      const float want = value(in[i].bits);
      const bool nan = std::isnan(want);
      expect(nan ? std::isnan(wide[i]) : bits_of(wide[i]) == bits_of(want), name, p + i,
             static_cast<double>(wide[i]), static_cast<double>(want));
      const uint16_t back = out[i].bits;
      const bool denormal = bf16 && (in[i].bits & 0x7f80) == 0;
      bool ok = nan ? (back & 0x7fff) > infinity : back == in[i].bits;
      if (IPEX_HAVE_AVX512_BF16 && denormal) ok = ok || back == (in[i].bits & 0x8000);
      expect(ok, name, p + i, back, in[i].bits);
    }
  }
  // Around every representable number and every midpoint of two.
  for (uint16_t p = 0; p < infinity; ++p) {
    const float low = value(p);
    const auto next = static_cast<uint16_t>(p + 1);
    const float high = next == infinity ? low * 1.01f : value(next);
    const auto middle = static_cast<float>((static_cast<double>(low) + high) / 2);
    for (float a : {std::nextafter(low, kInf), std::nextafter(middle, 0.0f), middle,
                    std::nextafter(middle, kInf), std::nextafter(high, 0.0f)}) {
      const bool flush = IPEX_HAVE_AVX512_BF16 && bf16 && std::fabs(a) < 1.1754944e-38f;
      store_and_compare<T>(a, nearest_even(a, value, infinity), flush);
      store_and_compare<T>(-a, nearest_even(-a, value, infinity), flush);
    }
  }
  for (float a : {65519.0f, 65520.0f, 65535.0f, 65536.0f, 1e30f, 3.4e38f, 1e-8f, 2.98e-8f})
    store_and_compare<T>(a, nearest_even(a, value, infinity), false);
}

// ---- partial loads and stores -----------------------------------------------------------------

template <typename T>
void test_partial() {
  // The data ends where an unreadable page begins: one element too many is a crash.
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  void* map = mmap(nullptr, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map == MAP_FAILED) return;
  char* edge = static_cast<char*>(map) + page;
  if (mprotect(edge, page, PROT_NONE) != 0) return;
  for (int64_t n = 1; n < kLanes; ++n) {
    T* p = reinterpret_cast<T*>(edge) - n;
    float lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i + 1);
    p[-1] = T{};
    ipex::store_n(p, ipex::loadu(lanes), n);
    ipex::storeu(lanes, ipex::load_n(p, n));
    for (int64_t i = 0; i < kLanes; ++i) {
      const float want = i < n ? static_cast<float>(i + 1) : 0.0f;
      expect(lanes[i] == want, "load_n/store_n", static_cast<double>(n),
             static_cast<double>(lanes[i]), static_cast<double>(want));
    }
    ipex::storeu(lanes, ipex::keep_n(ipex::set1(2.0f), n, ipex::set1(-1.0f)));
    for (int64_t i = 0; i < kLanes; ++i)
      expect(lanes[i] == (i < n ? 2.0f : -1.0f), "keep_n", static_cast<double>(n),
             static_cast<double>(lanes[i]), 0);
  }
  munmap(map, 2 * page);
}

// ---- functions --------------------------------------------------------------------------------

// Distance in units of the last place of `want`; below the normal range in units of the smallest
// normal's.
double ulps(float got, double want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : 1e9;
  const double limit = static_cast<double>(std::numeric_limits<float>::max()) * (1 + 3e-8);
  if (std::fabs(want) > limit)
    return static_cast<double>(got) == std::copysign(INFINITY, want) ? 0 : 1e9;
  int exponent = 0;
  std::frexp(want, &exponent);
  const double unit = std::ldexp(1.0, std::max(exponent, -125) - 24);
  return std::fabs(static_cast<double>(got) - want) / unit;
}

// All exponents, dense around the interesting range, and the special values.
const std::vector<float>& inputs() {
  static const std::vector<float> values = [] {
    std::vector<float> v;
    for (uint64_t p = 0; p < (uint64_t{1} << 32); p += 5003) {
      const float a = float_of(static_cast<uint32_t>(p));
      if (!std::isnan(a)) v.push_back(a);
    }
    for (int i = -300000; i <= 300000; ++i) v.push_back(static_cast<float>(i) * 3.7e-4f);
    for (float a : {0.0f, 1e-45f, 1e-40f, 1.1754944e-38f, 1e-30f, 88.7228f, 88.73f, 87.336f, 104.0f,
                    0.625f, 0.9f, 2.8f, 4.0f, 3.4e38f, kInf}) {
      v.push_back(a);
      v.push_back(-a);
    }
    v.push_back(kNaN);
    while (v.size() % static_cast<size_t>(kLanes) != 0) v.push_back(0.0f);
    return v;
  }();
  return values;
}

template <typename F, typename Reference, typename Accept>
void test_function(const char* name, F f, Reference reference, Accept accept) {
  double worst = 0;
  for (size_t i = 0; i < inputs().size(); i += static_cast<size_t>(kLanes)) {
    float out[kLanes];
    const float* in = inputs().data() + i;
    ipex::storeu(out, f(ipex::loadu(in)));
    for (int64_t k = 0; k < kLanes; ++k) {
      const double want = reference(static_cast<double>(in[k]));
      double error = 0;
      const bool ok = accept(in[k], out[k], want, &error);
      worst = std::max(worst, error);
      expect(ok, name, static_cast<double>(in[k]), static_cast<double>(out[k]), want);
    }
  }
  std::printf("  %-20s largest error %.3g\n", name, worst);
}

auto within_ulps(double limit) {
  return [limit](float, float got, double want, double* error) {
    *error = ulps(got, want);
    return *error <= limit;
  };
}
// The same, but 0 where the result would be a denormal or close to one.
auto without_denormals(double limit) {
  return [limit](float x, float got, double want, double* error) {
    if (std::isnan(x)) return std::isnan(got);
    const bool tiny = want < std::ldexp(1.0, -124);
    if (tiny && got == 0.0f) return true;
    *error = ulps(got, want);
    return *error <= limit && (!tiny || got >= std::numeric_limits<float>::min());
  };
}
// Relative error, or `floor` absolute where results may be flushed to zero.
auto within(double relative, double floor) {
  return [=](float, float got, double want, double* error) {
    if (std::isnan(want)) return std::isnan(got);
    if (std::fabs(want) > 1.5e38) return got > 1e38f;  // overflow may come half a binade early
    const double difference = std::fabs(static_cast<double>(got) - want);
    if (difference <= floor) return true;
    *error = difference / std::fabs(want);
    return *error <= relative;
  };
}

double sigmoid_reference(double x) { return 1 / (1 + std::exp(-x)); }
double normal_cdf_reference(double x) { return std::erfc(-x / std::sqrt(2.0)) / 2; }

void test_functions() {
  using ipex::f32v;
  const double fast = std::ldexp(1.0, -10);
  const auto exp = [](double x) { return std::exp(x); };
  const auto tanh = [](double x) { return std::tanh(x); };
  const auto erf = [](double x) { return std::erf(x); };
  const auto exp2_down = [](double x) { return x <= 0 ? std::exp2(x) : 1.0; };
  test_function("exp", [](f32v x) { return ipex::exp(x); }, exp, without_denormals(2));
  test_function("tanh", [](f32v x) { return ipex::tanh(x); }, tanh, within_ulps(2.5));
  test_function("erf", [](f32v x) { return ipex::erf(x); }, erf, within_ulps(2.5));
  test_function(
      "sigmoid", [](f32v x) { return ipex::sigmoid(x); }, sigmoid_reference,
      [](float x, float got, double want, double* error) {
        if (x < -88.7f) return static_cast<double>(got) <= 3.01e-39;  // exp(-x) overflows
        *error = ulps(got, want);
        return *error <= 3;
      });
  test_function(
      "exp2_nonpositive", [](f32v x) { return ipex::exp2_nonpositive(ipex::min(ipex::zero(), x)); },
      exp2_down, without_denormals(2));
  // In the far left tail the exponent itself is rounded: what counts there is x * Phi(x).
  test_function(
      "normal_cdf", [](f32v x) { return ipex::normal_cdf(x); }, normal_cdf_reference,
      within(2e-6, 1e-8));
  test_function(
      "exp_nonpositive", [](f32v x) { return ipex::exp_nonpositive(ipex::min(ipex::zero(), x)); },
      [](double x) { return x <= 0 ? std::exp(x) : 1.0; }, without_denormals(5));
  test_function("exp_fast", [](f32v x) { return ipex::exp_fast(x); }, exp, within(fast, 2.5e-38));
  test_function(
      "exp_fast", [](f32v x) { return ipex::exp_fast(x); }, [](double) { return 0.0; },
      [](float, float got, double, double*) {
        return std::isnan(got) || got == 0.0f || got >= std::numeric_limits<float>::min();
      });
  test_function("tanh_fast", [](f32v x) { return ipex::tanh_fast(x); }, tanh, within(fast, 2e-38));
  test_function("erf_fast", [](f32v x) { return ipex::erf_fast(x); }, erf, within(fast, 2e-38));
  test_function(
      "sigmoid_fast", [](f32v x) { return ipex::sigmoid_fast(x); }, sigmoid_reference,
      within(fast, 2e-38));
  test_function(
      "normal_cdf_fast", [](f32v x) { return ipex::normal_cdf_fast(x); }, normal_cdf_reference,
      within(fast, 1e-8));
}

// Limits that the kernels rely on.
void test_limits() {
  const auto at = [](ipex::f32v v) {
    float lanes[kLanes];
    ipex::storeu(lanes, v);
    return lanes[0];
  };
  const auto same = [](const char* what, float got, float want) {
    const bool ok = std::isnan(want) ? std::isnan(got) : bits_of(got) == bits_of(want);
    expect(ok, what, 0, static_cast<double>(got), static_cast<double>(want));
  };
  const auto infinity = ipex::set1(kInf);
  const auto minus = ipex::set1(-kInf);
  same("exp_fast(-inf)", at(ipex::exp_fast(minus)), 0.0f);
  same("exp_fast(inf)", at(ipex::exp_fast(infinity)), kInf);
  same("exp(-inf)", at(ipex::exp(minus)), 0.0f);
  same("exp_nonpositive(-inf)", at(ipex::exp_nonpositive(minus)), 0.0f);
  same("exp_nonpositive(0)", at(ipex::exp_nonpositive(ipex::zero())), 1.0f);
  same("exp(0)", at(ipex::exp(ipex::zero())), 1.0f);
  same("sigmoid_fast(-inf)", at(ipex::sigmoid_fast(minus)), 0.0f);
  same("gelu(inf)", at(ipex::gelu<true>(infinity)), kInf);
  same("gelu(-inf)", at(ipex::gelu<true>(minus)), kNaN);
  same("gelu full(inf)", at(ipex::gelu<false>(infinity)), kInf);
  same("gelu full(-inf)", at(ipex::gelu<false>(minus)), kNaN);
  same("gelu_tanh(inf)", at(ipex::gelu_tanh<true>(infinity)), kInf);
  same("gelu_tanh(-inf)", at(ipex::gelu_tanh<true>(minus)), kNaN);
  same("gelu_tanh full(inf)", at(ipex::gelu_tanh<false>(infinity)), kInf);
  same("gelu_tanh full(-inf)", at(ipex::gelu_tanh<false>(minus)), kNaN);
  same("silu(-inf)", at(ipex::silu<true>(minus)), kNaN);
  same("silu full(-inf)", at(ipex::silu<false>(minus)), kNaN);
  same("silu full(inf)", at(ipex::silu<false>(infinity)), kInf);
  same("tanh(-0)", at(ipex::tanh(ipex::set1(-0.0f))), -0.0f);
  same("erf(-0)", at(ipex::erf(ipex::set1(-0.0f))), -0.0f);
  same("max(1, NaN)", at(ipex::max(ipex::set1(1.0f), ipex::set1(kNaN))), kNaN);
  same("min(NaN, 1)", at(ipex::min(ipex::set1(kNaN), ipex::set1(1.0f))), 1.0f);
  same("abs(-3)", at(ipex::abs(ipex::set1(-3.0f))), 3.0f);
  same("copysign(3, -0)", at(ipex::copysign(ipex::set1(3.0f), ipex::set1(-0.0f))), -3.0f);
}

void test_reductions() {
  for (int64_t where = 0; where < kLanes; ++where) {
    float lanes[kLanes];
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = static_cast<float>(i);
    lanes[where] = 100.0f;
    const float sum = static_cast<float>(kLanes * (kLanes - 1) / 2 - where + 100);
    const float got = ipex::reduce_add(ipex::loadu(lanes));
    expect(got == sum, "reduce_add", static_cast<double>(where), static_cast<double>(got),
           static_cast<double>(sum));
    const float top = ipex::reduce_max(ipex::loadu(lanes));
    expect(top == 100.0f, "reduce_max", static_cast<double>(where), static_cast<double>(top), 100);
  }
}

}  // namespace

int main() {
  test_conversion<BFloat16>("bf16", bf16_value, 0x7f80);
  test_conversion<Half>("fp16", half_value, 0x7c00);
  test_pairs<float>();
  test_pairs<BFloat16>();
  test_pairs<Half>();
  test_partial<float>();
  test_partial<BFloat16>();
  test_partial<Half>();
  test_functions();
  test_limits();
  test_reductions();
  std::printf("%d lanes: %d failure(s)\n", static_cast<int>(kLanes), failures);
  return failures > 255 ? 255 : failures;
}

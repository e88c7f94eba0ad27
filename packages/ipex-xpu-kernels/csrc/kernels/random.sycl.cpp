// SPDX-License-Identifier: Apache-2.0
// Random numbers of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011): they depend on seed, offset and position alone.
#include "names.h"

struct Random {
  unsigned int word[4];

  Random(unsigned long seed, unsigned long offset, unsigned long position)
      : word{static_cast<unsigned int>(offset), static_cast<unsigned int>(offset >> 32),
             static_cast<unsigned int>(position), static_cast<unsigned int>(position >> 32)} {
    auto key0 = static_cast<unsigned int>(seed);
    auto key1 = static_cast<unsigned int>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const unsigned long a = 0xD2511F53ul * word[0];
      const unsigned long b = 0xCD9E8D57ul * word[2];
      word[0] = static_cast<unsigned int>(b >> 32) ^ word[1] ^ key0;
      word[2] = static_cast<unsigned int>(a >> 32) ^ word[3] ^ key1;
      word[1] = static_cast<unsigned int>(b);
      word[3] = static_cast<unsigned int>(a);
      key0 += 0x9E3779B9u;
      key1 += 0xBB67AE85u;
    }
  }
  // In [0, 1).
  float uniform(int i) const { return static_cast<float>(word[i] >> 8) * kStep; }
  // In (0, 1], with small numbers as fine as floats are.
  float positive(int i) const {
    return (static_cast<float>(word[i]) + 0.5f) * 2.3283064365386962890625e-10f;
  }
  unsigned long wide(int i) const {
    return static_cast<unsigned long>(word[2 * i + 1]) << 32 | word[2 * i];
  }

  static constexpr float kStep = 5.9604644775390625e-8f;  // 2^-24
};

// One work-item for each quarter of the elements: neighbors take neighboring elements.
template <typename T>
IPEX_KERNEL(1)
void dropout(const T* x, T* y, unsigned char* mask, unsigned long n, unsigned long quarter, float p,
             float scale, unsigned long seed, unsigned long offset) {
  const unsigned long item = global_id();
  if (item >= quarter) return;
  const Random random(seed, offset, item);
  for (int k = 0; k < 4; ++k) {
    const unsigned long i = item + k * quarter;
    if (i >= n) return;
    const bool keep = random.uniform(k) >= p;
    mask[i] = keep;
    store(y, i, keep ? load(x, i) * scale : 0.f);
  }
}
template <typename T>
IPEX_KERNEL(1)
void dropout_backward(const T* grad, const unsigned char* mask, T* y, unsigned long n,
                      float scale) {
  const unsigned long i = global_id();
  if (i < n) store(y, i, mask[i] ? load(grad, i) * scale : 0.f);
}

// Distributions: four numbers from the four words of an item. `a` to `d` are their parameters.
// -----------------------------------------------------------------------------------------------

// [a, b), within [c, d]: the smallest and the largest number of the dtype in that range.
struct uniform {
  static void f(const Random& random, float* out, float a, float b, float c, float d) {
    for (int k = 0; k < 4; ++k) out[k] = sycl::fmin(sycl::fmax(a + random.uniform(k) * b, c), d);
  }
};
// Two normal numbers from two uniform ones (Box and Muller, 1958).
struct normal {
  static void f(const Random& random, float* out, float mean, float deviation, float, float) {
    for (int k = 0; k < 4; k += 2) {
      const float radius = deviation * sycl::sqrt(-2.f * sycl::log(random.positive(k)));
      const float angle = 6.283185307179586f * random.uniform(k + 1);
      out[k] = mean + radius * sycl::cos(angle);
      out[k + 1] = mean + radius * sycl::sin(angle);
    }
  }
};
struct log_normal {
  static void f(const Random& random, float* out, float mean, float deviation, float, float) {
    normal::f(random, out, mean, deviation, 0, 0);
    for (int k = 0; k < 4; ++k) out[k] = sycl::exp(out[k]);
  }
};
// Never 0, since drawing without replacement divides by these.
struct exponential {
  static void f(const Random& random, float* out, float scale, float, float, float) {
    for (int k = 0; k < 4; ++k)
      out[k] = scale * sycl::fmax(-sycl::log(random.positive(k)), Random::kStep);
  }
};
struct cauchy {
  static void f(const Random& random, float* out, float median, float scale, float, float) {
    for (int k = 0; k < 4; ++k)
      out[k] = median + scale * sycl::tan(3.141592653589793f * (random.uniform(k) - 0.5f));
  }
};
// `factor`: 1 / log(1 - p)
struct geometric {
  static void f(const Random& random, float* out, float factor, float, float, float) {
    for (int k = 0; k < 4; ++k)
      out[k] = sycl::fmax(sycl::ceil(sycl::log(random.positive(k)) * factor), 1.f);
  }
};
struct bernoulli {
  static void f(const Random& random, float* out, float p, float, float, float) {
    for (int k = 0; k < 4; ++k) out[k] = random.uniform(k) < p ? 1.f : 0.f;
  }
};

template <typename Op, typename T>
IPEX_KERNEL(1)
void draw(T* y, unsigned long n, unsigned long quarter, float a, float b, float c, float d,
          unsigned long seed, unsigned long offset) {
  const unsigned long item = global_id();
  if (item >= quarter) return;
  float numbers[4];
  Op::f(Random(seed, offset, item), numbers, a, b, c, d);
  for (int k = 0; k < 4; ++k) {
    const unsigned long i = item + k * quarter;
    if (i < n) store(y, i, static_cast<compute<T>>(numbers[k]));
  }
}

// Each element with a probability of its own; the flag becomes the bits of an invalid one.
template <typename T>
IPEX_KERNEL(1)
void bernoulli_each(T* y, const float* p, unsigned long n, unsigned long quarter,
                    unsigned long seed, unsigned long offset, long* flag) {
  const unsigned long item = global_id();
  if (item >= quarter) return;
  const Random random(seed, offset, item);
  for (int k = 0; k < 4; ++k) {
    const unsigned long i = item + k * quarter;
    if (i >= n) return;
    if (!(p[i] >= 0.f && p[i] <= 1.f)) *flag = sycl::bit_cast<unsigned int>(p[i]);
    store(y, i, static_cast<compute<T>>(random.uniform(k) < p[i] ? 1 : 0));
  }
}

// Whole numbers base + [0, range); a range of 0 stands for 2^64. Two for each item.
template <typename T>
IPEX_KERNEL(1)
void draw_whole(T* y, unsigned long n, unsigned long half_of_n, unsigned long range, long base,
                unsigned long seed, unsigned long offset) {
  const unsigned long item = global_id();
  if (item >= half_of_n) return;
  const Random random(seed, offset, item);
  for (int k = 0; k < 2; ++k) {
    const unsigned long i = item + k * half_of_n;
    const unsigned long word = random.wide(k);
    const unsigned long above = range == 0 ? word : sycl::mul_hi(word, range);
    const long value = static_cast<long>(static_cast<unsigned long>(base) + above);
    if (i < n) store(y, i, static_cast<compute<T>>(value));
  }
}

// A permutation of 4^bits numbers in 16 rounds (Luby and Rackoff, 1988) with the words of Philox
// as keys, followed until it comes back to the first n of them. 4^bits is more than n, since the
// rounds alone make even permutations only.
template <typename T>
IPEX_KERNEL(1)
void permutation(T* y, unsigned long n, int bits, unsigned long seed, unsigned long offset) {
  const unsigned long item = global_id();
  if (item >= n) return;
  const unsigned int mask = (1u << bits) - 1;
  unsigned int keys[16];
  for (int block = 0; block < 4; ++block) {
    const Random random(seed, offset, block);
    for (int k = 0; k < 4; ++k) keys[4 * block + k] = random.word[k];
  }
  unsigned long value = item;
  do {
    auto left = static_cast<unsigned int>(value >> bits);
    auto right = static_cast<unsigned int>(value) & mask;
    for (int round = 0; round < 16; ++round) {
      unsigned int mixed = (right ^ keys[round]) * 0x85EBCA6Bu;
      mixed = (mixed ^ mixed >> 15) * 0xC2B2AE35u;
      mixed ^= mixed >> 16;
      const unsigned int next = left ^ (mixed & mask);
      left = right;
      right = next;
    }
    value = static_cast<unsigned long>(left) << bits | right;
  } while (value >= n);
  y[item] = static_cast<T>(value);
}

#define DRAW(op, T)                                                                       \
  template void draw<op, T>(T*, unsigned long, unsigned long, float, float, float, float, \
                            unsigned long, unsigned long);
#define DRAWS(op) DRAW(op, float) DRAW(op, half) DRAW(op, bf16)
DRAWS(uniform)
DRAWS(normal)
DRAWS(log_normal)
DRAWS(exponential)
DRAWS(cauchy)
DRAWS(geometric)
DRAWS(bernoulli)
DRAW(bernoulli, unsigned char)

#define EACH(T)                                                                                  \
  template void bernoulli_each<T>(T*, const float*, unsigned long, unsigned long, unsigned long, \
                                  unsigned long, long*);                                         \
  template void draw_whole<T>(T*, unsigned long, unsigned long, unsigned long, long,             \
                              unsigned long, unsigned long);
EACH(float)
EACH(half)
EACH(bf16)
EACH(unsigned char)
EACH(long)
EACH(int)

template void permutation<long>(long*, unsigned long, int, unsigned long, unsigned long);
template void permutation<int>(int*, unsigned long, int, unsigned long, unsigned long);

#define DROPOUT(T)                                                                            \
  template void dropout<T>(const T*, T*, unsigned char*, unsigned long, unsigned long, float, \
                           float, unsigned long, unsigned long);                              \
  template void dropout_backward<T>(const T*, const unsigned char*, T*, unsigned long, float);
DROPOUT(float)
DROPOUT(half)
DROPOUT(bf16)

// SPDX-License-Identifier: Apache-2.0
// Dropout with Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
// the numbers depend on seed, offset and position alone.
#include "prelude.h"

using ipex::bf16;
using ipex::global_id;
using ipex::half;
using ipex::load;
using ipex::store;

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
  float uniform(int i) const { return static_cast<float>(word[i] >> 8) * 5.9604644775390625e-8f; }
};

// One work-item for each quarter of the elements: neighbours take neighbouring elements.
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

#define DROPOUT(T)                                                                            \
  template void dropout<T>(const T*, T*, unsigned char*, unsigned long, unsigned long, float, \
                           float, unsigned long, unsigned long);                              \
  template void dropout_backward<T>(const T*, const unsigned char*, T*, unsigned long, float);
DROPOUT(float)
DROPOUT(half)
DROPOUT(bf16)

// SPDX-License-Identifier: Apache-2.0
// Recurrences over texts that lie back to back, with the state of each text in a row of a cache,
// and the short convolution before them. An item has a column of a state and goes through the rows
// of its text. Of numbers in the dtype of the rows or float32, one of two pointers is null.
#include "names.h"

using Index = unsigned long;

// The rows of a text and the row of its state; `begins`: with a state of zeros, as all are new.
struct Text {
  long begin, end, slot;
  bool begins;

  Text(Index text, const int* starts, const int* lengths, const int* slots)
      : begin(starts[text]),
        end(starts[text + 1]),
        slot(slots[text]),
        begins(lengths[text] == end - begin) {}
};
#define IPEX_TEXTS const int *starts, const int *lengths, const int *slots

struct Column {
  sycl::nd_item<2> item = sycl::ext::oneapi::this_work_item::get_nd_item<2>();
  Index row = item.get_global_id(0);
  Index column = item.get_global_id(1);
};

template <typename T>
inline float either(const T* x, const float* wide, long i) {
  return wide != nullptr ? wide[i] : load(x, i);
}
inline float softplus(float x) { return x > 20.f ? x : sycl::log1p(sycl::exp(x)); }
inline float sigmoid(float x) { return 1.f / (1.f + sycl::exp(-x)); }

template <typename T>
IPEX_KERNEL(2)
void text_convolution(T* y, const T* x, const T* history, const float* taps, const float* bias,
                      IPEX_TEXTS, Index texts, Index columns, long width, long x_row, int silu) {
  const Column at;
  if (at.column >= columns) return;
  const auto row = static_cast<long>(at.row);
  Index low = 0;
  for (Index high = texts; low + 1 < high;) {
    const Index middle = (low + high) / 2;
    (starts[middle] <= row ? low : high) = middle;
  }
  const Text text(low, starts, lengths, slots);
  float sum = bias != nullptr ? bias[at.column] : 0.f;
  for (long w = 0; w < width; ++w) {
    const long from = row - text.begin + w;  // behind the first row that the history has
    float value = 0.f;
    if (from >= width - 1) {
      value = load(x, (row - (width - 1) + w) * x_row + at.column);
    } else if (!text.begins) {
      value = load(history, (text.slot * (width - 1) + from) * columns + at.column);
    }
    sum += taps[w * columns + at.column] * value;
  }
  store(y, at.row * columns + at.column, silu ? sum * sigmoid(sum) : sum);
}

// Puts the last rows of each text in the place of its history.
template <typename T>
IPEX_KERNEL(2)
void text_history(T* history, const T* x, IPEX_TEXTS, Index columns, long before, long x_row) {
  const Column at;
  const Text text(at.row, starts, lengths, slots);
  const long count = text.end - text.begin;
  if (at.column >= columns || count == 0) return;
  T* own = history + text.slot * before * columns + at.column;
  for (long j = 0; j < before; ++j) {
    const long from = j + count;
    T value = T(0.f);
    if (from >= before) {
      value = x[(text.begin + from - before) * x_row + at.column];
    } else if (!text.begins) {
      value = own[from * columns];
    }
    own[j * columns] = value;
  }
}

// The state of a head: `keys` rows of `values` numbers. `share` heads have a query and a key. With
// `each`, every row fades at a rate of its own.
template <typename T>
IPEX_KERNEL(2)
void delta_rule(T* y, const T* value, const T* query, const T* key, const T* step,
                const float* wide_step, const T* strength, const float* wide_strength,
                const float* rates, const float* bias, float* state, IPEX_TEXTS, Index heads,
                Index share, long keys, long values, long q_row, long q_head, long k_row,
                long k_head, long v_row, long v_head, long s_row, long s_head, long b_row,
                long b_head, float scale, int normalize, float lowest, int each) {
  const Column at;
  const Text text(at.row / heads, starts, lengths, slots);
  const auto head = static_cast<long>(at.row % heads);
  const long column = at.column;
  if (column >= values) return;
  float* s = state + (text.slot * heads + head) * keys * values + column;
  if (text.begins && text.begin < text.end) {
    for (long i = 0; i < keys; ++i) s[i * values] = 0.f;
  }
  const float rate = rates[head];
  const auto fading = [&](float x) {
    return sycl::exp(lowest < 0.f ? lowest * sigmoid(-rate * x) : rate * softplus(x));
  };
  for (long row = text.begin; row < text.end; ++row) {
    const T* q = query + row * q_row + head / static_cast<long>(share) * q_head;
    const T* k = key + row * k_row + head / static_cast<long>(share) * k_head;
    const long steps = row * s_row + head * s_head;
    const float all = each ? 1.f : fading(either(step, wide_step, steps) + bias[head]);
    float known = 0.f, seen = 0.f, qq = 0.f, kk = 0.f;
    for (long i = 0; i < keys; ++i) {
      const float a = load(q, i), b = load(k, i);
      const float own =
          each ? fading(either(step, wide_step, steps + i) + bias[head * keys + i]) : all;
      const float faded = s[i * values] * own;
      if (each) s[i * values] = faded;
      known += b * faded;
      qq += a * a;
      kk += b * b;
    }
    const float of_query = normalize ? sycl::rsqrt(qq + 1e-6f) : 1.f;
    const float of_key = normalize ? sycl::rsqrt(kk + 1e-6f) : 1.f;
    const float open = sigmoid(either(strength, wide_strength, row * b_row + head * b_head));
    const float added =
        (load(value, row * v_row + head * v_head + column) - known * of_key) * open * of_key;
    for (long i = 0; i < keys; ++i) {
      const float now = s[i * values] * all + load(k, i) * added;
      s[i * values] = now;
      seen += load(q, i) * now;
    }
    store(y, (row * heads + head) * values + column, scale * of_query * seen);
  }
}

// The state of a head: `states` rows of `size` numbers.
template <typename T>
IPEX_KERNEL(2)
void ssd_scan(T* y, const T* x, const T* step, const float* wide_step, const float* rates,
              const T* entry, const T* query, const float* skip, const float* bias, float* state,
              IPEX_TEXTS, Index heads, Index share, long states, long size, long x_row, long x_head,
              long s_row, long s_head, long b_row, long b_head, long c_row, long c_head,
              float least, float most) {
  const Column at;
  const Text text(at.row / heads, starts, lengths, slots);
  const auto head = static_cast<long>(at.row % heads);
  const long column = at.column;
  if (column >= size) return;
  float* s = state + (text.slot * heads + head) * states * size + column;
  for (long row = text.begin; row < text.end; ++row) {
    const float d = softplus(either(step, wide_step, row * s_row + head * s_head) + bias[head]);
    const float time = d < least ? least : d > most ? most : d;  // NaN stays
    const bool empty = text.begins && row == text.begin;
    const float fading = sycl::exp(rates[head] * time);
    const float own = load(x, row * x_row + head * x_head + column);
    const T* b = entry + row * b_row + head / static_cast<long>(share) * b_head;
    const T* c = query + row * c_row + head / static_cast<long>(share) * c_head;
    float sum = skip[head] * own;
    for (long n = 0; n < states; ++n) {
      const float now = (empty ? 0.f : s[n * size] * fading) + load(b, n) * (time * own);
      s[n * size] = now;
      sum += load(c, n) * now;
    }
    store(y, (row * heads + head) * size + column, sum);
  }
}

// `states` numbers for each of `size` columns, with rates of their own.
template <typename T>
IPEX_KERNEL(2)
void selective_scan(T* y, const T* x, const T* step, const float* wide_step, const float* rates,
                    const T* entry, const T* query, const float* skip, const float* bias,
                    float* state, IPEX_TEXTS, long states, long size, long x_row, long s_row,
                    long b_row, long c_row) {
  const Column at;
  const Text text(at.row, starts, lengths, slots);
  const long column = at.column;
  if (column >= size) return;
  float* s = state + text.slot * states * size + column;
  for (long row = text.begin; row < text.end; ++row) {
    const float time = softplus(either(step, wide_step, row * s_row + column) + bias[column]);
    const bool empty = text.begins && row == text.begin;
    const float own = load(x, row * x_row + column);
    float sum = skip[column] * own;
    for (long n = 0; n < states; ++n) {
      const float before = empty ? 0.f : s[n * size] * sycl::exp(rates[n * size + column] * time);
      const float now = before + load(entry, row * b_row + n) * (own * time);
      s[n * size] = now;
      sum += load(query, row * c_row + n) * now;
    }
    store(y, row * size + column, sum);
  }
}

// The sums of values and of weights of a column, and the largest exponent, by which both are less.
template <typename T>
IPEX_KERNEL(2)
void wkv_scan(T* y, const T* x, const T* key, const float* wide_key, const float* fading,
              const float* first, float* state, IPEX_TEXTS, long size, long x_row, long k_row) {
  const Column at;
  const Text text(at.row, starts, lengths, slots);
  const long column = at.column;
  if (column >= size || text.begin == text.end) return;
  float* s = state + text.slot * 3 * size + column;
  float sum = text.begins ? 0.f : s[0];
  float weight = text.begins ? 0.f : s[size];
  float most = text.begins ? -1e38f : s[2 * size];
  for (long row = text.begin; row < text.end; ++row) {
    const float k = either(key, wide_key, row * k_row + column);
    const float value = load(x, row * x_row + column);
    const float now = k + first[column];
    const float top = sycl::fmax(most, now);
    const float old = sycl::exp(most - top), own = sycl::exp(now - top);
    store(y, row * size + column, (old * sum + own * value) / (old * weight + own));
    const float faded = most + fading[column];
    most = sycl::fmax(faded, k);
    const float left = sycl::exp(faded - most), share = sycl::exp(k - most);
    sum = left * sum + share * value;
    weight = left * weight + share;
  }
  s[0] = sum;
  s[size] = weight;
  s[2 * size] = most;
}

#define TEXTS const int*, const int*, const int*
#define RECURRENCE(T)                                                                              \
  template void text_convolution<T>(T*, const T*, const T*, const float*, const float*, TEXTS,     \
                                    Index, Index, long, long, int);                                \
  template void text_history<T>(T*, const T*, TEXTS, Index, long, long);                           \
  template void delta_rule<T>(T*, const T*, const T*, const T*, const T*, const float*, const T*,  \
                              const float*, const float*, const float*, float*, TEXTS, Index,      \
                              Index, long, long, long, long, long, long, long, long, long, long,   \
                              long, long, float, int, float, int);                                 \
  template void ssd_scan<T>(T*, const T*, const T*, const float*, const float*, const T*,          \
                            const T*, const float*, const float*, float*, TEXTS, Index, Index,     \
                            long, long, long, long, long, long, long, long, long, long, float,     \
                            float);                                                                \
  template void selective_scan<T>(T*, const T*, const T*, const float*, const float*, const T*,    \
                                  const T*, const float*, const float*, float*, TEXTS, long, long, \
                                  long, long, long, long);                                         \
  template void wkv_scan<T>(T*, const T*, const T*, const float*, const float*, const float*,      \
                            float*, TEXTS, long, long, long);
RECURRENCE(float)
RECURRENCE(half)
RECURRENCE(bf16)

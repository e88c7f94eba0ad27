// SPDX-License-Identifier: Apache-2.0
// Greedy decoding of RNN transducers. It counts and copies rows: one version for all levels.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ipex/glue/argument_checks.h"

namespace ipex {
namespace {

constexpr const char* kEmbedding = "rnnt_embedding";
constexpr const char* kUpdate = "rnnt_update";
const KernelBase embedding_op(kEmbedding);
const KernelBase update_op(kUpdate);

int64_t item_size(const Tensor& x) { return x.scalar_type() == ScalarType::Float ? 4 : 2; }

void check_integers(const char* op, const char* name, const Tensor& value, ScalarType dtype,
                    const char* of) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of ", of, " = cpu");
  IPEX_CHECK(value.scalar_type() == dtype, op, ": ", name, " must have dtype ", dtype_name(dtype),
             ", got ", dtype_name(value.scalar_type()));
}

// A vector or a matrix of integers with any strides.
template <class T>
struct View {
  T* data;
  int64_t step, row = 0;

  explicit View(const Tensor& x)
      : data(static_cast<T*>(const_cast<void*>(x.const_data_ptr()))), step(x.stride(x.dim() - 1)) {
    if (x.dim() > 1) row = x.stride(0);
  }
  T& operator[](int64_t i) const { return data[i * step]; }
  T& at(int64_t r, int64_t i) const { return data[r * row + i * step]; }
};

// One row along the last dimension of both tensors, from element `from` to element `to`.
void copy_row(const Tensor& source, int64_t from, const Tensor& target, int64_t to) {
  const int64_t item = item_size(source), last = source.dim() - 1, n = source.size(last);
  const int64_t s = source.stride(last), t = target.stride(last);
  const char* p = static_cast<const char*>(source.const_data_ptr()) + from * item;
  char* q = static_cast<char*>(target.mutable_data_ptr()) + to * item;
  if (s == 1 && t == 1) {
    std::memcpy(q, p, static_cast<size_t>(n * item));
    return;
  }
  for (int64_t i = 0; i < n; ++i)
    std::memcpy(q + i * t * item, p + i * s * item, static_cast<size_t>(item));
}

Tensor rnnt_embedding(const Tensor& table, const Tensor& idx, int64_t sos) {
  check_tensor(kEmbedding, "table", table);
  IPEX_CHECK(table.dim() == 2, kEmbedding, ": table must be 2-D, got ", table.dim(), "-D");
  IPEX_CHECK(idx.dim() == 1, kEmbedding, ": idx must be 1-D, got ", idx.dim(), "-D");
  check_integers(kEmbedding, "idx", idx, ScalarType::Long, "table");
  const int64_t batch = idx.size(0), rows = table.size(0);
  const View<const int64_t> index(idx);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(index[b] == sos || (index[b] >= 0 && index[b] < rows), kEmbedding, ": idx must be ",
               sos, " or from 0 to ", rows - 1, ", got ", index[b]);
  const int64_t sizes[2] = {batch, table.size(1)};
  Tensor out = new_contiguous(sizes, 2, table.scalar_type());
  if (out.numel() == 0) return out;
  std::memset(out.mutable_data_ptr(), 0, static_cast<size_t>(out.numel() * item_size(out)));
  for (int64_t b = 0; b < batch; ++b)
    if (index[b] != sos) copy_row(table, index[b] * table.stride(0), out, b * sizes[1]);
  return out;
}

void check_values(const char* name, const Tensor& value, std::initializer_list<int64_t> sizes,
                  const Tensor& x, const char* of) {
  check_kind(kUpdate, name, value, x, of, false);
  check_shape(kUpdate, name, value, sizes);
}

void check_state(const char* name, const char* new_name, const Tensor& state, const Tensor& value,
                 int64_t batch) {
  IPEX_CHECK(state.is_cpu(), kUpdate, ": ", name, " must be on the device of x = cpu");
  IPEX_CHECK(is_kernel_dtype(state.scalar_type()), kUpdate, ": ", name, " must be floating, got ",
             dtype_name(state.scalar_type()));
  IPEX_CHECK(state.dim() == 3 && state.size(1) == batch, kUpdate, ": ", name,
             " must have shape [layers, ", batch, ", H], got ", shape_text(state));
  check_values(new_name, value, {state.size(0), batch, state.size(2)}, state, name);
}

struct Named {
  const char* name;
  const Tensor& value;
};

// What one step of the greedy search reads and writes, under the names of the op's arguments.
struct Search {
  const Tensor &k, &out_lens, &label_col, &symbols_added, &time_idxs, &blankness, &blankvec,
      &not_blank, &label_to_put, &label_tensor, &label_for_next_loop, &hidden_0, &hidden_1,
      &hidden_prime_0, &hidden_prime_1, &x, &f;
};

void check_tensors(const Search& s) {
  const char* op = kUpdate;
  check_tensor(op, "x", s.x);
  IPEX_CHECK(s.x.dim() == 3, op, ": x must be 3-D [B, T, E], got ", s.x.dim(), "-D");
  const int64_t batch = s.x.size(0);
  const Named counters[] = {{"out_lens", s.out_lens},           {"label_col", s.label_col},
                            {"symbols_added", s.symbols_added}, {"time_idxs", s.time_idxs},
                            {"blankness", s.blankness},         {"blankvec", s.blankvec},
                            {"not_blank", s.not_blank}};
  for (const Named& one : counters) {
    check_integers(op, one.name, one.value, ScalarType::Int, "x");
    check_shape(op, one.name, one.value, {batch});
  }
  const Named labels[] = {
      {"k", s.k}, {"label_to_put", s.label_to_put}, {"label_for_next_loop", s.label_for_next_loop}};
  for (const Named& one : labels) {
    check_integers(op, one.name, one.value, ScalarType::Long, "x");
    check_shape(op, one.name, one.value, {batch});
  }
  IPEX_CHECK(s.label_tensor.dim() == 2, op, ": label_tensor must be 2-D, got ",
             s.label_tensor.dim(), "-D");
  check_integers(op, "label_tensor", s.label_tensor, ScalarType::Long, "x");
  check_shape(op, "label_tensor", s.label_tensor, {batch, s.label_tensor.size(1)});
  check_values("f", s.f, {batch, 1, s.x.size(2)}, s.x, "x");
  check_state("hidden_0", "hidden_prime_0", s.hidden_0, s.hidden_prime_0, batch);
  check_state("hidden_1", "hidden_prime_1", s.hidden_1, s.hidden_prime_1, batch);
  // All but the first of each are written.
  for (size_t i = 1; i < std::size(counters); ++i)
    check_writable(op, counters[i].name, counters[i].value);
  for (size_t i = 1; i < std::size(labels); ++i)
    check_writable(op, labels[i].name, labels[i].value);
  check_writable(op, "label_tensor", s.label_tensor);
  check_writable(op, "f", s.f);
  check_writable(op, "hidden_0", s.hidden_0);
  check_writable(op, "hidden_1", s.hidden_1);
}

void check_numbers(const Search& s, int64_t blank_id) {
  constexpr int32_t kLast = INT32_MAX - 1;  // it counts on
  const int64_t batch = s.x.size(0), frames = s.x.size(1), width = s.label_tensor.size(1);
  const View<const int32_t> lengths(s.out_lens), column(s.label_col), symbols(s.symbols_added),
      time(s.time_idxs);
  const View<const int64_t> best(s.k);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(lengths[b] >= 1 && lengths[b] <= frames, kUpdate, ": out_lens must be from 1 to ",
               frames, ", got ", lengths[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(column[b] >= 0 && column[b] < width, kUpdate, ": label_col must be from 0 to ",
               width - 1, ", got ", column[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(time[b] >= 0 && time[b] <= kLast, kUpdate, ": time_idxs must be from 0 to ", kLast,
               ", got ", time[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(symbols[b] >= 0 && symbols[b] <= kLast, kUpdate,
               ": symbols_added must be from 0 to ", kLast, ", got ", symbols[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(best[b] == blank_id || time[b] >= lengths[b] || column[b] < width - 1, kUpdate,
               ": label_tensor must have room for a label behind column ", width - 1, ", got ",
               width, " columns");
}

// Takes the best labels; returns whether all sequences have ended.
bool take_labels(const Search& s, int64_t max_symbols, int64_t blank_id, int64_t sos) {
  const View<const int32_t> lengths(s.out_lens);
  const View<const int64_t> best(s.k);
  const View<int32_t> column(s.label_col), symbols(s.symbols_added), time(s.time_idxs);
  const View<int32_t> moved(s.blankness), ended(s.blankvec), stored(s.not_blank);
  const View<int64_t> put(s.label_to_put), label(s.label_tensor);
  bool all_ended = true;
  for (int64_t b = 0; b < s.x.size(0); ++b) {
    const bool blank = best[b] == blank_id;
    const bool over = time[b] + blank >= lengths[b];
    const bool store = !blank && !over;
    const int32_t count = (blank ? 0 : symbols[b]) + store;
    const bool full = count >= max_symbols;
    if (store) label.at(b, ++column[b]) = best[b];
    put[b] = store ? best[b] - sos : 0;
    symbols[b] = full ? 0 : count;
    time[b] += blank || full;
    moved[b] = blank || full;
    ended[b] = over;
    stored[b] = store;
    all_ended = all_ended && over;
  }
  return all_ended;
}

void copy_state(const Tensor& from, const Tensor& to, int64_t b) {
  for (int64_t layer = 0; layer < to.size(0); ++layer)
    copy_row(from, layer * from.stride(0) + b * from.stride(1), to,
             layer * to.stride(0) + b * to.stride(1));
}

// Puts labels, states and frames where the next step reads them.
void go_on(const Search& s) {
  const View<const int32_t> column(s.label_col), time(s.time_idxs), moved(s.blankness),
      stored(s.not_blank);
  const View<const int64_t> label(s.label_tensor);
  const View<int64_t> next(s.label_for_next_loop);
  for (int64_t b = 0; b < s.x.size(0); ++b) {
    next[b] = label.at(b, column[b]);
    if (stored[b]) {
      copy_state(s.hidden_prime_0, s.hidden_0, b);
      copy_state(s.hidden_prime_1, s.hidden_1, b);
    }
    if (moved[b]) {
      const int64_t frame = std::min<int64_t>(time[b], s.x.size(1) - 1);
      copy_row(s.x, b * s.x.stride(0) + frame * s.x.stride(1), s.f, b * s.f.stride(0));
    }
  }
}

Tensor rnnt_update(const Tensor& k, const Tensor& out_lens, const Tensor& label_col,
                   const Tensor& symbols_added, const Tensor& time_idxs, const Tensor& blankness,
                   const Tensor& blankvec, const Tensor& not_blank, const Tensor& label_to_put,
                   const Tensor& label_tensor, const Tensor& label_for_next_loop,
                   const Tensor& hidden_0, const Tensor& hidden_1, const Tensor& hidden_prime_0,
                   const Tensor& hidden_prime_1, const Tensor& x, const Tensor& f,
                   int64_t max_symbols, int64_t blank_id, int64_t sos) {
  const Search search{k,
                      out_lens,
                      label_col,
                      symbols_added,
                      time_idxs,
                      blankness,
                      blankvec,
                      not_blank,
                      label_to_put,
                      label_tensor,
                      label_for_next_loop,
                      hidden_0,
                      hidden_1,
                      hidden_prime_0,
                      hidden_prime_1,
                      x,
                      f};
  check_tensors(search);
  IPEX_CHECK(max_symbols > 0, kUpdate, ": max_symbols must be positive, got ", max_symbols);
  check_numbers(search, blank_id);
  const bool all_ended = take_labels(search, max_symbols, blank_id, sos);
  if (!all_ended) go_on(search);
  const int64_t one[1] = {1};
  Tensor result = new_contiguous(one, 1, ScalarType::Bool);
  *static_cast<bool*>(result.mutable_data_ptr()) = all_ended;
  return result;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "rnnt_embedding", ipex::rnnt_embedding);
  IPEX_IMPL(m, "rnnt_update", ipex::rnnt_update);
}

// SPDX-License-Identifier: Apache-2.0
// Greedy decoding of RNN transducers. It counts and copies rows: one version for all levels.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "ipex/argument_checks.h"

namespace ipex {
namespace {

constexpr const char* kEmbedding = "rnnt_embedding";
constexpr const char* kUpdate = "rnnt_update";
const KernelBase embedding_op(kEmbedding);
const KernelBase update_op(kUpdate);

int64_t item_size(const Tensor& x) { return x.scalar_type() == ScalarType::Float ? 4 : 2; }

void check_integers(const char* op, const char* name, const Tensor& value, ScalarType dtype,
                    const char* of) {
  IPEX_CHECK(value.is_cpu(), op, ": ", name, " must be on the device of ", of,
             " = cpu, got another");
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
  IPEX_CHECK(state.is_cpu(), kUpdate, ": ", name, " must be on the device of x = cpu, got another");
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

Tensor rnnt_update(const Tensor& k, const Tensor& out_lens, const Tensor& label_col,
                   const Tensor& symbols_added, const Tensor& time_idxs, const Tensor& blankness,
                   const Tensor& blankvec, const Tensor& not_blank, const Tensor& label_to_put,
                   const Tensor& label_tensor, const Tensor& label_for_next_loop,
                   const Tensor& hidden_0, const Tensor& hidden_1, const Tensor& hidden_prime_0,
                   const Tensor& hidden_prime_1, const Tensor& x, const Tensor& f,
                   int64_t max_symbols, int64_t blank_id, int64_t sos) {
  const char* op = kUpdate;
  check_tensor(op, "x", x);
  IPEX_CHECK(x.dim() == 3, op, ": x must be 3-D [B, T, E], got ", x.dim(), "-D");
  const int64_t batch = x.size(0), frames = x.size(1);
  const Named counters[] = {{"out_lens", out_lens},           {"label_col", label_col},
                            {"symbols_added", symbols_added}, {"time_idxs", time_idxs},
                            {"blankness", blankness},         {"blankvec", blankvec},
                            {"not_blank", not_blank}};
  for (const Named& one : counters) {
    check_integers(op, one.name, one.value, ScalarType::Int, "x");
    check_shape(op, one.name, one.value, {batch});
  }
  const Named labels[] = {
      {"k", k}, {"label_to_put", label_to_put}, {"label_for_next_loop", label_for_next_loop}};
  for (const Named& one : labels) {
    check_integers(op, one.name, one.value, ScalarType::Long, "x");
    check_shape(op, one.name, one.value, {batch});
  }
  IPEX_CHECK(label_tensor.dim() == 2, op, ": label_tensor must be 2-D, got ", label_tensor.dim(),
             "-D");
  const int64_t width = label_tensor.size(1);
  check_integers(op, "label_tensor", label_tensor, ScalarType::Long, "x");
  check_shape(op, "label_tensor", label_tensor, {batch, width});
  check_values("f", f, {batch, 1, x.size(2)}, x, "x");
  check_state("hidden_0", "hidden_prime_0", hidden_0, hidden_prime_0, batch);
  check_state("hidden_1", "hidden_prime_1", hidden_1, hidden_prime_1, batch);
  for (size_t i = 1; i < std::size(counters); ++i)
    check_writable(op, counters[i].name, counters[i].value);
  for (size_t i = 1; i < std::size(labels); ++i)
    check_writable(op, labels[i].name, labels[i].value);
  check_writable(op, "label_tensor", label_tensor);
  check_writable(op, "f", f);
  check_writable(op, "hidden_0", hidden_0);
  check_writable(op, "hidden_1", hidden_1);
  IPEX_CHECK(max_symbols > 0, op, ": max_symbols must be positive, got ", max_symbols);

  constexpr int32_t kLast = INT32_MAX - 1;  // it counts on
  const View<const int32_t> lengths(out_lens);
  const View<const int64_t> best(k);
  const View<int32_t> column(label_col), symbols(symbols_added), time(time_idxs);
  const View<int32_t> moved(blankness), ended(blankvec), stored(not_blank);
  const View<int64_t> put(label_to_put), label(label_tensor), next(label_for_next_loop);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(lengths[b] >= 1 && lengths[b] <= frames, op, ": out_lens must be from 1 to ", frames,
               ", got ", lengths[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(column[b] >= 0 && column[b] < width, op, ": label_col must be from 0 to ", width - 1,
               ", got ", column[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(time[b] >= 0 && time[b] <= kLast, op, ": time_idxs must be from 0 to ", kLast,
               ", got ", time[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(symbols[b] >= 0 && symbols[b] <= kLast, op, ": symbols_added must be from 0 to ",
               kLast, ", got ", symbols[b]);
  for (int64_t b = 0; b < batch; ++b)
    IPEX_CHECK(best[b] == blank_id || time[b] >= lengths[b] || column[b] < width - 1, op,
               ": label_tensor must have room for a label behind column ", width - 1, ", got ",
               width, " columns");

  bool all_ended = true;
  for (int64_t b = 0; b < batch; ++b) {
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
  const int64_t one[1] = {1};
  Tensor result = new_contiguous(one, 1, ScalarType::Bool);
  *static_cast<bool*>(result.mutable_data_ptr()) = all_ended;
  if (all_ended) return result;
  for (int64_t b = 0; b < batch; ++b) {
    next[b] = label.at(b, column[b]);
    if (stored[b]) {
      for (int64_t layer = 0; layer < hidden_0.size(0); ++layer)
        copy_row(hidden_prime_0, layer * hidden_prime_0.stride(0) + b * hidden_prime_0.stride(1),
                 hidden_0, layer * hidden_0.stride(0) + b * hidden_0.stride(1));
      for (int64_t layer = 0; layer < hidden_1.size(0); ++layer)
        copy_row(hidden_prime_1, layer * hidden_prime_1.stride(0) + b * hidden_prime_1.stride(1),
                 hidden_1, layer * hidden_1.stride(0) + b * hidden_1.stride(1));
    }
    if (moved[b])
      copy_row(x, b * x.stride(0) + std::min<int64_t>(time[b], frames - 1) * x.stride(1), f,
               b * f.stride(0));
  }
  return result;
}

}  // namespace
}  // namespace ipex

STABLE_TORCH_LIBRARY_IMPL(ipex, CPU, m) {
  IPEX_IMPL(m, "rnnt_embedding", ipex::rnnt_embedding);
  IPEX_IMPL(m, "rnnt_update", ipex::rnnt_update);
}

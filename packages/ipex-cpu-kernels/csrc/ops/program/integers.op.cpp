// SPDX-License-Identifier: Apache-2.0
// Built-in instructions on integers: element-wise functions, and lookups along a dimension.
#include <algorithm>
#include <cstring>
#include <limits>

#include "ipex/glue/op_loops.h"

namespace ipex::program {
namespace {

constexpr int64_t kMaxDim = 16;
constexpr int64_t kBlock = 512;

// ---- element-wise

struct Function {
  const char* name;
  size_t operands;
  void (*run)(const int64_t* a, const int64_t* b, const int64_t* c, int64_t* to, int64_t n);
};

// Numbers that grow too large wrap, as in stock PyTorch.
uint64_t bits(int64_t value) { return static_cast<uint64_t>(value); }

int64_t floor_divide(int64_t a, int64_t b) {
  if (b == -1) return static_cast<int64_t>(-bits(a));
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

int64_t remainder(int64_t a, int64_t b) {
  if (b == -1) return 0;
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

#define IPEX_INTEGER(name, operands, expression)                                              \
  {name, operands,                                                                            \
   [](const int64_t* a, [[maybe_unused]] const int64_t* b, [[maybe_unused]] const int64_t* c, \
      int64_t* to, int64_t n) {                                                               \
     for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int64_t>(expression);                \
   }}
const Function kFunctions[] = {
    IPEX_INTEGER("add", 2, bits(a[i]) + bits(b[i])),
    IPEX_INTEGER("sub", 2, bits(a[i]) - bits(b[i])),
    IPEX_INTEGER("mul", 2, bits(a[i]) * bits(b[i])),
    IPEX_INTEGER("neg", 1, -bits(a[i])),
    IPEX_INTEGER("abs", 1, a[i] < 0 ? -bits(a[i]) : bits(a[i])),
    IPEX_INTEGER("floor_divide", 2, floor_divide(a[i], b[i])),
    IPEX_INTEGER("remainder", 2, remainder(a[i], b[i])),
    IPEX_INTEGER("minimum", 2, std::min(a[i], b[i])),
    IPEX_INTEGER("maximum", 2, std::max(a[i], b[i])),
    IPEX_INTEGER("bitwise_and", 2, a[i] & b[i]),
    IPEX_INTEGER("bitwise_or", 2, a[i] | b[i]),
    IPEX_INTEGER("bitwise_xor", 2, a[i] ^ b[i]),
    IPEX_INTEGER("bitwise_not", 1, ~a[i]),
    IPEX_INTEGER("eq", 2, a[i] == b[i]),
    IPEX_INTEGER("ne", 2, a[i] != b[i]),
    IPEX_INTEGER("lt", 2, a[i] < b[i]),
    IPEX_INTEGER("le", 2, a[i] <= b[i]),
    IPEX_INTEGER("gt", 2, a[i] > b[i]),
    IPEX_INTEGER("ge", 2, a[i] >= b[i]),
    IPEX_INTEGER("where", 3, a[i] != 0 ? b[i] : c[i]),
};
#undef IPEX_INTEGER

const Function& function_of(const std::string& name) {
  for (const Function& one : kFunctions)
    if (name == one.name) return one;
  std::string names;
  for (const Function& one : kFunctions)
    names += (names.empty() ? "" : ", ") + std::string(one.name);
  fail("integer: function must be one of ", names, ", got ", name);
}

// Calls f.operator()<T>() for the storage type of a dtype of integers or of bool.
template <class F>
void visit_integer(const char* name, ScalarType dtype, const F& f) {
  if (dtype == ScalarType::Long) return f.template operator()<int64_t>();
  if (dtype == ScalarType::Int) return f.template operator()<int32_t>();
  if (dtype == ScalarType::Short) return f.template operator()<int16_t>();
  if (dtype == ScalarType::Char) return f.template operator()<int8_t>();
  if (dtype == ScalarType::Byte) return f.template operator()<uint8_t>();
  if (dtype == ScalarType::Bool) return f.template operator()<bool>();
  fail("integer: ", name, " must have dtype int64, int32, int16, int8, uint8, bool, got ",
       dtype_name(dtype));
}

// One operand, seen in the shape of the result.
struct Operand {
  const char* data;
  ScalarType dtype;
  int64_t steps[kMaxDim];  // in elements; 0 where it is repeated

  void load(int64_t at, int64_t step, int64_t* to, int64_t n) const {
    visit_integer("input", dtype, [&]<class T>() {
      const T* from = reinterpret_cast<const T*>(data) + at;
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<int64_t>(from[i * step]);
    });
  }
};

bool has_zero(const Tensor& x) {
  const Tensor plain = as_contiguous(x);
  bool found = false;
  visit_integer("input", x.scalar_type(), [&]<class T>() {
    const T* values = static_cast<const T*>(plain.const_data_ptr());
    found = std::find(values, values + plain.numel(), T{0}) != values + plain.numel();
  });
  return found;
}

Tensor integer(const std::vector<Tensor>& inputs, const std::string& name, ScalarType dtype) {
  const Function& function = function_of(name);
  IPEX_CHECK(inputs.size() == function.operands, "integer: inputs must have ", function.operands,
             " tensor(s), got ", inputs.size());
  int64_t dim = 0, sizes[kMaxDim];
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Tensor& x = inputs[k];
    visit_integer("inputs", x.scalar_type(), []<class T>() {});
    IPEX_CHECK(x.dim() <= kMaxDim, "integer: input ", k, " must have at most ", kMaxDim,
               " dimensions, got ", x.dim());
    const int64_t before = dim;
    const std::vector<int64_t> so_far(sizes, sizes + dim);
    if (x.dim() > dim) {
      std::copy_backward(sizes, sizes + dim, sizes + x.dim());
      std::copy_n(x.sizes().data(), x.dim() - dim, sizes);
      dim = x.dim();
    }
    for (int64_t i = 1; i <= std::min(before, x.dim()); ++i) {
      const int64_t m = x.size(x.dim() - i);
      int64_t& n = sizes[dim - i];
      IPEX_CHECK(m == n || m == 1 || n == 1, "integer: input ", k,
                 " must broadcast with the inputs before it of shape ", list_text(so_far), ", got ",
                 shape_text(x));
      if (n == 1) n = m;
    }
  }
  Tensor y = new_contiguous(sizes, dim, dtype);
  visit_integer("dtype", dtype, []<class T>() {});
  if (y.numel() == 0) return y;
  const bool divides = name == "floor_divide" || name == "remainder";
  IPEX_CHECK(!divides || !has_zero(inputs[1]), "integer: the divisor must not be 0, got 0");
  std::vector<Operand> operands(inputs.size());
  bool plain = true;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const Tensor& x = inputs[k];
    operands[k].data = static_cast<const char*>(x.const_data_ptr());
    operands[k].dtype = x.scalar_type();
    for (int64_t d = 0; d < dim; ++d) {
      const int64_t own = d - (dim - x.dim());
      operands[k].steps[d] = own < 0 || x.size(own) == 1 ? 0 : x.stride(own);
    }
    plain = plain && x.numel() == y.numel() && x.is_contiguous();
  }
  const int64_t columns = plain ? y.numel() : dim ? sizes[dim - 1] : 1;
  const int64_t pieces = (columns + kBlock - 1) / kBlock, rows = y.numel() / columns;
  char* const to = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(rows * pieces, std::max<int64_t>(1, 4096 / std::min(columns, kBlock)),
               [&](int64_t begin, int64_t end) {
                 int64_t values[3][kBlock], results[kBlock];
                 for (int64_t piece = begin; piece < end; ++piece) {
                   const int64_t row = piece / pieces, first = piece % pieces * kBlock;
                   const int64_t n = std::min(kBlock, columns - first);
                   for (size_t k = 0; k < operands.size(); ++k) {
                     int64_t at = 0;
                     if (!plain)
                       for (int64_t d = dim - 2, rest = row; d >= 0; rest /= sizes[d--])
                         at += rest % sizes[d] * operands[k].steps[d];
                     const int64_t step = plain ? 1 : dim ? operands[k].steps[dim - 1] : 0;
                     operands[k].load(at + first * step, step, values[k], n);
                   }
                   function.run(values[0], values[1], values[2], results, n);
                   visit_integer("dtype", dtype, [&]<class T>() {
                     T* out = reinterpret_cast<T*>(to) + row * columns + first;
                     for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(results[i]);
                   });
                 }
               });
  return y;
}

// ---- lookups

int64_t dimension(const char* op, const Tensor& x, int64_t dim) {
  IPEX_CHECK(dim >= -x.dim() && dim < x.dim(), op, ": dim must be a dimension of x (", x.dim(),
             "-D), got ", dim);
  return dim < 0 ? dim + x.dim() : dim;
}

// The values of an int32 or int64 tensor in [low, limit), negative ones counted from the end.
std::vector<int64_t> places(const char* op, const Tensor& index, int64_t low, int64_t limit) {
  const ScalarType dtype = index.scalar_type();
  IPEX_CHECK(dtype == ScalarType::Int || dtype == ScalarType::Long, op,
             ": index must be int32 or int64, got torch.", dtype_name(dtype));
  const Tensor plain = as_contiguous(index);
  const void* data = plain.const_data_ptr();
  std::vector<int64_t> values(static_cast<size_t>(plain.numel()));
  for (size_t i = 0; i < values.size(); ++i) {
    const int64_t value = dtype == ScalarType::Int ? static_cast<const int32_t*>(data)[i]
                                                   : static_cast<const int64_t*>(data)[i];
    IPEX_CHECK(value >= low && value < limit, op, ": index must be in [", low, ", ", limit,
               "), got ", value);
    values[i] = value < 0 ? value + limit : value;
  }
  return values;
}

Tensor take(const Tensor& x0, int64_t dim0, const Tensor& index) {
  const int64_t dim = dimension("take", x0, dim0), size = x0.size(dim);
  IPEX_CHECK(x0.dim() - 1 + index.dim() <= kMaxDim, "take: index must have at most ",
             kMaxDim + 1 - x0.dim(), " dimensions, got ", index.dim());
  const std::vector<int64_t> at = places("take", index, -size, size);
  int64_t sizes[kMaxDim], outer = 1, inner = 1, count = 0;
  for (int64_t d = 0; d < dim; ++d) outer *= sizes[count++] = x0.size(d);
  for (int64_t d = 0; d < index.dim(); ++d) sizes[count++] = index.size(d);
  for (int64_t d = dim + 1; d < x0.dim(); ++d) inner *= sizes[count++] = x0.size(d);
  Tensor y = new_contiguous(sizes, count, x0.scalar_type());
  if (y.numel() == 0) return y;
  const Tensor x = as_contiguous(x0);
  const int64_t bytes = inner * static_cast<int64_t>(x.element_size());
  const auto each = static_cast<int64_t>(at.size());
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(outer * each, std::max<int64_t>(1, kPieceBytes / bytes),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i)
                   std::memcpy(to + i * bytes,
                               from + (i / each * size + at[static_cast<size_t>(i % each)]) * bytes,
                               static_cast<size_t>(bytes));
               });
  return y;
}

Tensor gather(const Tensor& x0, int64_t dim0, const Tensor& index) {
  const int64_t dim = dimension("gather", x0, dim0);
  bool fits = index.dim() == x0.dim() && x0.dim() <= kMaxDim;
  for (int64_t d = 0; fits && d < x0.dim(); ++d) fits = d == dim || index.size(d) <= x0.size(d);
  IPEX_CHECK(fits, "gather: index must be at most as large as x of shape ", shape_text(x0),
             " except in dimension ", dim, ", got ", shape_text(index));
  const std::vector<int64_t> at = places("gather", index, 0, x0.size(dim));
  Tensor y = new_contiguous(index.sizes().data(), index.dim(), x0.scalar_type());
  if (y.numel() == 0) return y;
  const auto bytes = static_cast<size_t>(x0.element_size());
  const char* from = static_cast<const char*>(x0.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  parallel_for(y.numel(), 4096, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t place = at[static_cast<size_t>(i)] * x0.stride(dim);
      for (int64_t d = x0.dim() - 1, rest = i; d >= 0; rest /= index.size(d--))
        if (d != dim) place += rest % index.size(d) * x0.stride(d);
      std::memcpy(to + static_cast<size_t>(i) * bytes, from + static_cast<size_t>(place) * bytes,
                  bytes);
    }
  });
  return y;
}

const bool registered = [] {
  add("integer", Adapter<&integer>::entry());
  add("take", Adapter<&take>::entry());
  add("gather", Adapter<&gather>::entry());
  return true;
}();

}  // namespace
}  // namespace ipex::program

// SPDX-License-Identifier: Apache-2.0
#include "program/copy.h"

#include <cstring>

#include "ipex/kernel/transpose.h"

namespace ipex {
namespace {

template <typename T>
void copy_scalars(const CopyCall& call, const T* from, T* to, int64_t nj, int64_t ni) {
  for (int64_t j = 0; j < nj; ++j)
    for (int64_t i = 0; i < ni; ++i)
      to[j * call.to_j + i * call.to_i] = from[j * call.from_j + i * call.from_i];
}

// As copy_transposed, for a few numbers that lie side by side in the result.
template <int kCount, typename T>
void copy_few(const CopyCall& call, const T* from, T* to, int64_t nj) {
  for (int64_t j = 0; j < nj; ++j)
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) to[j * call.to_j + i] = from[j + i * call.from_i];
}

// A call of memcpy for each short row would take longer than the copy.
IPEX_INLINE void copy_row(const char* from, char* to, int64_t bytes) {
  constexpr int64_t kVector = kLanes * static_cast<int64_t>(sizeof(float));
  if (bytes < kVector || bytes > 2048) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
    return;
  }
  const auto copy_vector = [&](int64_t i) IPEX_LAMBDA {
    storeu(reinterpret_cast<float*>(to + i), loadu(reinterpret_cast<const float*>(from + i)));
  };
  for (int64_t i = 0; i + kVector <= bytes; i += kVector) copy_vector(i);
  copy_vector(bytes - kVector);  // the rest, and some again
}

// Consecutive in the source along j and in the result along i.
template <typename T>
void copy_transposed(const CopyCall& call, const T* from, T* to, int64_t nj, int64_t ni) {
  if (ni == 2) return copy_few<2>(call, from, to, nj);
  if (ni == 3) return copy_few<3>(call, from, to, nj);
  if (ni == 4) return copy_few<4>(call, from, to, nj);
  int64_t j = 0;
  if constexpr (sizeof(T) == sizeof(float)) {
    for (; j + kLanes <= nj; j += kLanes) {
      int64_t i = 0;
      for (; i + kLanes <= ni; i += kLanes) {
        f32v r[kLanes];
#pragma GCC unroll 16
        for (int64_t k = 0; k < kLanes; ++k)
          r[k] = loadu(reinterpret_cast<const float*>(from + j + (i + k) * call.from_i));
        transpose(r);
#pragma GCC unroll 16
        for (int64_t k = 0; k < kLanes; ++k)
          storeu(reinterpret_cast<float*>(to + (j + k) * call.to_j + i), r[k]);
      }
      if (i < ni)
        copy_scalars(call, from + j + i * call.from_i, to + j * call.to_j + i, kLanes, ni - i);
    }
  }
  if (j < nj) copy_scalars(call, from + j, to + j * call.to_j, nj - j, ni);
}

template <typename T>
void copy_tile(const CopyCall& call, const T* from, T* to, int64_t nj, int64_t ni) {
  if (call.to_i == 1 && call.from_i == 1) {
    for (int64_t j = 0; j < nj; ++j)
      copy_row(reinterpret_cast<const char*>(from + j * call.from_j),
               reinterpret_cast<char*>(to + j * call.to_j), ni * static_cast<int64_t>(sizeof(T)));
  } else if (call.to_i == 1 && call.from_j == 1) {
    copy_transposed(call, from, to, nj, ni);
  } else {
    copy_scalars(call, from, to, nj, ni);
  }
}

template <typename T>
void run(const CopyCall& call, int64_t begin, int64_t end) {
  const T* const source = static_cast<const T*>(call.from);
  T* const target = static_cast<T*>(call.to);
  const int64_t tiles_i = call.tiles_i(), tiles_j = call.tiles_j();
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t i = tile % tiles_i * call.tile_i, j = tile / tiles_i % tiles_j * call.tile_j;
    int64_t from = i * call.from_i + j * call.from_j, to = i * call.to_i + j * call.to_j;
    for (int64_t d = call.outer - 1, rest = tile / tiles_i / tiles_j; d >= 0; --d) {
      from += rest % call.sizes[d] * call.from_strides[d];
      to += rest % call.sizes[d] * call.to_strides[d];
      rest /= call.sizes[d];
    }
    const int64_t left_i = call.size_i - i, left_j = call.size_j - j;
    copy_tile(call, source + from, target + to, left_j < call.tile_j ? left_j : call.tile_j,
              left_i < call.tile_i ? left_i : call.tile_i);
  }
}

}  // namespace
}  // namespace ipex

void ipex_k_copy(const ipex::CopyCall* call, int64_t begin, int64_t end) {
  // Unsigned numbers stand for all types of their size. The vectors of 4-byte elements are copied,
  // never computed with, so any bits pass through.
  switch (call->item) {
    case 1:
      return ipex::run<uint8_t>(*call, begin, end);
    case 2:
      return ipex::run<uint16_t>(*call, begin, end);
    case 4:
      return ipex::run<uint32_t>(*call, begin, end);
    default:
      return ipex::run<uint64_t>(*call, begin, end);
  }
}

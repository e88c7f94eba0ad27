// SPDX-License-Identifier: Apache-2.0
// Optional weight and bias of a normalization, in one type.
#pragma once

#include "ipex/glue/op_loops.h"

namespace ipex {

struct Affine {
  Vector weight;
  Vector bias;
  bool is_f32 = false;

  Affine(const OptionalTensor& w, const OptionalTensor& b) {
    const bool mixed = w && b && w->scalar_type() != b->scalar_type();
    weight = Vector(mixed ? widen(w) : w);
    bias = Vector(mixed ? widen(b) : b);
    is_f32 = weight.is_f32 || bias.is_f32;
  }

 private:
  // A copy of a few KiB, for the rare mixture only.
  static OptionalTensor widen(const OptionalTensor& value) {
    return torch::stable::to(*value, ScalarType::Float);
  }
};

}  // namespace ipex

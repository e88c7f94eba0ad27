// SPDX-License-Identifier: Apache-2.0
// Steps of optimizers for lists of parameters: the step for one of them, once for each.
#pragma once

#include <initializer_list>
#include <optional>
#include <vector>

#include "ipex/glue/dispatch.h"

namespace ipex {

using TensorList = std::vector<Tensor>;

struct NamedList {
  const char* name;
  const TensorList& values;
  bool optional = false;  // may be empty: there are no such tensors
};

inline void check_lists(const char* op, const TensorList& params,
                        std::initializer_list<NamedList> lists) {
  for (const NamedList& list : lists) {
    if (list.values.size() == params.size() || (list.optional && list.values.empty())) continue;
    fail(op, ": ", list.name, " must hold ", params.size(), " tensor(s), got ", list.values.size());
  }
}

inline OptionalTensor element(const TensorList& list, size_t i) {
  return list.empty() ? OptionalTensor() : OptionalTensor(list[i]);
}

}  // namespace ipex

// SPDX-License-Identifier: Apache-2.0
#include "woq_linear/woq_int8.h"

namespace ipex {

Tensor woq_linear_int8(const Tensor&, const Tensor&, const PackedHeader&, int64_t, const Epilogue&,
                       const std::string&) {
  fail("woq_linear: lowp_mode int8 has no kernel in this build");
}

}  // namespace ipex

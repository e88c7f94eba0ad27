// SPDX-License-Identifier: Apache-2.0
// woq_linear with activations rounded to 8 bits: called by its glue after all checks.
#pragma once

#include <string>

#include "ipex/epilogue_args.h"
#include "ipex/glue/dispatch.h"
#include "woq_linear/woq_format.h"

namespace ipex {

// `packed` is of order vnni with n rows; `act_quant_mode` is one of the op's modes and not none.
// y has the shape of x with `out_features` last.
Tensor woq_linear_int8(const Tensor& x, const Tensor& packed, const PackedHeader& header,
                       int64_t out_features, const Epilogue& epilogue,
                       const std::string& act_quant_mode);

}  // namespace ipex

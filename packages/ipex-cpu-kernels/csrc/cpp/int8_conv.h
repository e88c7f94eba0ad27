// SPDX-License-Identifier: Apache-2.0
// The ops of static INT8 that ipex_quant has in Python: convolutions on codes and embedding bags on
// 8-bit rows.
#pragma once

namespace ipex::cpp {

// Gives torch these ops, except where Python has defined them before. Reports failures on standard
// error.
void define_int8_ops();

}  // namespace ipex::cpp

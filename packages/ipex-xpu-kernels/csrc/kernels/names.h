// SPDX-License-Identifier: Apache-2.0
// For the kernels of this package: names of prelude.h, which kernels of users include without them,
// and lists for explicit instantiations.
#pragma once

#include "prelude.h"

using ipex::bf16;
using ipex::compute;
using ipex::global_id;
using ipex::half;
using ipex::load;
using ipex::map_elements;
using ipex::pair_of;
using ipex::Place;
using ipex::reduce_group;
using ipex::Row;
using ipex::store;
using ipex::with_values;

#define IPEX_FOUR(T) T, T, T, T
#define IPEX_FLOATS(macro, op) macro(op, float) macro(op, half) macro(op, bf16)
#define IPEX_WHOLE(macro, op) macro(op, long) macro(op, int)

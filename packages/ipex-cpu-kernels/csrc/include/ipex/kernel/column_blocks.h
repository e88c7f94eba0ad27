// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

namespace ipex {

// Rows whose sums over columns one array collects; see column_sums.h.
inline constexpr int64_t kRowsOfBlock = 32;

}  // namespace ipex

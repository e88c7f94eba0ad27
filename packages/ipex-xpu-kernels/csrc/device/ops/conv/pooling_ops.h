// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ipex::xpu {

void register_pooling();

}  // namespace ipex::xpu

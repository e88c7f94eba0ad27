// SPDX-License-Identifier: Apache-2.0
#pragma once

// Must equal KERNEL_API of ipex_core.kernels.providers; a check in the repository compares them.
#define IPEX_KERNEL_API_VERSION 1

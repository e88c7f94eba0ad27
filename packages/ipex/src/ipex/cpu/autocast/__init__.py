# SPDX-License-Identifier: Apache-2.0
"""Mixed precision under the names of Intel Extension for PyTorch; new code takes `ipex.amp`."""

from ipex_core.amp import GradScaler, autocast

__all__ = ["GradScaler", "autocast"]

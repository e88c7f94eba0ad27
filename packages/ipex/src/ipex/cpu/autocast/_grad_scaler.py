# SPDX-License-Identifier: Apache-2.0
"""The module scripts import `GradScaler` from."""

from torch.amp.grad_scaler import OptState

from ipex_core.amp import GradScaler

__all__ = ["GradScaler", "OptState"]

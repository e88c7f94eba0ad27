# SPDX-License-Identifier: Apache-2.0
"""The optimize pipeline: `optimize`, `restore` and the channels-last preference."""

from __future__ import annotations

from ipex_core.optimization.api import optimize, restore
from ipex_core.optimization.passes.prepack import (
    disable_auto_channels_last,
    enable_auto_channels_last,
)

__all__ = ["disable_auto_channels_last", "enable_auto_channels_last", "optimize", "restore"]

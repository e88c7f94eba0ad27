# SPDX-License-Identifier: Apache-2.0
"""The parts of a Mamba layer."""

from __future__ import annotations

from ipex_core.nn.ipex_api import state_space
from ipex_llm.modules.utils import IPEXRuntimeCustomOps

__all__ = ["MambaMixer"]


class MambaMixer:
    """The convolution and the recurrence of selective state space models.

    There is nothing to make: these are functions.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    causal_conv1d_fn = staticmethod(state_space.causal_conv1d_fn)
    causal_conv1d_update = staticmethod(state_space.causal_conv1d_update)
    selective_scan_fn = staticmethod(state_space.selective_scan_fn)
    selective_state_update = staticmethod(state_space.selective_state_update)

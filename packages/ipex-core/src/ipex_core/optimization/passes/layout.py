# SPDX-License-Identifier: Apache-2.0
"""Channels-last weights for convolutions; activations follow by layout propagation."""

from __future__ import annotations

from torch import nn

from ipex_core.module_swap.state_dict import attach
from ipex_core.optimization.passes.base import Context, Pass, swap_reason

__all__ = [
    "ChannelsLast",
    "auto_channels_last",
    "disable_auto_channels_last",
    "enable_auto_channels_last",
]

#: Not for signals: seven shapes, with 1 thread of a shared machine, took 0.5 to 1.3 (float32) and 0.9 to 1.2
#: (bfloat16) times the time of contiguous weights.
_FORMATS: dict[type[nn.Module], str] = {
    nn.Conv2d: "channels_last",
    nn.ConvTranspose2d: "channels_last",
    nn.Conv3d: "channels_last_3d",
    nn.ConvTranspose3d: "channels_last_3d",
}

_auto = True


def enable_auto_channels_last() -> None:
    """Let `optimize` store the weights of convolutions channels-last, which is the default."""
    global _auto
    _auto = True


def disable_auto_channels_last() -> None:
    """Let `optimize` keep the memory format of convolution weights, and INT8 convolutions give contiguous results."""
    global _auto
    _auto = False


def auto_channels_last() -> bool:
    """Return whether `optimize` stores the weights of convolutions channels-last."""
    return _auto


class ChannelsLast(Pass):
    """Store convolution weights channels-last."""

    name = "channels_last"

    def applies(self, context: Context) -> bool:
        """Return the process-wide preference."""
        return context.options.channels_last

    def apply(self, context: Context) -> None:
        """Plan the memory format."""
        for path, module in context.modules():
            state = module.__dict__.get("_ipex_state")
            kind = (state.original_class if state is not None else None) or type(module)
            memory_format = _FORMATS.get(kind)
            if memory_format is None:
                continue
            weight = module._parameters.get("weight")
            reason = swap_reason(module) if kind is type(module) else None
            if reason is None and (weight is None or context.shared(module)):
                reason = "the weight is shared with another module"
            if reason is not None:
                context.log.add(path, module, self.name, False, reason)
                continue
            attach(module).memory_format = memory_format
            context.log.add(
                path, module, self.name, True, "weight and input in channels-last order"
            )

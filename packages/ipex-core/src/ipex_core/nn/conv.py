# SPDX-License-Identifier: Apache-2.0
"""Convolutions on packed weights, and convolutions that cast their input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from ipex_core.library.spec import CHANNELS_LAST
from ipex_core.module_swap.base import (
    OptimizedModule,
    is_stand_in,
    needs_grad,
    record_call,
    stock_only,
    usable_parameters,
)
from ipex_core.module_swap.script import stock_forward
from ipex_core.module_swap.state_dict import ModuleState, state_of
from ipex_core.packing import onednn
from ipex_core.packing.parameter import PackedWeight, captured


def _in_format(x: Tensor, state: ModuleState) -> Tensor:
    """Return an input in the memory format of the weight."""
    if state.memory_format is not None and x.dim() in CHANNELS_LAST:
        return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])
    return x


class _OptimizedConv(OptimizedModule, nn.modules.conv._ConvNd):
    """Common part of the convolutions.

    With gradients the weight is unpacked and the stock convolution runs.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Convolve."""
        if is_scripting():
            return self._scripted(input)
        else:
            return self._run(input)

    def _scripted(self, x: Tensor) -> Tensor:
        if hasattr(self, "_script_weight"):
            weight: Tensor = self._script_weight
        else:
            weight = self.weight
        bias = self.bias
        if bias is not None:
            bias = bias.to(weight.dtype)
        return self._conv_forward(x.to(weight.dtype), weight, bias)

    def _run(self, input: Tensor) -> Tensor:
        packed = self._packed
        if packed is None or captured() or stock_only(input):
            return self._stock(input)
        if "weight" not in self._parameters or "bias" not in self._parameters:
            return self._stock(input)  # a hook or a parametrization computes it
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if torch.compiler.is_compiling():
            batched = input.dim() == len(self.kernel_size) + 2
            state = state_of(self)
            assert state is not None and state.conv is not None
            padding, stride, dilation, groups = state.conv
            assert self._dtype is not None
            x = input if batched else input.unsqueeze(0)
            x = _in_format(x.to(self._dtype), state)
            y: Tensor = torch.ops.ipex_core.packed_conv(
                x,
                packed,
                bias.detach() if bias is not None else None,
                [self.out_channels, self.in_channels // self.groups, *self.kernel_size],
                padding,
                stride,
                dilation,
                groups,
            )
            return y if batched else y.squeeze(0)
        usable = (
            isinstance(weight, PackedWeight)
            and input.dim() == len(self.kernel_size) + 2
            and input.numel() > 0
            and not (torch.is_grad_enabled() and needs_grad(self, input))
            and not (self._dtype is torch.float32 and torch.is_autocast_enabled("cpu"))
        )
        if not usable:
            return self._stock(input)
        state = state_of(self)
        assert state is not None and state.conv is not None
        assert self._dtype is not None
        x = _in_format(input.to(self._dtype), state)
        return onednn.conv(x, packed, bias, *state.conv)

    def _stock(self, x: Tensor) -> Tensor:
        if is_stand_in(x):
            return record_call(self, x)
        weight, bias = usable_parameters(self)
        return self._conv_forward(self._cast(x, weight), weight, bias)

    def extra_repr(self) -> str:
        """Add the packing to the line of the stock layer."""
        form = "mkldnn" if self._packed is not None else "plain"
        base = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{base}, format={form}"


class OptimizedConv1d(_OptimizedConv, nn.Conv1d):
    """`torch.nn.Conv1d` on a channels-last weight, and that casts its input to the dtype of its weight.

    It runs as a 2-D convolution of height 1: those have channels-last kernels.
    """

    def _stock(self, x: Tensor) -> Tensor:
        state = state_of(self)
        if state is None or state.memory_format is None or is_stand_in(x) or x.dim() not in (2, 3):
            return super()._stock(x)
        weight, bias = usable_parameters(self)
        signal, x = x, self._cast(x, weight)
        padding: Any = self.padding if isinstance(self.padding, str) else (0, *self.padding)
        if self.padding_mode != "zeros":
            x = nn.functional.pad(x, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        wide = x.unsqueeze(-2)
        if wide.dim() == 4:
            wide = wide.contiguous(memory_format=torch.channels_last)
        stride, dilation = (1, *self.stride), (1, *self.dilation)
        try:
            y = nn.functional.conv2d(
                wide, weight.unsqueeze(2), bias, stride, padding, dilation, self.groups
            )
        except RuntimeError:  # the error shall speak of a sequence
            return super()._stock(signal)
        return y.squeeze(-2)


class OptimizedConv2d(_OptimizedConv, nn.Conv2d):
    """`torch.nn.Conv2d` on a packed weight."""


class OptimizedConv3d(_OptimizedConv, nn.Conv3d):
    """`torch.nn.Conv3d` on a packed weight."""


class _OptimizedConvTranspose(OptimizedModule):
    if TYPE_CHECKING:  # annotations would be read by `torch.jit.script`
        weight: Tensor
        _stock: Any

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Convolve."""
        return self._stock(self._cast(input, self.weight), output_size)


class OptimizedConvTranspose1d(_OptimizedConvTranspose, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` that casts its input to the dtype of its weight."""

    _stock = stock_forward(nn.ConvTranspose1d)


class OptimizedConvTranspose2d(_OptimizedConvTranspose, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` that casts its input to the dtype of its weight."""

    _stock = stock_forward(nn.ConvTranspose2d)


class OptimizedConvTranspose3d(_OptimizedConvTranspose, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` that casts its input to the dtype of its weight."""

    _stock = stock_forward(nn.ConvTranspose3d)

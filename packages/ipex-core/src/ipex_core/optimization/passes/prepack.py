# SPDX-License-Identifier: Apache-2.0
"""Passes that change how values lie in memory: channels last, and packed weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ipex_core import nn as inn
from ipex_core.kernels import measured
from ipex_core.kernels.policy import LinearChoice, choose_linear, fastest, has_kernel, numbers
from ipex_core.library.spec import CHANNELS_LAST, dtype_name
from ipex_core.module_swap.base import call
from ipex_core.module_swap.state_dict import attach, class_of, record_of, state_of, swap_class
from ipex_core.optimization.passes import Context, Pass, swap_reason
from ipex_core.optimization.passes.cast import LEAVES
from ipex_core.packing import onednn
from ipex_core.packing.parameter import pack

#: Sequences run as images of height 1. Eight shapes with 1 thread of a Xeon with AMX took, with the conversion of the
#: input, 0.14 (depthwise) to 1.15 times the time of contiguous weights in float32, and 0.16 to 1.0 times in bfloat16.
_FORMATS: dict[type[nn.Module], str] = {
    nn.Conv1d: "channels_last_1d",
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
    knob = "channels_last"

    def apply(self, context: Context) -> None:
        """Plan the memory format."""
        for path, module in context.modules():
            kind = class_of(module)
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
            if kind is nn.Conv1d:
                swap_class(module, LEAVES[nn.Conv1d])
            attach(module).memory_format = memory_format
            context.log.add(
                path, module, self.name, True, "weight and input in channels-last order"
            )


# --- packing ----------------------------------------------------------------------------------------------------------


_measured: dict[tuple[torch.dtype, int, int, int], LinearChoice] = {}


@torch.no_grad()
def measure_linear(dtype: torch.dtype, n: int, k: int, m: int) -> LinearChoice:
    """Choose the format by timing all candidates on random data, once per shape and process."""
    key = (dtype, n, k, m)
    if key in _measured:
        return _measured[key]
    x, weight = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype)
    bias = torch.zeros(n, dtype=dtype)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "stock": lambda: torch.nn.functional.linear(x, weight, bias)
    }
    if onednn.supports(dtype):
        one = pack(weight, "mkldnn")
        runs["mkldnn"] = lambda: onednn.linear(x, one, bias)
    if has_kernel("linear"):
        two = pack(weight, "ipex")
        runs["ipex"] = lambda: call(torch.ops.ipex.linear.default, x, two, n, bias, None, "none")
    best, text = fastest(runs)
    choice = LinearChoice(None if best == "stock" else best, f"measured at {m} rows: {text}")
    _measured[key] = choice
    return choice


@torch.no_grad()
def measure_conv(
    module: nn.Conv2d | nn.Conv3d, dtype: torch.dtype, size: list[int], channels_last: bool
) -> LinearChoice:
    """Choose the format of a convolution weight by timing at one input size.

    A weight packed for one size can be much slower than the stock op at another, and the stock op on a channels-last
    weight is at most a few percent slower than a packed weight; so this is the only way to a packed convolution.
    """
    order = CHANNELS_LAST[len(size)] if channels_last else torch.contiguous_format
    x = numbers(*size, dtype=dtype).contiguous(memory_format=order)
    weight = module.weight.detach().to(dtype).contiguous(memory_format=order)
    bias = None if module.bias is None else module.bias.detach().to(dtype)
    arguments = conv_arguments(module)
    packed = pack(weight, "mkldnn", arguments, size)
    runs: dict[str, Callable[[], torch.Tensor]] = {
        "stock": lambda: module._conv_forward(x, weight, bias),
        "mkldnn": lambda: onednn.conv(x, packed, bias, *arguments),
    }
    side = measured.side("convolution", dtype, ())
    if side is not None:  # to measure it
        return LinearChoice("mkldnn" if side == "onednn" else None, f"{side} is asked for")
    best, text = fastest(runs)
    reason = f"measured at input {size}: {text}"
    return LinearChoice(None if best == "stock" else best, reason)


def conv_arguments(module: nn.Conv2d | nn.Conv3d) -> tuple[list[int], list[int], list[int], int]:
    """Return ``(padding, stride, dilation, groups)`` as the packed op takes them."""
    padding = [int(p) for p in module.padding]
    return padding, list(module.stride), list(module.dilation), module.groups


def _dtype_of(module: nn.Module) -> torch.dtype:
    """Return the dtype that a layer computes in."""
    state = state_of(module)
    weight = module._parameters["weight"]
    assert weight is not None
    return state.dtype if state is not None and state.dtype is not None else weight.dtype


class Prepack(Pass):
    """Pack the weights of linear layers and convolutions."""

    name = "prepack"
    knob = "weights_prepack"

    def apply(self, context: Context) -> None:
        """Plan the format of each weight."""
        for path, module in context.modules():
            kind = class_of(module)
            if kind not in (nn.Linear, nn.Conv2d, nn.Conv3d):
                if isinstance(module, (nn.Linear, nn.Conv2d, nn.Conv3d)):
                    context.log.add(
                        path, module, self.name, False, "a subclass with a forward of its own"
                    )
                continue
            if record_of(module).packed_later:
                text = "packed together with its neighbors afterwards"
                context.log.add(path, module, self.name, True, text, "ipex::linear")
                continue
            reason = swap_reason(module) if kind is type(module) else None
            if reason is None and context.shared(module):
                reason = "parameters are shared with another module"
            if reason is None:
                reason = (
                    self._linear(context, path, module)
                    if kind is nn.Linear
                    else self._conv(context, path, module)
                )
            if reason is not None:
                context.log.add(path, module, self.name, False, reason, "stock")

    def _linear(self, context: Context, path: str, module: nn.Module) -> str | None:
        assert isinstance(module, nn.Linear)
        dtype = _dtype_of(module)
        shape = context.shapes.get(module)
        rows = None if shape is None else shape[:-1].numel()
        n, k = module.out_features, module.in_features
        if context.options.auto_kernel_selection:
            sizes = [rows] if rows is not None else [1, 128]
            choices = [measure_linear(dtype, n, k, m) for m in sizes]
            choice = choices[-1]
        else:
            choice = choose_linear(dtype, n, k, rows)
        if choice.form is None:
            return choice.reason
        swap_class(module, LEAVES[nn.Linear])
        state = attach(module)
        state.packing = choice.form
        state.kernel_op = "linear" if choice.form == "ipex" else None
        kernel = "ipex::linear" if choice.form == "ipex" else "mkldnn::_linear_pointwise"
        context.log.add(path, module, self.name, True, choice.reason, kernel)
        return None

    def _conv(self, context: Context, path: str, module: nn.Module) -> str | None:
        assert isinstance(module, (nn.Conv2d, nn.Conv3d))
        dtype = _dtype_of(module)
        if not onednn.supports(dtype):
            return f"oneDNN has no {dtype_name(dtype)} kernel on this CPU"
        if isinstance(module.padding, str) or module.padding_mode != "zeros":
            return "padding is not a plain number of zeros"
        if module.weight.numel() == 0:
            return "the weight is empty"
        size = context.shapes.get(module)
        if size is None or len(size) != module.weight.dim():
            return "the stock op on a channels-last weight; pass sample_input to try a packed one"
        choice = measure_conv(module, dtype, list(size), context.options.channels_last)
        if choice.form is None:
            return choice.reason
        kind = inn.OptimizedConv2d if isinstance(module, nn.Conv2d) else inn.OptimizedConv3d
        swap_class(module, kind)
        state = attach(module)
        state.packing, state.conv, state.input_size = "mkldnn", conv_arguments(module), list(size)
        kernel = "mkldnn::_convolution_pointwise"
        context.log.add(path, module, self.name, True, choice.reason, kernel)
        return None

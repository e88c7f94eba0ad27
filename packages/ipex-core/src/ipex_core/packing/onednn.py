# SPDX-License-Identifier: Apache-2.0
"""oneDNN ops on prepacked weights, wrapped so that ``torch.compile`` can trace them.

The stock ops (``torch.ops.mkldnn._linear_pointwise`` ...) take an opaque packed weight. Inductor knows them by name and
insists on packing the weight itself, which a weight that is already packed makes impossible. The wrappers have names of
their own, so a compiled graph calls them as they are; eager code calls the stock ops directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ipex_core.kernels.policy import onednn_supports as supports
from ipex_core.library.spec import CHANNELS_LAST, schema_of

__all__ = ["conv", "linear", "supports"]

_LIBRARY = torch.library.Library("ipex_core", "FRAGMENT")

#: Our activation name -> (attr, algorithm) of the oneDNN post-op.
POST_OPS: dict[str, tuple[str, str]] = {
    "none": ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
}


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    post: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """Compute ``post(x @ weight.T + bias)``, or ``x @ weight.T + bias + residual``."""
    # The overloads by name: left to find the right one, torch tries the first and, when that does not fit, formats an
    # error message with all weights in it, which takes milliseconds.
    op: Any = torch.ops.mkldnn._linear_pointwise
    if residual is not None:
        result: Tensor = op.binary(x, residual, weight, bias, "add")
        return result
    attr, algorithm = POST_OPS[post]
    result = op.default(x, weight, bias, attr, [], algorithm)
    return result


def conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    """Convolve with a packed weight."""
    ops: Any = torch.ops.mkldnn
    result: Tensor = ops._convolution_pointwise(
        x, weight, bias, padding, stride, dilation, groups, "none", [], ""
    )
    return result


def _linear_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    post: str,
    residual: Tensor | None,
) -> Tensor:
    return linear(x, weight, bias, post, residual)


def _conv_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    size: list[int],
    padding: list[int],
    stride: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    # The fake kernel has promised this layout.
    return conv(x, weight, bias, padding, stride, dilation, groups).contiguous(
        memory_format=_conv_format(x)
    )


def _conv_format(x: Tensor) -> torch.memory_format:
    last = CHANNELS_LAST.get(x.dim(), torch.contiguous_format)
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, *rest: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _conv_fake(x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
    size, *window, _ = numbers
    space = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, p, s, d in zip(x.shape[2:], size[2:], *window, strict=True)
    ]
    return torch.empty(
        (x.shape[0], size[0], *space), dtype=x.dtype, device=x.device, memory_format=_conv_format(x)
    )


for _name, _kernel, _fake in (
    ("packed_linear", _linear_kernel, _linear_fake),
    ("packed_conv", _conv_kernel, _conv_fake),
):
    _LIBRARY.define(_name + schema_of(_kernel))
    for _key in ("CPU", "MkldnnCPU"):
        _LIBRARY.impl(_name, _kernel, _key)
    torch.library.register_fake(f"ipex_core::{_name}", _fake, lib=_LIBRARY)

# SPDX-License-Identifier: Apache-2.0
"""Second names of normalizations and of the softmax."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op

Tensor = torch.Tensor
_OPS = torch.ops.ipex


def _of_rows(input: Tensor, weight: Tensor) -> bool:
    """Return whether a weight is one that the op takes: a vector in the dtype of the input, or float32."""
    return weight.dim() == 1 and weight.dtype in (input.dtype, torch.float32)


def _times(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of the last dimension times a weight of any shape that broadcasts, rounded once."""
    return (_OPS.rms_norm(input.float(), None, eps) * weight.float()).to(input.dtype)


@alias_op("rmsnorm(Tensor input, Tensor weight, float eps) -> Tensor")
def _rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not _of_rows(input, weight):
        return _times(input, weight, eps)
    return _OPS.rms_norm(input, weight, eps)  # type: ignore[no-any-return]


@alias_op(
    "add_rmsnorm(Tensor input, Tensor(a!) input1, Tensor weight, float eps, bool add_back) -> Tensor"
)
def _add_rmsnorm(
    input: Tensor, input1: Tensor, weight: Tensor, eps: float, add_back: bool
) -> Tensor:
    if _of_rows(input, weight):
        output, total = _OPS.add_rms_norm(input, input1, weight, eps)
    else:
        total = input + input1
        output = _times(total, weight, eps)
    if add_back:
        input1.copy_(total)
    return output  # type: ignore[no-any-return]


@alias_op(
    "add_layernorm(Tensor a, Tensor b, int alpha, int[] normalized_shape, Tensor? weight_opt,"
    " Tensor? bias_opt, float eps) -> Tensor"
)
def _add_layernorm(
    a: Tensor,
    b: Tensor,
    alpha: int,
    normalized_shape: list[int],
    weight_opt: Tensor | None,
    bias_opt: Tensor | None,
    eps: float,
) -> Tensor:
    if list(normalized_shape) != list(a.shape[-1:]):
        total = torch.add(a, b, alpha=alpha)
        return torch.nn.functional.layer_norm(total, normalized_shape, weight_opt, bias_opt, eps)
    scaled = b if alpha == 1 else b * alpha
    return _OPS.add_layer_norm(a, scaled, weight_opt, bias_opt, eps)[0]  # type: ignore[no-any-return]


@alias_op("add_softmax_(Tensor(a!) self, Tensor other) -> Tensor(a!)")
def _add_softmax_(self: Tensor, other: Tensor) -> Tensor:
    return self.copy_(_OPS.softmax(self, other))

# SPDX-License-Identifier: Apache-2.0
"""Second names of the steps of optimizers, of interaction and of merged embedding bags.

An empty ``param2`` of a step stands for none. float64 runs without a kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op
from ipex_core.library.kernels import run_op
from ipex_core.optim.plain import second

_ops = torch.ops.ipex


def _step(name: str, param: Tensor, *args: object) -> None:
    with torch.no_grad():
        run_op(name, param.dtype, param, *args)


def _strided(made: Tensor, like: Tensor) -> Tensor:
    """Return a contiguous result with the strides of an argument, unless elements of that share memory."""
    if made.stride() == like.stride():
        return made
    if like.is_contiguous():  # strides of dimensions of size 1 mean nothing
        return made.as_strided(like.shape, like.stride())
    if any(step == 0 for step, size in zip(like.stride(), like.shape, strict=True) if size > 1):
        return made
    to = torch.empty_strided(like.shape, like.stride(), dtype=made.dtype, device=made.device)
    bits = {2: torch.int16, 4: torch.int32}[made.element_size()]
    to.view(bits).copy_(made.view(bits))  # no conversion
    return to


@alias_op("split_float_bfloat16")
def _split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return both halves, with the strides of the numbers: a step takes them together."""
    top, low = _ops.split_float_bfloat16(tensor)
    return _strided(top, tensor), _strided(low, tensor)


@alias_op("cat_bfloat16_float(Tensor top_half, Tensor bottom_half) -> Tensor")
def _cat(top: Tensor, bottom: Tensor) -> Tensor:
    """Return the numbers, with the strides of ``top``."""
    return _strided(_ops.cat_bfloat16_float(top, bottom), top)


@alias_op("packed_add(Tensor(a!) top, Tensor(b!) bottom, Tensor grad, float alpha) -> Tensor(a!)")
def _packed_add(top: Tensor, bottom: Tensor, grad: Tensor, alpha: float) -> Tensor:
    with torch.no_grad():
        value = _ops.cat_bfloat16_float(top, bottom)
        value.add_(grad.to(torch.float32), alpha=alpha)
        upper, lower = _ops.split_float_bfloat16(value)
        top.copy_(upper)
        bottom.view(torch.int16).copy_(lower.view(torch.int16))  # bits: no conversion
    return top


@alias_op("sync_master_weight_to_bf16(Tensor master_weight, Tensor(a!) bf16_weight) -> ()")
@alias_op("sync_master_weight_to_fp16(Tensor master_weight, Tensor(a!) fp16_weight) -> ()")
def _sync(master: Tensor, low: Tensor) -> None:
    with torch.no_grad():
        low.copy_(master)


@alias_op(
    "adagrad_fused_step(Tensor(a!) param, Tensor grad, Tensor(b!) state_sum, Tensor(c!) param2,"
    " float step, float lr, float weight_decay, float lr_decay, float eps)"
    " -> (Tensor(a!), Tensor(b!))"
)
def _adagrad(
    param: Tensor, grad: Tensor, state_sum: Tensor, param2: Tensor, *rest: float
) -> tuple[Tensor, Tensor]:
    _step("adagrad_fused_step", param, grad, state_sum, second(param, param2), *rest)
    return param, state_sum


@alias_op(
    "adam_fused_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor(d!) max_exp_avg_sq, Tensor grad, Tensor(e!) param2, bool amsgrad, float step,"
    " float beta1, float beta2, float lr, float weight_decay, float eps) -> ()"
)
def _adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    largest: Tensor,
    grad: Tensor,
    param2: Tensor,
    amsgrad: bool,
    *rest: float,
) -> None:
    states = (exp_avg, exp_avg_sq, largest if amsgrad else None)
    _step("adam_fused_step", param, *states, grad, second(param, param2), amsgrad, *rest)


@alias_op(
    "lamb_fused_step(Tensor(a!) param, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor grad,"
    " Tensor(d!) param2, int step, float beta1, float beta2, float lr, float weight_decay,"
    " float eps) -> (Tensor(a!), Tensor(b!), Tensor(c!))"
)
def _lamb(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    param2: Tensor,
    step: int,
    *rest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    _step("lamb_fused_step", param, exp_avg, exp_avg_sq, grad, second(param, param2), step, *rest)
    return param, exp_avg, exp_avg_sq


def _buffer(param: Tensor, buffer: Tensor | None, momentum: float) -> tuple[Tensor | None, bool]:
    if not momentum:
        return None, False
    if buffer is None:
        wide = torch.float64 if param.dtype == torch.float64 else torch.float32
        return torch.zeros_like(param, dtype=wide), True
    return buffer, False


@alias_op(
    "sgd_fused_step(Tensor(a!) param, Tensor grad, Tensor? momentum_buf, Tensor(c!) param2,"
    " float momentum, float lr, float weight_decay, float dampening, bool nesterov) -> Tensor?"
)
def _sgd(
    param: Tensor,
    grad: Tensor,
    momentum_buf: Tensor | None,
    param2: Tensor,
    momentum: float,
    lr: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> Tensor | None:
    buffer, first = _buffer(param, momentum_buf, momentum)
    rest = (momentum, lr, weight_decay, dampening, nesterov, first)
    _step("sgd_fused_step", param, grad, buffer, second(param, param2), *rest)
    return buffer


@alias_op(
    "lars_fused_step(Tensor(a!) param, Tensor grad, Tensor? momentum_buf, Tensor(c!) param2,"
    " float momentum, float lr, float eeta, float eps, float weight_decay, float dampening,"
    " bool nesterov) -> Tensor?"
)
def _lars(
    param: Tensor,
    grad: Tensor,
    momentum_buf: Tensor | None,
    param2: Tensor,
    momentum: float,
    lr: float,
    eeta: float,
    eps: float,
    weight_decay: float,
    dampening: float,
    nesterov: bool,
) -> Tensor | None:
    buffer, first = _buffer(param, momentum_buf, momentum)
    rest = (momentum, lr, eeta, eps, weight_decay, dampening, nesterov, first)
    _step("lars_fused_step", param, grad, buffer, second(param, param2), *rest)
    return buffer


# -- Interaction and merged embedding bags ----------------------------------------------------------------------------


_MODES = ("sum", "mean")
_LOOKUPS = "Tensor[] index, Tensor[] offsets, int pooling_mode, bool include_last"


def _mode(number: int) -> str:
    return _MODES[number] if number in (0, 1) else str(number)


@alias_op("interaction_forward(Tensor[] input) -> Tensor")
def _interaction(tensors: list[Tensor]) -> Tensor:
    dtype = tensors[0].dtype if tensors else torch.float32
    result: Tensor = run_op("interaction", dtype, tensors)
    return result


@alias_op("interaction_backward(Tensor grad_out, Tensor[] input) -> Tensor[]")
def _interaction_backward(grad: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(run_op("interaction_backward", grad.dtype, grad, tensors).unbind(0))


@alias_op(
    "merged_embeddingbag_forward(Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "int pooling_mode, bool include_last_offsets) -> Tensor[]"
)
def _forward(
    weights: list[Tensor], indices: list[Tensor], offsets: list[Tensor], mode: int, last: bool
) -> list[Tensor]:
    bags = _ops.merged_embeddingbag_forward(weights, indices, offsets, [], _mode(mode), last)
    return list(bags.unbind(0))


@alias_op(
    "embedding_bag(Tensor weight, Tensor indices, Tensor offsets, bool sparse, "
    "bool include_last_offset) -> Tensor"
)
def _embedding_bag(
    weight: Tensor, indices: Tensor, offsets: Tensor, sparse: bool, last: bool
) -> Tensor:
    if torch.is_grad_enabled() and weight.requires_grad:
        return torch.nn.functional.embedding_bag(
            indices, weight, offsets, mode="sum", sparse=sparse, include_last_offset=last
        )
    bags: Tensor = _ops.merged_embeddingbag_forward([weight], [indices], [offsets], [], "sum", last)
    return bags[0]


@alias_op(
    "merged_embeddingbag_backward_cpu(Tensor[] grad, Tensor[] weight, Tensor[] index, "
    "Tensor[] offsets, int pooling_mode, bool include_last_offsets) -> Tensor[]"
)
def _backward(
    grad: list[Tensor],
    weight: list[Tensor],
    index: list[Tensor],
    offsets: list[Tensor],
    mode: int,
    last: bool,
) -> list[Tensor]:
    # A step of SGD from zeros, against the gradient.
    made = [torch.zeros_like(w, memory_format=torch.contiguous_format) for w in weight]
    none = [torch.empty(0, dtype=torch.bfloat16) for _ in weight]
    _ops.merged_embeddingbag_sgd(grad, made, none, index, offsets, [], _mode(mode), last, -1.0, 0.0)
    return made


@alias_op("merged_embeddingbag_cat_forward")
def _cat_grads(
    weights: list[Tensor], indices: list[Tensor], offsets: list[Tensor], dense: Tensor
) -> Tensor:
    result: Tensor = _ops.merged_embeddingbag_cat_forward(
        weights, indices, offsets, dense, "sum", False
    )
    return result


@alias_op(
    f"merged_embeddingbag_backward_sgd(Tensor[] grad, Tensor(a!)[] weight, {_LOOKUPS}, "
    "Tensor(b!)[] bf16_trail, float weight_decay, float lr) -> ()"
)
def _merged_sgd(
    grad: list[Tensor],
    weight: list[Tensor],
    index: list[Tensor],
    offsets: list[Tensor],
    mode: int,
    last: bool,
    trail: list[Tensor],
    weight_decay: float,
    lr: float,
) -> None:
    _ops.merged_embeddingbag_sgd(
        grad, weight, trail, index, offsets, [], _mode(mode), last, lr, weight_decay
    )


@alias_op(
    f"merged_embeddingbag_backward_adagrad(Tensor[] grad, Tensor(a!)[] weight, {_LOOKUPS}, "
    "Tensor(b!)[] hessian, Tensor(c!)[] bf16_trail, float eps, float lr) -> ()"
)
def _merged_adagrad(
    grad: list[Tensor],
    weight: list[Tensor],
    index: list[Tensor],
    offsets: list[Tensor],
    mode: int,
    last: bool,
    hessian: list[Tensor],
    trail: list[Tensor],
    eps: float,
    lr: float,
) -> None:
    _ops.merged_embeddingbag_adagrad(
        grad, weight, trail, hessian, index, offsets, [], _mode(mode), last, lr, eps
    )

# SPDX-License-Identifier: Apache-2.0
"""Second names of interaction and merged embedding bags."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op

Tensor = torch.Tensor

_ops = torch.ops.ipex
_MODES = ("sum", "mean")
_LOOKUPS = "Tensor[] index, Tensor[] offsets, int pooling_mode, bool include_last"


def _mode(number: int) -> str:
    return _MODES[number] if number in (0, 1) else str(number)


@alias_op("interaction_forward(Tensor[] input) -> Tensor")
def _interaction(tensors: list[Tensor]) -> Tensor:
    result: Tensor = _ops.interaction(tensors)
    return result


@alias_op("interaction_backward(Tensor grad_out, Tensor[] input) -> Tensor[]")
def _interaction_backward(grad: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    return list(_ops.interaction_backward(grad, tensors).unbind(0))


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


@alias_op(
    "merged_embeddingbag_cat_forward(Tensor[] weights, Tensor[] indices, Tensor[] offsets, "
    "Tensor dense) -> Tensor"
)
def _cat(
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
def _sgd(
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
def _adagrad(
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

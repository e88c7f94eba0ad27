# SPDX-License-Identifier: Apache-2.0
"""Cuts a rank's part out of weights, in place, one module at a time."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_llm.arch.types import ExpertsPlan, LinearPlan

__all__ = ["cut_columns", "cut_experts", "cut_rows", "features_in", "features_out"]

Tensor = torch.Tensor


def _weight(module: nn.Module) -> nn.Parameter:
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        raise OpArgumentError(
            f"optimize: model must have floating point weights, got a {type(module).__name__} without:"
            " shard first and quantize then, or load a checkpoint that is sharded itself"
            " (ipex.llm.utils.load_low_precision_checkpoint)"
        )
    return weight


def features_out(module: nn.Module, transposed: bool) -> int:
    """Return the number of output features of a linear layer."""
    return int(_weight(module).shape[1 if transposed else 0])


def features_in(plan: LinearPlan) -> int:
    """Return the number of input features of a linear layer."""
    return int(_weight(plan.modules[0]).shape[0 if plan.transposed else 1])


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    old = module._parameters[name]
    grad = old is not None and old.requires_grad
    module._parameters[name] = nn.Parameter(value, requires_grad=grad)


def _resize(module: nn.Module, *, out: int | None = None, into: int | None = None) -> None:
    for names, value in ((("out_features", "nf"), out), (("in_features", "nx"), into)):
        for name in names:
            if value is not None and name in module.__dict__:
                setattr(module, name, value)


@torch.no_grad()
def cut_rows(plan: LinearPlan, keep: Tensor, *, view: bool = False) -> LinearPlan:
    """Keep some output features of a linear layer.

    Args:
        plan: The layer.
        keep: Their indices in the expected order, int64 ``[n]``.
        view: Leave the weights where they are (they are shared with another module) if rows are consecutive.

    Returns:
        The plan of what is left. Rows of a module keep their order, so that a forward that knows of an interleaving
        finds it.
    """
    actual = keep if plan.order is None else plan.order.to(keep.device)[keep]
    rows, place = actual.sort()
    order = place.argsort()
    start = 0
    for module in plan.modules:
        size = features_out(module, plan.transposed)
        index = rows[(rows >= start) & (rows < start + size)] - start
        start += size
        weight = _weight(module)
        dim = 1 if plan.transposed else 0
        first, count = (int(index[0]), len(index)) if len(index) else (0, 0)
        if view and bool((index == torch.arange(first, first + count)).all()):
            part = weight.detach().narrow(dim, first, count)
        else:
            part = weight.detach().index_select(dim, index.to(weight.device)).contiguous()
        _set(module, "weight", part)
        bias = module._parameters.get("bias")
        if bias is not None:
            _set(module, "bias", bias.detach()[index.to(bias.device)])
        _resize(module, out=count)
    ascending = bool((order == torch.arange(len(order))).all())
    return dataclasses.replace(plan, order=None if ascending else order)


@torch.no_grad()
def cut_columns(plan: LinearPlan, first: int, last: int, *, bias: bool) -> None:
    """Keep the input features ``[first, last)`` of a linear layer, and its bias only if ``bias``.

    The parts are summed over the ranks, so one of them brings the bias.
    """
    (module,) = plan.modules
    weight = _weight(module)
    dim = 0 if plan.transposed else 1
    _set(module, "weight", weight.detach().narrow(dim, first, last - first).clone())
    old = module._parameters.get("bias")
    if old is not None and not bias:
        if plan.transposed:  # Conv1D computes with a bias always
            _set(module, "bias", torch.zeros_like(old))
        else:
            module._parameters["bias"] = None
    _resize(module, into=last - first)


@torch.no_grad()
def cut_experts(plan: ExpertsPlan, first: int, last: int, *, bias: bool) -> ExpertsPlan:
    """Keep inner features ``[first, last)`` of all experts (stacked weights), and down biases only if ``bias``."""
    assert isinstance(plan.gate_up, Tensor) and isinstance(plan.down, Tensor)
    size = plan.intermediate_size
    inside = torch.arange(first, last)
    if plan.interleaved:
        both = torch.stack([2 * inside, 2 * inside + 1], dim=1).flatten()
    else:
        both = torch.cat([inside, size + inside])
    owners = {
        id(p): (module, name)
        for module in plan.module.modules()
        for name, p in module._parameters.items()
    }

    def replaced(old: Tensor | None, index: Tensor | None, dim: int) -> Tensor | None:
        if old is None:
            return None
        if id(old) not in owners:
            raise OpArgumentError(
                "optimize: the weights of experts must be parameters of their module,"
                f" got a {type(old).__name__} of shape {tuple(old.shape)}"
            )
        module, name = owners[id(old)]
        value = torch.zeros_like(old) if index is None else old.detach().index_select(dim, index)
        _set(module, name, value)
        return module._parameters[name]

    up, down = (2, 1) if plan.transposed else (1, 2)
    gate_up = replaced(plan.gate_up, both, up)
    result = replaced(plan.down, inside, down)
    down_bias = plan.down_bias if bias else replaced(plan.down_bias, None, 0)
    assert gate_up is not None and result is not None
    return dataclasses.replace(
        plan,
        gate_up=gate_up,
        down=result,
        gate_up_bias=replaced(plan.gate_up_bias, both, 1),
        down_bias=down_bias,
        intermediate_size=last - first,
    )

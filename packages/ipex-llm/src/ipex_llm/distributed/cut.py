# SPDX-License-Identifier: Apache-2.0
"""A rank's part: which heads and features it gets, and how they are cut out of weights, in place, module by module."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_llm.arch import ExpertsPlan, LinearPlan
from ipex_llm.distributed.checkpoint import split_range, split_sizes

#: Features that should stay together: kernels work on so many columns at a time.
GRAINS = (64, 32, 8, 1)


@dataclasses.dataclass(frozen=True, slots=True)
class HeadRange:
    """Heads of a rank: query heads ``[query, query_end)``, and key/value heads likewise."""

    query: int
    query_end: int
    kv: int
    kv_end: int

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.query_end - self.query

    @property
    def kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_end - self.kv


def split_heads(heads: int, kv_heads: int, rank: int, ranks: int) -> HeadRange:
    """Return the heads of a rank.

    A rank has whole groups (a key/value head with its query heads), the first ranks one more where they do not divide.
    If there are more ranks than groups, several ranks have the same key/value head and parts of its query heads:
    8 heads in 2 groups on 3 ranks are 4, 2 and 2.

    Raises:
        ValueError: There are fewer heads than ranks, so that one would have none; or groups are not alike.

    Example:
        >>> [split_heads(8, 4, rank, 3).heads for rank in range(3)]
        [4, 2, 2]
    """
    if heads % kv_heads:
        raise OpArgumentError(
            f"optimize: heads must be a multiple of kv_heads = {kv_heads}, got {heads}"
        )
    if ranks > heads:
        raise OpArgumentError(
            f"optimize: tp_group must have at most as many ranks as the model has heads = {heads}, got {ranks}:"
            " a head cannot be divided"
        )
    group = heads // kv_heads
    if ranks <= kv_heads:
        first, last = split_range(kv_heads, rank, ranks)
        return HeadRange(first * group, last * group, first, last)
    # Ranks of each group; the first groups have fewer, so that the first ranks have more, as above.
    sharing = sorted(split_sizes(ranks, kv_heads))
    for kv, members in enumerate(sharing):
        if rank < members:
            first, last = split_range(group, rank, members)
            if first == last:
                break
            return HeadRange(kv * group + first, kv * group + last, kv, kv + 1)
        rank -= members
    raise OpArgumentError(
        f"optimize: tp_group must leave a query head to each rank, got {ranks} ranks for {kv_heads} key/value heads"
        f" with {group} query heads each"
    )


def split_features(
    size: int, rank: int, ranks: int, what: str, grains: Sequence[int] = GRAINS
) -> tuple[int, int]:
    """Return the first feature of a rank and the one after its last.

    Args:
        size: Number of features.
        rank: The rank.
        ranks: Number of ranks.
        what: What has these features, for the message.
        grains: Numbers of features that stay together; the first that leaves a piece for each rank is taken.

    Raises:
        ValueError: No grain leaves a piece for each rank.

    Example:
        >>> split_features(96, 0, 2, "mlp"), split_features(96, 1, 2, "mlp")
        ((0, 64), (64, 96))
    """
    for grain in grains:
        if size % grain == 0 and size // grain >= ranks:
            first, last = split_range(size // grain, rank, ranks)
            return first * grain, last * grain
    raise OpArgumentError(
        f"optimize: tp_group must have at most as many ranks as {what} has pieces, got {ranks} ranks for {size}"
        f" features in pieces of {grains[-1]}"
    )


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

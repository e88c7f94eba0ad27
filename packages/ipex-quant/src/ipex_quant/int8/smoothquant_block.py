# SPDX-License-Identifier: Apache-2.0
"""Block-wise choice of alpha: one for all layers of a block, by the error of what the block returns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ipex_quant.int8.boundary import Scale
from ipex_quant.int8.dataflow import _tensors
from ipex_quant.int8.plan import Layer
from ipex_quant.int8.smoothquant import rounded, rounded_weight, smooth_group
from ipex_quant.weight_only.calibrate import stacks

__all__ = ["BlockWatch", "Group", "best_of_block", "blocks_to_watch"]

Tensor = torch.Tensor

#: Calls of a block that are kept.
_CALLS = 2


@dataclasses.dataclass
class BlockWatch:
    """Keeps what a block is called with first.

    Attributes:
        calls: Positional and keyword arguments.
        enabled: Whether it keeps any.
    """

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = dataclasses.field(default_factory=list)
    enabled: bool = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a call."""
        if self.enabled and len(self.calls) < _CALLS:
            self.calls.append(tree_map(_copy, (args, kwargs)))


@dataclasses.dataclass
class Group:
    """Layers that share channel scales, and how these follow from alpha."""

    layers: Sequence[Layer]
    scales: Callable[[float | None], tuple[Tensor, Scale]]

    @staticmethod
    def of(model: nn.Module, layers: Sequence[Layer], watch: Any) -> Group:
        """Return the group of some layers of a model that read the value of a watch."""
        weights: list[Any] = [model.get_submodule(layer.path).weight for layer in layers]
        first = layers[0]
        scales = functools.partial(smooth_group, first.qconfig, watch, weights, first.path)
        return Group(layers, scales)


def blocks_to_watch(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """Return the entries of the model's outermost lists that have layers whose alpha depends on their block."""
    paths = [it.path for it in layers if _by_block(it)]
    entries = [name for stack in stacks(model) for name, _ in stack]
    return [name for name in entries if any(_inside(path, name) for path in paths)]


def best_of_block(
    model: nn.Module, name: str, watch: BlockWatch, groups: Sequence[Group]
) -> dict[str, float]:
    """Return by path the alpha of the layers of a block; nothing if the block was not called."""
    inside = [
        group
        for group in groups
        if all(_by_block(it) and _inside(it.path, name) for it in group.layers)
    ]
    if not inside or not watch.calls:
        return {}
    block = model.get_submodule(name)
    auto = inside[0].layers[0].qconfig.auto
    with torch.no_grad():
        expected = [_first(block(*args, **kwargs)) for args, kwargs in watch.calls]
        best, least = auto.init_alpha, float("inf")
        for alpha in auto.grid():
            error = 0.0
            with _rounding(model, inside, alpha):
                for (args, kwargs), wanted in zip(watch.calls, expected, strict=True):
                    found = _first(block(*args, **kwargs))
                    error += (found - wanted).double().square().sum().item()
            if error < least:
                best, least = alpha, error
    return {layer.path: best for group in inside for layer in group.layers}


@contextlib.contextmanager
def _rounding(model: nn.Module, groups: Sequence[Group], alpha: float) -> Iterator[None]:
    """Let the layers compute with what their codes would stand for."""
    handles = []
    try:
        for group in groups:
            factor, scale = group.scales(alpha)
            for layer in group.layers:
                module: Any = model.get_submodule(layer.path)
                weight = rounded_weight(module.weight.float() / factor)
                hook = functools.partial(_product, factor, scale, weight)
                handles.append(module.register_forward_hook(hook))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _product(
    factor: Tensor, scale: Scale, weight: Tensor, module: Any, args: Any, result: Tensor
) -> Tensor:
    x = rounded(args[0].float() * factor, scale)
    bias = None if module.bias is None else module.bias.float()
    return nn.functional.linear(x, weight, bias).to(result.dtype)


def _by_block(layer: Layer) -> bool:
    if not layer.smooth or layer.qconfig.alpha_of(layer.path) != "auto":
        return False
    return bool(layer.qconfig.auto.enable_blockwise_loss)


def _inside(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _first(output: Any) -> Tensor:
    return next(iter(_tensors(output))).float()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

# SPDX-License-Identifier: Apache-2.0
"""Folding of inference batch norms into the convolution or linear layer before them.

Which layer feeds which batch norm is read from symbolic traces. A trace is only looked at, never run, so a model that
cannot be traced as a whole is traced part by part.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from ipex_core.fusion.eager_fx.trace import release, untouched
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.state_dict import attach, swap_class
from ipex_core.nn.layers import (
    FoldedBatchNorm1d,
    FoldedBatchNorm2d,
    FoldedBatchNorm3d,
    scale_and_shift,
)
from ipex_core.optimization.passes.base import Context, Pass, swap_reason
from ipex_core.util.symbolic import Tracer

__all__ = ["ConvBatchNorm", "LinearBatchNorm"]

_FOLDED: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FoldedBatchNorm1d,
    nn.BatchNorm2d: FoldedBatchNorm2d,
    nn.BatchNorm3d: FoldedBatchNorm3d,
}
_CONVS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
}
_LINEAR: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: nn.BatchNorm1d}

_Pairs = list[tuple[str, nn.Module, str, nn.Module]]


def adjacent(
    root: nn.Module, first: dict[type[nn.Module], type[nn.Module]], prefix: str = ""
) -> _Pairs:
    """Return ``(path, layer, path, batch norm)`` for every layer whose only consumer is a batch norm."""
    if not any(type(m) in _FOLDED for m in root.modules()):
        return []
    tracer = Tracer()
    try:
        with untouched(root, strict=False):
            graph = tracer.trace(root)
    except Exception:
        pairs: _Pairs = []
        for name, child in root.named_children():
            pairs += adjacent(child, first, f"{prefix}{name}.")
        return pairs
    finally:
        release(tracer)
    modules = dict(root.named_modules(remove_duplicate=False))
    calls = Counter(id(modules[str(n.target)]) for n in graph.nodes if n.op == "call_module")
    pairs = []
    for node in graph.nodes:
        if node.op != "call_module" or len(node.all_input_nodes) != 1:
            continue
        norm, source = modules[str(node.target)], node.all_input_nodes[0]
        if type(norm) not in _FOLDED or source.op != "call_module":
            continue
        layer = modules[str(source.target)]
        alone = len(source.users) == 1 and calls[id(layer)] == 1 and calls[id(norm)] == 1
        if first.get(type(layer)) is type(norm) and alone:
            pairs.append((f"{prefix}{source.target}", layer, f"{prefix}{node.target}", norm))
    return pairs


def _reason(context: Context, layer: nn.Module, norm: nn.Module) -> str | None:
    """Return why a pair cannot be folded."""
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    for module in (layer, norm):
        reason = swap_reason(module)
        if reason is not None:
            return reason
        if has_hooks(module):
            return "a hook would see other values"
        if context.shared(module):
            return "parameters are shared with another module"
        if len(context.paths[id(module)]) > 1:
            return "the module is used in several places"
    if norm.running_mean is None or norm.running_var is None:
        return "the batch norm has no running statistics"
    if norm.training:
        return "the batch norm is in training mode"
    if norm.num_features != _features(layer):
        return "the batch norm has another number of channels"
    return None


def _features(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    assert isinstance(layer, nn.modules.conv._ConvNd)
    return layer.out_channels


def _fold(context: Context, step: str, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
    for path, layer, norm_path, norm in adjacent(context.model, kinds):
        if id(layer) in context.old or id(norm) in context.old:
            continue
        reason = _reason(context, layer, norm)
        scale, shift = scale_and_shift(norm) if reason is None else (None, None)
        if scale is not None and isinstance(layer, nn.Linear) and bool((scale == 0).any()):
            reason = "a scale of the batch norm is zero"
        if reason is not None or scale is None or shift is None:
            context.log.add(norm_path, norm, step, False, f"not folded into {path}: {reason}")
            continue
        attach(layer).fold = (scale, shift)
        swap_class(norm, _FOLDED[type(norm)])
        norm.__dict__["_folded_into"] = layer
        context.log.add(path, layer, step, True, f"holds {norm_path}; its float32 original is kept")
        context.log.add(norm_path, norm, step, True, f"folded into {path}", "none (identity)")


class ConvBatchNorm(Pass):
    """Fold batch norms into convolutions."""

    name = "conv_bn_folding"

    def applies(self, context: Context) -> bool:
        """Return the knob."""
        return context.options.conv_bn_folding

    def apply(self, context: Context) -> None:
        """Plan the fold."""
        _fold(context, self.name, _CONVS)


class LinearBatchNorm(Pass):
    """Fold batch norms into linear layers."""

    name = "linear_bn_folding"

    def applies(self, context: Context) -> bool:
        """Return the knob."""
        return context.options.linear_bn_folding

    def apply(self, context: Context) -> None:
        """Plan the fold."""
        _fold(context, self.name, _LINEAR)

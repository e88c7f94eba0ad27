# SPDX-License-Identifier: Apache-2.0
"""Passes that join layers: batch normalization into the layer before it, and patterns of several modules."""

from __future__ import annotations

from collections import Counter

from torch import fx, nn

from ipex_core.fusion.eager_fx import (
    Rewriter,
    find_rms_norm,
    guards_of,
    merge_by_source,
    reason_against,
    release,
    trace,
    untouched,
)
from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.forward import FusedForward, Guard, generate
from ipex_core.module_swap.state_dict import attach, swap_class
from ipex_core.nn.layers import (
    FoldedBatchNorm1d,
    FoldedBatchNorm2d,
    FoldedBatchNorm3d,
    scale_and_shift,
)
from ipex_core.optimization.passes import Context, Pass, swap_reason
from ipex_core.optimization.records import Log
from ipex_core.util.symbolic import Recordings, Tracer

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
    knob = "conv_bn_folding"

    def apply(self, context: Context) -> None:
        """Plan the fold."""
        _fold(context, self.name, _CONVS)


class LinearBatchNorm(Pass):
    """Fold batch norms into linear layers."""

    name = "linear_bn_folding"
    knob = "linear_bn_folding"

    def apply(self, context: Context) -> None:
        """Plan the fold."""
        _fold(context, self.name, _LINEAR)


# --- fusion -----------------------------------------------------------------------------------------------------------


def install(
    module: nn.Module,
    graph: fx.Graph,
    names: list[str],
    children: list[str],
    guards: tuple[Guard, ...],
) -> str | None:
    """Generate the code of a graph and put it in front of the class's forward; return why not, or None."""
    source, imports = generate(graph)
    if imports is None:
        return "the forward uses something that has no importable name"
    used = tuple((name, module._modules[name]) for name in sorted(set(children)))
    pairs = tuple((name, child) for name, child in used if child is not None)
    module.__dict__["forward"] = FusedForward(module, source, imports, tuple(names), pairs, guards)
    return None


class Fuse(Pass):
    """Fuse what the ops can compute together."""

    name = "fuse"

    def applies(self, context: Context) -> bool:
        """Return whether the level asks for fusion."""
        return context.options.level == "O1" or context.options.concat_linear

    def apply(self, context: Context) -> None:
        """Rewrite the forward of each module in which something matches."""
        recordings: Recordings = {}
        for path, module in context.modules():
            library = type(module).__module__.startswith(("torch.nn", "ipex_core.nn"))
            # A layer with `fused` is one op, and may pack its weight when it is traced.
            done = hasattr(type(module), "fused") or "forward" in module.__dict__
            if done or (library and type(module) is not nn.Sequential):
                continue
            self._module(context, path, module, recordings)

    def _module(
        self, context: Context, path: str, module: nn.Module, recordings: Recordings
    ) -> None:
        try:
            graph, names, entered = trace(module, recordings)
        except Exception as error:
            if any(isinstance(c, (nn.Linear, nn.LayerNorm)) for c in module.children()):
                first = (str(error).splitlines() or [type(error).__name__])[0]
                text = f"the forward cannot be traced: {first[:100]}"
                context.log.add(path, module, self.name, False, text)
                if context.options.concat_linear:
                    self._merge(context, path, module)
            return
        reason = reason_against(module, graph, entered)
        if reason is not None:
            if any(isinstance(c, (nn.Linear, nn.LayerNorm)) for c in module.children()):
                context.log.add(path, module, self.name, False, reason)
            return
        norm = find_rms_norm(module, graph)
        if norm is not None:
            if not has_kernel("rms_norm"):
                text = "an RMS norm, but no kernel package implements rms_norm"
                context.log.add(path, module, self.name, False, text)
                return
            graph, done = norm, ["ipex::rms_norm"]
            children: list[str] = []
        else:
            options = context.options
            rewriter = Rewriter(
                graph,
                module,
                remove_dropout=options.replace_dropout_with_identity,
                concat_linear=options.concat_linear,
                fuse=options.level != "O0",
            )
            done, children = rewriter.run()
        if not done:
            return
        reason = install(module, graph, names, children, guards_of(module, entered, children))
        text = "fused: " + ", ".join(done) if reason is None else reason
        context.log.add(path, module, self.name, reason is None, text, ", ".join(done))

    def _merge(self, context: Context, path: str, module: nn.Module) -> None:
        groups, reason = merge_by_source(module)
        for names in groups:
            text = f"{', '.join(names)} computed as one layer"
            context.log.add(path, module, "concat_linear", True, text)
        if reason is not None and sum(isinstance(c, nn.Linear) for c in module.children()) > 1:
            context.log.add(path, module, "concat_linear", False, reason)

    def undo(self, model: nn.Module, log: Log) -> None:
        """Remove the rewritten forwards."""
        for module in model.modules():
            if isinstance(module.__dict__.get("forward"), FusedForward):
                del module.__dict__["forward"]

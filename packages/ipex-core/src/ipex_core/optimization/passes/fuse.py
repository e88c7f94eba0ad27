# SPDX-License-Identifier: Apache-2.0
"""Fusion inside one module: its forward is traced with its children as leaves, matched, and regenerated.

Structure is matched, not class names. The rewritten forward is installed on the instance; the class, the children and
their names stay. A forward that cannot be traced is left alone.
"""

from __future__ import annotations

from torch import fx, nn

from ipex_core.fusion.eager_fx.concat import merge_by_source
from ipex_core.fusion.eager_fx.patterns import Rewriter, find_rms_norm
from ipex_core.fusion.eager_fx.trace import guards_of, reason_against, trace
from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.forward import FusedForward, Guard, generate
from ipex_core.optimization.passes.base import Context, Pass
from ipex_core.optimization.records import Log

__all__ = ["Fuse", "install"]


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
        for path, module in context.modules():
            library = type(module).__module__.startswith(("torch.nn", "ipex_core.nn"))
            if (library and type(module) is not nn.Sequential) or "forward" in module.__dict__:
                continue
            self._module(context, path, module)

    def _module(self, context: Context, path: str, module: nn.Module) -> None:
        try:
            graph, names, entered = trace(module)
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

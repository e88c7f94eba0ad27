# SPDX-License-Identifier: Apache-2.0
"""Running all passes on one graph, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx

from ipex_core._compile._graph import Context
from ipex_core._compile._report import GraphReport
from ipex_core._compile.attention import fuse_attention
from ipex_core._compile.linear import fuse_gated, fuse_post_ops, pack_linears
from ipex_core._compile.norms import fuse_add_norms, fuse_norms
from ipex_core._compile.rotary import fuse_rotary

__all__ = ["PATTERNS", "frozen_placeholders", "run_passes"]

#: Pattern name -> what does it. The order matters: attention before what its inputs are made of; layers before what
#: follows them; an addition goes into the layer before it rather than into the norm behind it.
_STEPS: tuple[tuple[tuple[str, ...], Callable[[Context], None]], ...] = (
    (("attention",), fuse_attention),
    (("rotary",), fuse_rotary),
    (("rms_norm", "layer_norm"), fuse_norms),
    (("linear",), pack_linears),
    (("gated",), fuse_gated),
    (("post_op",), fuse_post_ops),
    (("add_norm",), fuse_add_norms),
)

#: Names of all patterns.
PATTERNS = tuple(name for names, _ in _STEPS for name in names)


def run_passes(
    graph: fx.Graph,
    report: GraphReport,
    constants: Iterable[fx.Node] = (),
    disabled: Iterable[str] = (),
    always: bool = False,
    kernels: Callable[[str], bool] | None = None,
) -> int:
    """Apply all patterns to a graph of ATen ops.

    Args:
        graph: A functional graph whose nodes carry their fake results.
        report: Collects the decisions.
        constants: The placeholders that become constants.
        disabled: Names of patterns to leave out.
        always: Leave the tables of measured speed aside.
        kernels: Tells whether an op has a native kernel; None asks the installed kernel package.

    Returns:
        How many places were changed.
    """
    if kernels is None:
        from ipex_core.nn._leaf import has_kernel

        kernels = has_kernel
    before = report.count()
    graph.eliminate_dead_code()
    ctx = Context(graph, set(constants), report, always, frozenset(disabled), kernels)
    for names, step in _STEPS:
        if not ctx.disabled.issuperset(names):
            step(ctx)
    graph.eliminate_dead_code()
    return report.count() - before


def frozen_placeholders(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders that Inductor's freezing is about to replace by constants.

    They are the parameters in front, without those that the graph writes to or returns.
    """
    from torch._functorch._aot_autograd.schemas import MutationType
    from torch._guards import TracingContext

    context: Any = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return set()
    parameters = context.params_flat_unwrap_subclasses or ()
    metadata = context.fw_metadata
    kept = {o.base_idx for o in metadata.output_info if o.base_idx is not None}
    written = (MutationType.MUTATED_IN_GRAPH, MutationType.MUTATED_OUT_GRAPH)
    kept |= {i for i, info in enumerate(metadata.input_info) if info.mutation_type in written}
    placeholders = graph.find_nodes(op="placeholder")
    return {
        node
        for i, (node, value) in enumerate(zip(placeholders, parameters, strict=False))
        if i not in kept and isinstance(value, torch.Tensor)
    }

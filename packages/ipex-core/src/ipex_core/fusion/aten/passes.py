# SPDX-License-Identifier: Apache-2.0
"""The list of graph passes, and recurrent layers, which run as they are."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import CASTS, Context, is_call, same, shape_of, val
from ipex_core.fusion.aten.attention import fuse_attention
from ipex_core.fusion.aten.experts import fuse_routing
from ipex_core.fusion.aten.linear import fuse_gated, fuse_post_ops, pack_linears, unpack_linears
from ipex_core.fusion.aten.merge import merge_bags, merge_linears
from ipex_core.fusion.aten.norm_rotary import fuse_add_norms, fuse_norms, fuse_rotary
from ipex_core.fusion.aten.woq import fuse_woq
from ipex_core.library.spec import FLOATS

_LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


def has_recurrent(gm: fx.GraphModule) -> bool:
    """Whether a graph of Dynamo calls a recurrent layer."""
    return any(node.target in _LAYERS for node in gm.graph.nodes)


def compile_around_recurrent(
    gm: fx.GraphModule, backend: Callable[..., Any]
) -> tuple[fx.GraphModule, int]:
    """Cut a graph at its recurrent layers.

    Args:
        gm: A graph of Dynamo.
        backend: Compiles one part of it.

    Returns:
        A module that does the same, whose other parts are compiled when they first run, and how many parts those are.
    """
    from torch.fx.passes.split_module import split_module

    part_of = _parts(gm.graph)
    # The second argument is for parameters, which a graph of Dynamo takes as inputs.
    whole = split_module(gm, None, part_of.__getitem__)  # type: ignore[arg-type]
    others = {
        name: part
        for name, part in whole.named_children()
        if isinstance(part, fx.GraphModule) and not has_recurrent(part)
    }
    for name, part in others.items():
        setattr(whole, name, _Compiled(part, backend))
    return whole, len(others)


class _Compiled(torch.nn.Module):
    """A part that is compiled when it first runs, and again if then a size varies."""

    def __init__(self, part: fx.GraphModule, backend: Callable[..., Any]) -> None:
        super().__init__()

        def run(*args: Any) -> Any:
            return part(*args)

        # Dynamo counts compilations by code object, of which all parts would share one.
        run.__code__ = run.__code__.replace()
        self._run = torch.compile(run, backend=backend)

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def _parts(graph: fx.Graph) -> dict[fx.Node, int]:
    """Number the parts: the even ones are compiled, each odd one is a layer with what unpacks its results."""
    part_of: dict[fx.Node, int] = {}
    number = 0
    for node in graph.nodes:
        if node.target in _LAYERS:
            part_of[node] = number + 1
            # The probability of dropout is read from a tensor, which would cut the part before.
            part_of.update((n, number + 1) for n in node.all_input_nodes if n.target == "item")
            number += 2
        elif node.target is operator.getitem and node.args[0].target in _LAYERS:
            part_of[node] = part_of[node.args[0]]
        else:
            part_of[node] = number
    return part_of


# --- the passes -------------------------------------------------------------------------------------------------------


aten = torch.ops.aten

#: Pattern name -> what does it. The order matters: attention before what its inputs are made of; layers before what
#: follows them; an addition goes into the layer before it rather than into the norm behind it.
_STEPS: tuple[tuple[tuple[str, ...], Callable[[Context], None]], ...] = (
    (("attention",), fuse_attention),
    (("rotary",), fuse_rotary),
    (("rms_norm", "layer_norm"), fuse_norms),
    (("woq",), fuse_woq),
    (("linear",), pack_linears),
    (("linear",), unpack_linears),
    (("gated",), fuse_gated),
    (("post_op",), fuse_post_ops),
    (("merged",), merge_linears),
    (("bags",), merge_bags),
    (("routing",), fuse_routing),
    (("add_norm",), fuse_add_norms),
)

#: Names of all patterns. Convolutions have their turn later, when Inductor has folded batch norms into them.
PATTERNS = (
    *dict.fromkeys(name for names, _ in _STEPS for name in names),
    "convolution",
    "winograd",  # of a convolution: minimal filtering
    "elementwise",  # of the device xpu
)


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
        from ipex_core.kernels.policy import has_kernel

        kernels = has_kernel
    before = report.count()
    graph.eliminate_dead_code()
    _share_casts(graph)
    ctx = Context(graph, set(constants), report, always, frozenset(disabled), kernels)
    for names, step in _STEPS:
        if not ctx.disabled.issuperset(names):
            step(ctx)
    _squeeze_vectors(graph)
    if ctx.constants:
        _hide_convolutions(graph)
    graph.eliminate_dead_code()
    return report.count() - before


def _share_casts(graph: fx.Graph) -> None:
    """Let one conversion to 16 bit serve all of a tensor; under autocast each op has its own.

    Gates and layers that are to be merged are known by the tensor that they read. Conversions to float32 are parts of
    patterns, each of which needs its own. What is returned, or a view of it, stays a tensor of its own, too.
    """

    def storage(value: Tensor) -> Any:
        return value.untyped_storage()._cdata if value.layout == torch.strided else None

    results = [
        value for value in map(val, graph.output_node().all_input_nodes) if value is not None
    ]
    kept = {None, *map(storage, results)}
    known: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        value, given = val(node), val(node.args[0]) if node.target in CASTS else None
        if value is None or given is None or value.dtype.itemsize >= given.dtype.itemsize:
            continue
        if storage(value) in kept:
            continue
        first = known.setdefault((node.target, node.args, tuple(sorted(node.kwargs.items()))), node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _squeeze_vectors(graph: fx.Graph) -> None:
    """Squeeze the results of linear layers on vectors: Inductor's pattern of layers between views fails there."""
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        source, value = node.args[0], val(node)
        if value is None or value.dim() != 1 or not same(shape_of(source), (1, *value.shape)):
            continue
        if is_call(source, aten.mm.default, aten.addmm.default):
            node.target, node.args = aten.squeeze.dim, (source, 0)


def _hide_convolutions(graph: fx.Graph) -> None:
    """Give convolutions in float64 the name that Inductor's freezing does not pack: oneDNN has none, and raises."""
    for node in graph.find_nodes(op="call_function", target=aten.convolution.default):
        value = val(node)
        if value is not None and value.dtype not in FLOATS:
            # benchmark, deterministic, cudnn_enabled and allow_tf32 have no meaning on CPUs
            node.target = aten._convolution.default
            node.args = (*node.args, False, False, False, False)


def split_parameters() -> tuple[set[int], list[torch.Tensor]]:
    """Split the inputs in front, which are the parameters and buffers, as Inductor's freezing is about to do.

    Returns:
        The positions of those that become constants, and those that stay inputs, since the graph writes to them
        (caches, counters, running statistics) or returns them.
    """
    from torch._functorch._aot_autograd.schemas import MutationType
    from torch._guards import TracingContext

    context: Any = TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return set(), []
    parameters = context.params_flat_unwrap_subclasses or ()
    metadata = context.fw_metadata
    kept = {o.base_idx for o in metadata.output_info if o.base_idx is not None}
    written = (MutationType.MUTATED_IN_GRAPH, MutationType.MUTATED_OUT_GRAPH)
    kept |= {i for i, info in enumerate(metadata.input_info) if info.mutation_type in written}
    tensors = {i: value for i, value in enumerate(parameters) if isinstance(value, torch.Tensor)}
    return tensors.keys() - kept, [value for i, value in tensors.items() if i in kept]

# SPDX-License-Identifier: Apache-2.0
"""Graphs of Dynamo as programs: what ``torch.compile(model, backend="ipex")`` runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import shape_of, val
from ipex_core.fusion.aten.passes import split_parameters
from ipex_core.precompiled.expressions import Kept, evaluate
from ipex_core.precompiled.graph import decompositions, forms_of, fuse, hold
from ipex_core.precompiled.lower import Plan, is_object, lower
from ipex_core.precompiled.run import first_values, run_plan, with_packed_linears
from ipex_core.precompiled.whole import runner_of
from ipex_core.precompiled.writes import WRAPPED, drop_writes, why_not

#: A graph with more calls of torch among so many instructions runs faster as Inductor's code.
_MOST_CALLS = 0.05
_UPSAMPLING: Any = (
    torch.ops.aten.upsample_bilinear2d,
    torch.ops.aten.upsample_nearest2d,
    torch.ops.aten.upsample_bicubic2d,
    torch.ops.aten._upsample_nearest_exact2d,
)


class NoProgramError(Exception):
    """A graph that runs as Inductor's code: many of its ops have no instruction, or one is not called by torch."""


def compile_program(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    report: GraphReport,
    disabled: Iterable[str],
    written: list[Tensor],
    whatever: bool,
) -> Callable[..., Any]:
    """Compile a graph that needs no gradient into programs.

    Args:
        gm: The graph of Dynamo, with its weights as attributes.
        example_inputs: One value for each input.
        report: Collects the decisions.
        disabled: Names of patterns to leave out.
        written: Gets the parameters and buffers that stay inputs, since the graph writes to them.
        whatever: Take graphs with many ops that have no instruction, too.

    Returns:
        A callable that takes the inputs of the graph.

    Raises:
        NoProgramError: The graph has a higher-order op, or many ops have no instruction and ``whatever`` is False.
    """
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        drop_writes(graph.graph)
        for node in graph.graph.nodes:
            if node.target is WRAPPED:
                why = why_not(node)
            elif isinstance(node.target, torch._ops.HigherOrderOperator):  # control flow
                why = str(node.target)
            else:
                continue
            if why:
                raise NoProgramError(
                    f"a program must have ops that torch calls, got {why}: leave the graph to Inductor"
                )
        constants, written[:] = _constants()
        with torch.no_grad(), _disable_current_modes():  # weights are folded as they are
            plan, program = _lowered(graph, constants, report, disabled)
        # Inductor's code calls convolutions on codes one by one through torch, too.
        few = 1 + _MOST_CALLS * plan.instructions + plan.int8_convolutions
        calls = ", ".join(f"{count}x {name}" for name, count in plan.calls.most_common())
        if not whatever and sum(plan.calls.values()) > few:
            raise NoProgramError(
                f"a program must have few calls of torch, got {calls} among {plan.instructions} instructions:"
                " leave the graph to Inductor"
            )
        chosen = f"; linear layers of torch, as measured: {plan.linears}" if plan.linears else ""
        report.notes.append(
            f"a program of {plan.instructions} instructions; called through torch: {calls or 'none'}{chosen}"
        )
        program._boxed_call = True  # type: ignore[attr-defined]
        return program

    made: Any = aot_autograd(
        fw_compiler=compiler,
        inference_compiler=compiler,
        decompositions=decompositions(),
    )
    # A graph of Dynamo returns a tuple; one that was traced otherwise may return anything.
    (output,) = gm.graph.find_nodes(op="output")
    results, spec = tree_flatten(output.args[0])
    plain = isinstance(output.args[0], (tuple, list))
    if not plain:
        output.args = (tuple(results),)
        gm.recompile()
    with _whole_ops():
        compiled: Callable[..., Any] = made(gm, example_inputs)
    return compiled if plain else lambda *args: tree_unflatten(list(compiled(*args)), spec)


@contextlib.contextmanager
def _whole_ops() -> Iterator[None]:
    """Record upsampling and instance norms as one op: torch writes them out before decompositions are asked."""
    from torch._decomp.decompositions import upsample_compute_output_size

    keys = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)

    def sized(op: Any) -> Callable[..., Tensor]:
        def call(x: Tensor, size: Any, *rest: Any) -> Any:
            *corners, factors = rest
            size = upsample_compute_output_size(x.size(), size, factors)
            return op(x, size, *corners, *(factors or (None, None)))

        return call

    def grouped(x: Tensor, weight: Any, bias: Any, mean: Any, *rest: Any) -> Any:
        # A group norm with a group for each channel.
        if mean is not None or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
            return norm._op_dk(keys[0], x, weight, bias, mean, *rest)
        n, c, *sizes = x.shape
        op = torch.ops.aten.native_group_norm.default
        return op(x, weight, bias, n, c, math.prod(sizes), c, rest[3])[0]

    norm: Any = torch.ops.aten.instance_norm.default
    rules: dict[Any, dict[Any, Any]] = {norm: dict.fromkeys(keys, grouped)}
    for packet in _UPSAMPLING:
        rules |= {packet.vec: dict.fromkeys(keys, sized(packet.default)), packet.default: {}}
    kept = [(op, op.py_kernels) for op in rules]
    try:
        for op, kernels in rules.items():
            op.py_kernels = {k: v for k, v in op.py_kernels.items() if k not in keys} | kernels
            op._dispatch_cache.clear()
        yield
    finally:
        for op, before in kept:
            op.py_kernels = before
            op._dispatch_cache.clear()


def _constants() -> tuple[dict[int, Tensor], list[Tensor]]:
    """Return the inputs in front that become constants, by position, and those that stay inputs."""
    from torch._guards import TracingContext

    positions, kept = split_parameters()
    context: Any = TracingContext.try_get()
    if context is None:
        return {}, []
    parameters = context.params_flat_unwrap_subclasses or ()
    return {i: parameters[i] for i in positions}, kept


def _lowered(
    graph: fx.GraphModule,
    constants: dict[int, Tensor],
    report: GraphReport,
    disabled: Iterable[str],
) -> tuple[Plan, Callable[[list[Any]], list[Any]]]:
    placeholders = list(graph.graph.find_nodes(op="placeholder"))
    forms = forms_of(graph.graph)
    tensors, symbols = [], []
    for position, node in enumerate(placeholders):
        if position in constants:
            hold(graph, node, constants[position])
        elif val(node) is not None or is_object(node):
            tensors.append(position)
        elif isinstance(node.meta.get("val"), torch.SymInt):
            symbols.append((position, str(node.meta["val"].node.expr)))
    sizes = [
        (at, dim, str(size.node.expr))
        for at, position in enumerate(tensors)
        for dim, size in enumerate(shape_of(placeholders[position]) or ())
        if isinstance(size, torch.SymInt)
    ]
    # What stock code computes as fast is still one step less here.
    fuse(graph, report, disabled, always=True)
    plan = lower(graph, forms)
    ready, first = with_packed_linears(plan), first_values(plan)
    whole, known = runner_of(plan), Kept()

    def numbers(args: list[Any], given: list[Tensor]) -> tuple[int, ...]:
        bound = {name: int(args[position]) for position, name in symbols}
        bound.update({name: given[at].shape[dim] for at, dim, name in sizes if name.isidentifier()})
        key = tuple(bound.values())
        found = known.get(key)
        if found is None:
            found = known.keep(key, tuple(int(evaluate(text, bound)) for text in plan.sizes))
        return found

    def run(args: list[Any]) -> list[Any]:
        given = [args[position] for position in tensors]
        varying = numbers(args, given) if plan.sizes else ()
        args.clear()
        if torch._C._len_torch_dispatch_stack():
            # AOTAutograd watches first calls; to it a program is one op, whose results may be views of its inputs.
            with _disable_current_modes():
                return run_plan(ready, first, given, varying)
        found = None if whole is None else whole(given, varying)
        return run_plan(ready, first, given, varying) if found is None else found

    return plan, run

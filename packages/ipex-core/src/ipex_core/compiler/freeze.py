# SPDX-License-Identifier: Apache-2.0
"""Freezing that takes effect: parameters become constants of the compiled graph, and a change of them is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.errors import FallbackError
from ipex_core.fusion.report import GraphReport

__all__ = ["CompiledGraph", "FrozenGraph", "compiled_often", "lift_parameters"]

log = logging.getLogger("ipex")

Compiled = Callable[..., Any]


def compiled_often() -> bool:
    """Whether Dynamo is about to give up on this code object because it has been compiled too often.

    That happens when the layers of a model are compiled one by one: they share one ``forward`` and each frozen graph
    serves one layer only. A graph that is not frozen serves all the remaining ones.
    """
    from torch._dynamo import config
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    times = getattr(compile_id, "frame_compile_id", None)
    # Two are kept back: for the unfrozen graph and for its variant with dynamic shapes.
    return times is not None and times >= config.recompile_limit - 2


def lift_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Tensor]:
    """Turn the parameter and buffer inputs of a Dynamo graph into attributes of it; return them by input position.

    Graphs that Dynamo did not make are left as they are: their parameters are attributes already.
    """
    sources: dict[str, Any] | None = getattr(gm, "_param_name_to_source", None)
    if sources is None:
        return {}
    from torch._dynamo.guards import GuardBuilder, install_guard

    gm._param_name_to_source = sources = dict(sources)  # type: ignore[assignment]
    lifted: dict[int, Tensor] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        if (
            source is None
            or not isinstance(value, Tensor)
            or getattr(value, "_dynamo_static_input_type", None) is None
        ):
            continue
        name = f"_ipex_frozen_{position}"
        # A buffer, whatever it was: no gradient is wanted and a Parameter would have to be a leaf of float type.
        gm.register_buffer(name, value)
        sources[name] = source
        with gm.graph.inserting_before(node):
            constant = gm.graph.get_attr(name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
        # Without this, another module of the same class would run with the weights of this one.
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        lifted[position] = value
    gm.recompile()
    return lifted


def _below_autograd(compiled: Compiled) -> Compiled:
    def call(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(*args)

    return call


class CompiledGraph:
    """What Dynamo gets: a compiled graph with the report on its passes.

    A graph for inference runs below autograd: nothing in it records a gradient, and each call of an op of ours would
    otherwise go through autograd's kernel, which is written in Python. In-place changes and views are tracked as ever:
    that is the business of another dispatch key.
    """

    def __init__(self, compiled: Compiled, report: GraphReport) -> None:
        self._compiled = _below_autograd(compiled) if report.inference else compiled
        self.report = report

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)


class FrozenGraph(CompiledGraph):
    """A frozen compiled graph that notices when its weights have changed since."""

    def __init__(
        self,
        compiled: Compiled,
        report: GraphReport,
        kept: list[int],
        n_inputs: int,
        weights: list[Tensor],
        unfrozen: fx.GraphModule,
    ) -> None:
        super().__init__(compiled, report)
        self._kept = kept
        self._n_inputs = n_inputs
        self._weights = weights
        self._state = self._weight_state()
        self._unfrozen = unfrozen
        self._stale = False

    def _weight_state(self) -> list[tuple[int, int]]:
        # Versions catch in-place updates (load_state_dict), pointers catch `p.data = ...`. Inference tensors have no
        # version counter, packed oneDNN weights have no pointer. About 0.1 us per weight.
        return [
            (0 if w.is_inference() else w._version, id(w) if w.is_mkldnn else w.data_ptr())
            for w in self._weights
        ]

    def __call__(self, *args: Any) -> Any:
        # Dynamo reads the inputs to pass from the graph that was edited, and so leaves the lifted ones out. A wrapper
        # between Dynamo and us may still pass them all.
        if len(args) == self._n_inputs != len(self._kept):
            args = tuple(args[i] for i in self._kept)
        if self._stale or self._weight_state() != self._state:
            return self._run_unfrozen(args)
        return self._compiled(*args)

    def _run_unfrozen(self, args: tuple[Any, ...]) -> Any:
        if not self._stale:
            message = (
                "torch.compile(backend='ipex'): the weights changed after compilation, so the frozen graph is no longer"
                " valid and the graph runs uncompiled; call torch.compiler.reset() to compile it again"
            )
            from ipex_core import config

            if config.get("strict"):
                raise FallbackError(message)
            log.warning(message)
            self._stale = True
        return self._unfrozen(*args)

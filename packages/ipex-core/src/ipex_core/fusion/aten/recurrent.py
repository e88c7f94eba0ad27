# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers in graphs that need a gradient: they run as they are, and what is around them is compiled.

They get into a graph where ``torch._dynamo.config.allow_rnn`` is set. There torch rewrites an LSTM to an op without a
derivative or unrolls the layer in time, which takes minutes to compile, and in both cases leaves dropout between the
layers out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["compile_around_recurrent", "has_recurrent"]

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

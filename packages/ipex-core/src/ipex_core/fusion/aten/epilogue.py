# SPDX-License-Identifier: Apache-2.0
"""Recognition of activations, which AOTAutograd hands over in pieces. Other patterns use it; it replaces nothing."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import fx

from ipex_core.fusion.aten.graph import (
    Context,
    between,
    binary,
    is_call,
    narrowed,
    scaled,
    shifted,
    uncast,
    val,
)
from ipex_core.library.spec import FLOATS

__all__ = ["Activation", "find_activations"]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Activation:
    """``root = kind(source)``; the interior lies between."""

    kind: str
    root: fx.Node
    source: fx.Node
    interior: tuple[fx.Node, ...]


def find_activations(ctx: Context) -> dict[fx.Node, Activation]:
    """Return the activations of a graph by their root."""
    found: dict[fx.Node, Activation] = {}
    for node in ctx.graph.nodes:
        if node.op != "call_function":
            continue
        match = None
        if node.target is aten.relu.default and isinstance(node.args[0], fx.Node):
            match = Activation("relu", node, node.args[0], ())
        elif node.target is aten.silu.default:  # where it is not decomposed
            match = Activation("silu", node, node.args[0], ())
        elif node.target is aten.erf.default:
            match = _gelu(node, _erf_argument(node), "gelu")
        elif node.target is aten.tanh.default:
            match = _gelu(node, _tanh_argument(node), "gelu_tanh")
        elif node.target in (aten.div.Tensor, aten.mul.Tensor):
            match = _silu(node)
        if match is not None:
            match = _with_casts(match)
            found[match.root] = match
    return found


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=1e-4)


def _erf_argument(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    part = scaled(node.args[0])
    if part is None or not _close(part[1], math.sqrt(0.5)):
        return None
    return part[0], [node.args[0]]  # type: ignore[list-item]


def _tanh_argument(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Match ``sqrt(2 / pi) * (x + 0.044715 * x^3)``; return x and the nodes passed."""
    part = scaled(node.args[0])
    if part is None or not _close(part[1], math.sqrt(2 / math.pi)):
        return None
    total = part[0]
    pair = binary(total, aten.add.Tensor)
    if pair is None:
        return None
    for x, rest in (pair, pair[::-1]):
        cubic = scaled(rest)
        if cubic is None or not _close(cubic[1], 0.044715):
            continue
        cube = _cube(cubic[0], x)
        if cube is not None:
            return x, [node.args[0], total, rest, *cube]
    return None


def _cube(node: fx.Node, x: fx.Node) -> list[fx.Node] | None:
    if is_call(node, aten.pow.Tensor_Scalar):
        return [node] if node.args[0] is x and node.args[1] == 3 else None
    pair = binary(node, aten.mul.Tensor)
    if pair is None:
        return None
    for square, factor in (pair, pair[::-1]):
        if factor is x and (
            binary(square, aten.mul.Tensor) == (x, x)
            or (is_call(square, aten.pow.Tensor_Scalar) and square.args == (x, 2))
        ):
            return [node, square]
    return None


def _gelu(
    anchor: fx.Node, argument: tuple[fx.Node, list[fx.Node]] | None, kind: str
) -> Activation | None:
    """Match ``0.5 * x * (1 + anchor)``, in any grouping of the factors."""
    if argument is None or len(anchor.users) != 1:
        return None
    x, inside = argument
    plus = next(iter(anchor.users))
    shift = shifted(plus)
    if shift is None or shift[1] != 1.0 or len(plus.users) != 1:
        return None
    product = next(iter(plus.users))
    pair = binary(product, aten.mul.Tensor)
    if pair is None:
        return None
    other = pair[1] if pair[0] is plus else pair[0]
    half = scaled(other)
    if half is not None and half[1] == 0.5 and half[0] is x:  # (0.5 x) (1 + ...)
        return Activation(kind, product, x, (anchor, plus, other, *inside))
    if other is x and len(product.users) == 1:  # (x (1 + ...)) 0.5
        root = next(iter(product.users))
        half = scaled(root)
        if half is not None and half[1] == 0.5:
            return Activation(kind, root, x, (anchor, plus, product, *inside))
    return None


def _silu(node: fx.Node) -> Activation | None:
    """Match ``x / (1 + exp(-x))`` and ``x * sigmoid(x)``."""
    pair = binary(node, aten.div.Tensor)
    if pair is not None:
        x, below = pair
        shift = shifted(below)
        if shift is None or shift[1] != 1.0 or not is_call(shift[0], aten.exp.default):
            return None
        negative = shift[0].args[0]
        if is_call(negative, aten.neg.default) and negative.args[0] is x:  # type: ignore[union-attr]
            return Activation("silu", node, x, (below, shift[0], negative))  # type: ignore[arg-type]
        return None
    pair = binary(node, aten.mul.Tensor)
    if pair is not None:
        for x, gate in (pair, pair[::-1]):
            if is_call(gate, aten.sigmoid.default) and gate.args[0] is x:
                return Activation("silu", node, x, (gate,))
    return None


def _with_casts(match: Activation) -> Activation:
    """Widen a match over the conversions to float32 and back that surround it in 16 bit."""
    source = uncast(match.source)
    outer, inner = val(match.root), val(source)
    if source is match.source or outer is None or inner is None or inner.dtype not in FLOATS:
        return match
    if outer.dtype == inner.dtype:
        return match
    narrow = narrowed(match.root, inner.dtype)
    if narrow is None:
        return match
    inside = (match.root, *match.interior, *between(match.source, source))
    return Activation(match.kind, narrow, source, inside)

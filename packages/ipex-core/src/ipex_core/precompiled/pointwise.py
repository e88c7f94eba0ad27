# SPDX-License-Identifier: Apache-2.0
"""Chains of element-wise ops in a graph, which become one instruction each."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._mode_utils import no_dispatch

from ipex_core.fusion.aten import number, val
from ipex_core.library.spec import FLOATS
from ipex_core.program.builtins import POINTWISE

aten = torch.ops.aten
prims = torch.ops.prims

#: What a chain may hold: operands that are kept in L1 at the same time.
_MOST_STEPS, _MOST_INPUTS = 48, 12
_DTYPES = (*FLOATS, torch.bool)


class _Writer:
    """Writes the code of one chain."""

    def __init__(self) -> None:
        self.inputs: list[fx.Node] = []
        self.constants: list[float] = []
        self.steps: list[tuple[int, Any, Any, Any]] = []

    def step(self, name: str, *operands: Any) -> tuple[str, int]:
        """Append a step; return its value."""
        a, b, c = (*operands, None, None, None)[:3]
        self.steps.append((POINTWISE.index(name), a, b, c))
        return "step", len(self.steps) - 1

    def input(self, node: fx.Node) -> tuple[str, int]:
        if node not in self.inputs:
            self.inputs.append(node)
        return "input", self.inputs.index(node)

    def constant(self, value: float) -> tuple[str, int]:
        same = [
            i
            for i, c in enumerate(self.constants)
            if c == value and math.copysign(1, c) == math.copysign(1, value)
        ]
        if not same:
            self.constants.append(value)
            same = [len(self.constants) - 1]
        return "constant", same[0]

    def code(self) -> list[int]:
        """Return the code, with values numbered as the instruction has them."""
        first = {
            "input": 0,
            "constant": len(self.inputs),
            "step": len(self.inputs) + len(self.constants),
        }
        words: list[int] = []
        for opcode, *operands in self.steps:
            words.append(opcode)
            words += [-1 if one is None else first[one[0]] + one[1] for one in operands]
        return words


_Rule = Callable[[_Writer, list[Any], Mapping[str, Any]], Any]


def _plain(name: str) -> _Rule:
    return lambda w, values, kwargs: w.step(name, *values)


def _with_alpha(name: str, reverse: bool = False) -> _Rule:
    def rule(w: _Writer, values: list[Any], kwargs: Mapping[str, Any]) -> Any:
        a, b = values[:2]
        alpha = kwargs.get("alpha", 1)
        if alpha != 1:
            scaled = a if reverse else b
            scaled = w.step("mul", scaled, w.constant(float(alpha)))
            a, b = (scaled, b) if reverse else (a, scaled)
        return w.step(name, b, a) if reverse else w.step(name, a, b)

    return rule


def _clamp(w: _Writer, values: list[Any], kwargs: Mapping[str, Any]) -> Any:
    low, high = (*values[1:], None, None)[:2]
    low, high = kwargs.get("min", low), kwargs.get("max", high)
    low, high = (w.constant(float(v)) if isinstance(v, (int, float)) else v for v in (low, high))
    value = values[0]
    if low is not None:
        value = w.step("maximum", value, low)
    if high is not None:
        value = w.step("minimum", value, high)
    return value


def _power(w: _Writer, values: list[Any], kwargs: Mapping[str, Any]) -> Any:
    base, exponent = values[:2]
    known = w.constants[exponent[1]] if exponent[0] == "constant" else None
    if known == 2:
        return w.step("mul", base, base)
    if known in (0.5, -0.5):
        return w.step("sqrt" if known > 0 else "rsqrt", base)
    if known == 3:
        return w.step("mul", w.step("mul", base, base), base)
    return w.step("pow", base, exponent)


def _gelu(w: _Writer, values: list[Any], kwargs: Mapping[str, Any]) -> Any:
    return w.step("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", values[0])


def _table() -> dict[Any, _Rule]:
    table: dict[Any, _Rule] = {
        aten.add.Tensor: _with_alpha("add"),
        aten.add.Scalar: _with_alpha("add"),
        aten.sub.Tensor: _with_alpha("sub"),
        aten.sub.Scalar: _with_alpha("sub"),
        aten.rsub.Scalar: _with_alpha("sub", reverse=True),
        aten.mul.Tensor: _plain("mul"),
        aten.mul.Scalar: _plain("mul"),
        aten.div.Tensor: _plain("div"),
        aten.div.Scalar: _plain("div"),
        aten.where.self: _plain("where"),
        aten.clamp.default: _clamp,
        aten.clamp_min.default: lambda w, v, k: w.step("maximum", v[0], v[1]),
        aten.clamp_max.default: lambda w, v, k: w.step("minimum", v[0], v[1]),
        aten.pow.Tensor_Scalar: _power,
        aten.gelu.default: _gelu,
        aten.logical_and.default: _plain("logical_and"),
        aten.logical_or.default: _plain("logical_or"),
        aten.logical_not.default: _plain("logical_not"),
        aten.bitwise_and.Tensor: _plain("logical_and"),
        aten.bitwise_or.Tensor: _plain("logical_or"),
        aten.bitwise_not.default: _plain("logical_not"),
    }
    names = (
        *("neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "tanh", "sigmoid", "erf"),
        *("relu", "silu", "sin", "cos", "floor", "ceil", "round", "trunc", "maximum", "minimum"),
        *("log1p", "expm1"),
    )
    for name in names:
        table[getattr(aten, name).default] = _plain(name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        for overload in ("Scalar", "Tensor"):
            table[getattr(getattr(aten, name), overload)] = _plain(name)
    return table


_RULES = _table()
_CAST = prims.convert_element_type.default
_COMPARISONS = frozenset(
    getattr(getattr(aten, name), overload)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for overload in ("Scalar", "Tensor")
)
#: Ops that are the same as the ones in the table only for bool.
_ON_BOOL = (aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default)


@dataclasses.dataclass(frozen=True)
class Chain:
    """Some element-wise ops as one instruction.

    Attributes:
        root: The node whose value the instruction computes.
        inner: The other nodes.
        inputs: What it reads.
        constants: Numbers in its code.
        code: The code of the instruction ``pointwise``.
        dtype: Of the result.
    """

    root: fx.Node
    inner: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    constants: tuple[float, ...]
    code: tuple[int, ...]
    dtype: torch.dtype


def _is_fit(node: fx.Node) -> bool:
    """Return whether a node is an element-wise op on dtypes that the instruction has."""
    if node.op != "call_function" or (node.target not in _RULES and node.target is not _CAST):
        return False
    value = val(node)
    if value is None or value.dtype not in _DTYPES or value.device.type != "cpu":
        return False
    for one in node.args:
        if isinstance(one, fx.Node):
            if number(one) is not None:
                continue
            operand = val(one)
            if operand is None or operand.dtype not in _DTYPES:
                return False
        elif one is not None and not isinstance(one, (int, float, torch.dtype)):
            return False
    if node.target in _ON_BOOL:
        return all(
            one.dtype == torch.bool for one in map(val, node.all_input_nodes) if one is not None
        )
    if node.target in (aten.floor.default, aten.round.default, aten.div.Tensor):
        return not node.kwargs
    return set(node.kwargs) <= {"alpha", "min", "max", "approximate"}


def find_chains(graph: fx.Graph) -> dict[fx.Node, Chain]:
    """Return root -> chain, such that no node is in two chains."""
    chains: dict[fx.Node, Chain] = {}
    taken: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in taken or not _is_fit(node):
            continue
        members = _members(node, taken)
        chain = _write(node, members)
        chains[node] = chain
        taken.update(members)
    return chains


def _members(root: fx.Node, taken: set[fx.Node]) -> set[fx.Node]:
    """Return the root and what is computed for it alone, in its shape."""
    shape = val(root).shape  # type: ignore[union-attr]
    members = {root}
    edge = [root]
    while edge and len(members) < _MOST_STEPS:
        node = edge.pop(0)
        for one in node.all_input_nodes:
            if one in members or one in taken or not _is_fit(one) or number(one) is not None:
                continue
            found = val(one)
            if found is None or found.shape != shape or any(u not in members for u in one.users):
                continue
            outside = {n for m in (*members, one) for n in m.all_input_nodes} - members - {one}
            if len(outside) > _MOST_INPUTS:
                continue
            members.add(one)
            edge.append(one)
    return members


def _write(root: fx.Node, members: set[fx.Node]) -> Chain:
    writer = _Writer()
    values: dict[fx.Node, Any] = {}
    ordered = [node for node in root.graph.nodes if node in members]

    def value(one: Any) -> Any:
        if isinstance(one, fx.Node):
            if one in values:
                return values[one]
            known = number(one)
            return writer.input(one) if known is None else writer.constant(known)
        if isinstance(one, (int, float)) and not isinstance(one, torch.dtype):
            return writer.constant(float(one))
        return None

    for node in ordered:
        if node.target is _CAST:
            values[node] = _cast(writer, node, value(node.args[0]), node is root)
            continue
        operands = [value(one) for one in _rounded(node)]
        values[node] = _RULES[node.target](writer, operands, node.kwargs)
    result = val(root)
    assert isinstance(result, Tensor)
    if values[root][0] != "step" or values[root][1] != len(writer.steps) - 1:
        # Casts alone write no step, and the last step must be the result.
        writer.step("add", values[root], writer.constant(-0.0))
    return Chain(
        root,
        tuple(node for node in ordered if node is not root),
        tuple(writer.inputs),
        tuple(writer.constants),
        tuple(writer.code()),
        result.dtype,
    )


def _cast(writer: _Writer, node: fx.Node, given: Any, last: bool) -> Any:
    """Return the value of a conversion; the result of a chain is rounded when it is stored."""
    source, result = val(node.args[0]), val(node)
    assert source is not None and result is not None
    if result.dtype == torch.bool:
        return (
            given if source.dtype == torch.bool else writer.step("ne", given, writer.constant(0.0))
        )
    if last or result.dtype in (source.dtype, torch.float32):
        return given
    name = "round_bfloat16" if result.dtype == torch.bfloat16 else "round_float16"
    return writer.step(name, given)


def _rounded(node: fx.Node) -> list[Any]:
    """Return the operands; a number is compared with a tensor of 16 bit in the dtype of the tensor."""
    found = val(node.args[0])
    if node.target not in _COMPARISONS or found is None or found.dtype.itemsize != 2:
        return list(node.args)
    operands = []
    for one in node.args:
        known = number(one)
        if known is not None and (not isinstance(one, fx.Node) or val(one).dim() == 0):  # type: ignore[union-attr]
            with no_dispatch():
                one = float(torch.tensor(known, dtype=torch.float64).to(found.dtype))
        operands.append(one)
    return operands

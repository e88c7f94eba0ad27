# SPDX-License-Identifier: Apache-2.0
"""Arithmetic on sizes that vary, as sympy and torch write it down.

A file may hold any text, so that nothing but the functions named here is evaluated.
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

#: How many kinds of sizes keep the numbers that follow from them.
MOST_SIZES = 64

_OPERATORS: Mapping[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
    ast.Invert: operator.not_,
    ast.BitAnd: lambda a, b: bool(a) and bool(b),
    ast.BitOr: lambda a, b: bool(a) or bool(b),
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "Abs": abs,
    "CeilDiv": lambda a, b: -(-a // b),
    "CeilToInt": lambda a: -int(-a // 1),
    "CleanDiv": operator.floordiv,
    "Eq": operator.eq,
    "FloorDiv": operator.floordiv,
    "FloorToInt": lambda a: int(a // 1),
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "ModularIndexing": lambda a, b, c: a // b % c,
    "Ne": operator.ne,
    "PowByNatural": operator.pow,
    "PythonMod": operator.mod,
    "ToFloat": float,
    "TruncToInt": int,
}
#: A power beyond this is no size.
_MOST_POWER = 16


def evaluate(text: str, symbols: Mapping[str, int]) -> Any:
    """Return the value of an expression.

    Args:
        text: Sums, products, divisions, comparisons and the functions of torch for them.
        symbols: Name of a size -> its value.

    Raises:
        ValueError: The text has something else.
    """
    if text in symbols:
        return symbols[text]
    try:
        return _value(_tree(text), symbols)
    except (KeyError, SyntaxError, ZeroDivisionError, TypeError, RecursionError):
        raise ValueError(
            f"an expression of sizes must be arithmetic on {', '.join(symbols) or 'numbers'}, got {text!r}"
        ) from None


@functools.lru_cache(maxsize=1024)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def _value(node: ast.expr, symbols: Mapping[str, int]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return node.value
        case ast.Name():
            return symbols[node.id]
        case ast.BinOp():
            left, right = _value(node.left, symbols), _value(node.right, symbols)
            if isinstance(node.op, ast.Pow) and abs(right) > _MOST_POWER:
                raise KeyError
            return _OPERATORS[type(node.op)](left, right)
        case ast.UnaryOp():
            return _OPERATORS[type(node.op)](_value(node.operand, symbols))
        case ast.Compare():
            values = [_value(one, symbols) for one in (node.left, *node.comparators)]
            return all(
                _OPERATORS[type(op)](a, b)
                for op, a, b in zip(node.ops, values[:-1], values[1:], strict=True)
            )
        case ast.BoolOp():
            every = all if isinstance(node.op, ast.And) else any
            return every(_value(one, symbols) for one in node.values)
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return _FUNCTIONS[name](*(_value(one, symbols) for one in node.args))
    raise KeyError


def solve(text: str, value: int, symbols: Mapping[str, int]) -> dict[str, int]:
    """Return the size that a linear expression, such as ``2*s0 + 1``, needs to have a value.

    Args:
        text: The expression.
        value: What it is equal to.
        symbols: The sizes that are known.

    Returns:
        The name of the size and its value; empty where all sizes are known, several are not, or none fits.
    """
    unknown = {n.id for n in ast.walk(_tree(text)) if isinstance(n, ast.Name)} - set(symbols)
    unknown -= set(_FUNCTIONS)
    if len(unknown) != 1:
        return {}
    (name,) = unknown
    first, second = (evaluate(text, {**symbols, name: at}) for at in (0, 1))
    step = second - first
    if step == 0 or (value - first) % step:
        return {}
    return {name: int((value - first) // step)}


def postfix(text: str) -> list[Any]:
    """Return an expression with each function behind its arguments, as the reader in C++ takes it.

    Numbers are themselves, a size that varies is ``{"size": name}``, a function is ``[name, number of arguments]``.
    """
    found: list[Any] = []

    def add(node: Any) -> None:
        match node:
            case ast.Constant(value=value):
                found.append(value)
                return
            case ast.Name(id=name):
                found.append({"size": name})
                return
            case ast.BinOp(left=left, op=op, right=right):
                values, name = [left, right], type(op).__name__
            case ast.UnaryOp(op=op, operand=operand):
                values, name = [operand], type(op).__name__
            case ast.Compare(left=left, ops=ops, comparators=others):
                both = list(zip([left, *others[:-1]], ops, others, strict=True))
                for a, comparison, b in both:
                    add(a)
                    add(b)
                    found.append([type(comparison).__name__, 2])
                if len(both) > 1:
                    found.append(["And", len(both)])
                return
            case ast.BoolOp(op=op, values=values):
                name = type(op).__name__
            case ast.Call(func=ast.Name(id=name), args=values):
                pass
            case _:
                raise ValueError(f"an expression of sizes must be arithmetic, got {text!r}")
        for one in values:
            add(one)
        found.append([name, len(values)])

    add(_tree(text))
    return found


class Kept(dict[Any, tuple[int, ...]]):
    """The numbers that follow from the last kinds of sizes."""

    def keep(self, key: Any, numbers: tuple[int, ...]) -> tuple[int, ...]:
        """Keep the numbers of one kind in the place of the oldest one if there are many; return them."""
        if len(self) >= MOST_SIZES:
            self.pop(next(iter(self), None), None)
        self[key] = numbers
        return numbers

# SPDX-License-Identifier: Apache-2.0
"""Merging of linear layers that are fed by the same input, such as query, key and value.

In a forward that can be traced, the layers are found in the trace. Where it cannot (attention modules rarely can), the
source of the forward is read: calls ``self.a(x)``, ``self.b(x)`` of the same, unchanged ``x`` in its straight-line part
are replaced by one call, and the forward is compiled again from the changed source.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Iterator

from torch import nn

from ipex_core.module_swap.forward import FusedForward
from ipex_core.nn.merged_linear import may_merge, merge

__all__ = ["merge_by_source"]

_HELPER = "_ipex_linears"
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CONDITIONAL = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def merge_by_source(module: nn.Module) -> tuple[list[list[str]], str | None]:
    """Merge what can be merged in a module; return the names of each group, or the reason why there is no group."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return [], "the forward is decorated"
    if forward.__code__.co_freevars:
        return [], "the forward is a closure"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return [], "the source of the forward is not available"
    function = tree.body[0]
    if (
        not isinstance(function, ast.FunctionDef)
        or function.decorator_list
        or not function.args.args
    ):
        return [], "the forward is not a plain function"
    owner = function.args.args[0].arg
    groups = []
    for calls in _same_input(function, owner):
        names = list(dict.fromkeys(_attribute(call) for _, call in calls))
        members = tuple(module._modules[n] for n in names if n in module._modules)
        real = tuple(m for m in members if m is not None)
        if len(names) == len(calls) == len(real) and may_merge(real):
            groups.append((names, calls))
    if not groups:
        return [], "no linear layers of equal form are fed by the same input"
    names_of = _namespace(forward, function)
    if names_of is None:
        return [], "the forward uses names that cannot be found"
    for names, calls in groups:
        members = tuple(module._modules[name] for name in names)
        if not merge(tuple(m for m in members if m is not None)):
            continue
        _rewrite(function, owner, names, calls)
    _strip(function)
    function.name = "forward"
    source = ast.unparse(ast.fix_missing_locations(tree))
    names_of[_HELPER] = "ipex_core.nn.merged_linear:linears"
    module.__dict__["forward"] = FusedForward(module, source, names_of, None, (), ())
    return [names for names, _ in groups], None


_Calls = list[tuple[int, ast.Call]]


def _attribute(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def _unconditional(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _CONDITIONAL):
            yield from _unconditional(child)


def _same_input(function: ast.FunctionDef, owner: str) -> list[_Calls]:
    """Return groups of calls ``owner.<layer>(name)`` that see the same value of ``name``."""
    version: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], _Calls] = defaultdict(list)
    uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for position, statement in enumerate(function.body):
        if isinstance(statement, _SIMPLE):
            for node in _unconditional(statement):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == owner
                    and len(node.args) == 1
                    and isinstance(node.args[0], ast.Name)
                    and not node.keywords
                ):
                    name = node.args[0].id
                    found[name, version[name]].append((position, node))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses[node.id].append((position, id(node)))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                version[node.id] += 1
    return [
        calls for (name, _), calls in found.items() if len(calls) > 1 and _alone(uses[name], calls)
    ]


def _alone(uses: list[tuple[int, int]], calls: _Calls) -> bool:
    """Return whether nothing else touches the input between the first and the last call."""
    arguments = {id(call.args[0]) for _, call in calls}
    first, last = calls[0][0], calls[-1][0]
    return all(node in arguments for position, node in uses if first < position <= last)


def _rewrite(function: ast.FunctionDef, owner: str, names: list[str], calls: _Calls) -> None:
    replacements = {id(call): f"_ipex_{_attribute(call)}" for _, call in calls}

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            name = replacements.get(id(node))
            return node if name is None else ast.copy_location(ast.Name(name, ast.Load()), node)

    first = calls[0][1]
    argument = first.args[0]
    assert isinstance(argument, ast.Name)
    layers = ", ".join(f"{owner}.{name}" for name in names)
    targets = ", ".join(f"_ipex_{name}" for name in names)
    line = ast.parse(f"{targets} = {_HELPER}({argument.id}, {layers})").body[0]
    index = next(i for i, s in enumerate(function.body) if any(n is first for n in ast.walk(s)))
    function.body = [Replace().visit(statement) for statement in function.body]
    function.body.insert(index, line)


def _strip(function: ast.FunctionDef) -> None:
    """Remove annotations, which may name things that exist only for type checkers."""
    arguments = function.args
    for argument in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    function.returns = None
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)


def _namespace(forward: types.FunctionType, function: ast.FunctionDef) -> dict[str, str] | None:
    """Return where each global name of the forward comes from."""
    module = forward.__module__
    if sys.modules.get(module) is None or forward.__globals__ is not vars(sys.modules[module]):
        return None
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    if "super" in used or "__class__" in used:
        return None
    return {name: f"{module}:{name}" for name in used if name in forward.__globals__}

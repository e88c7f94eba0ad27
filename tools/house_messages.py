# SPDX-License-Identifier: Apache-2.0
"""Messages of errors, read from the sources: do they say what was expected, what was given, and what to do?

``raise`` with a text is read; ``check(condition, op, argument, expectation, value)`` has the form by construction. A
text in a variable is looked up. A text that is made elsewhere is not judged: ``str(error)``, or a name and an error.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["incomplete", "lacks", "messages", "written"]

#: What says how it should be.
EXPECTED = re.compile(
    r"\b(must|expects?|expected|needs?|needed|requires?|required|takes?|supports?|supported|has to|have to|should|only"
    r"|allowed|exclude|at least|at most|cannot|no|not|unknown|neither|without)\b",
    re.IGNORECASE,
)
#: What shows what came: a value, or its name; for a package that is not there, how to install it.
GIVEN = re.compile(r"\{|\bgot (?!(?:an)?other\b|different\b)|\bpip install\b")
#: What says what to do: an instruction, or a demand that is one.
TO_DO = re.compile(
    r"\b(must|needs?|has to|have to|use|call|pass|set|unset|install|give|leave|try|see|run|choose|remove|add|convert"
    r"|make|load|lower|raise|reduce|exclude|restore|disable|enable|pip|write|rename|build|update|copy|move|start|name"
    r"|close|wait|ask|keep|check|download|free|delete|import|switch|prepare|calibrate|save|turn|takes?|expects?"
    r"|expected|requires?|instead|known|available|choices|one of|did you mean)\b",
    re.IGNORECASE,
)
#: Exceptions that people read. Others carry a reason from one function of ours to another, or mean something in Python.
READ = re.compile(r"(Error|BadParameter|QueueFull)$")
#: Reasons and invariants, though their names end so. The two of ``ipex bench`` are cells of its table.
SILENT = {
    *("AssertionError", "FallbackError", "KeyError", "MatchError", "_NoTraceError"),
    *("EngineError", "UnsupportedError"),
}
#: The message of another error, after the name of the function or the file: it is judged where it is raised.
PASSED_ON = re.compile(r"^(\{[^{}]*\}: |[\w.]+: )*\{(\w+\[')?(error|msg)('\])?\}$")
#: Texts that Python and torch themselves have, and one to a client that has closed the connection.
NOT_OURS = ("has no attribute", "Can't call numpy()", "the client is gone")


def written(node: ast.AST, names: Mapping[str, str] | None = None) -> str | None:
    """Return the text of an expression, values as ``{expression}``, or None if it has no text of its own.

    ``names`` are variables that hold a text.

    Example:
        >>> import ast
        >>> written(ast.parse("f'x must be 2-D, got {x.dim()}-D'", mode="eval").body)
        'x must be 2-D, got {x.dim()}-D'
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return (names or {}).get(node.id)
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                known = isinstance(value.value, ast.Name) and (names or {}).get(value.value.id)
                parts.append(known or f"{{{ast.unparse(value.value)}}}")
            elif isinstance(value, ast.Constant):
                parts.append(str(value.value))
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        left, right = written(node.left, names), written(node.right, names)
        if left is None and right is None:
            return None
        return (left or f"{{{ast.unparse(node.left)}}}") + (
            right or f"{{{ast.unparse(node.right)}}}"
        )
    if isinstance(node, ast.Subscript):  # a message that is cut off at a length
        return written(node.value, names) if isinstance(node.slice, ast.Slice) else None
    if isinstance(node, ast.IfExp):
        both = [
            text
            for text in (written(node.body, names), written(node.orelse, names))
            if text is not None
        ]
        return " | ".join(both) if both else None
    return None


def _variables(nodes: list[ast.AST]) -> Callable[[int], dict[str, str]]:
    """Return what gives the texts of variables at a line: of the module, and of the functions around it."""
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    assigned = [
        n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)
    ]

    def around(line: int) -> set[int]:
        return {i for i, f in enumerate(functions) if f.lineno <= line <= (f.end_lineno or line)}

    places = sorted(((node, around(node.lineno)) for node in assigned), key=lambda p: p[0].lineno)

    def at(line: int) -> dict[str, str]:
        here = around(line)
        found: dict[str, str] = {}
        for node, outer in places:
            if outer <= here and (node.lineno < line or not outer):
                text = written(node.value, found)
                if text is not None:
                    found[node.targets[0].id] = text  # type: ignore[attr-defined]
        return found

    return at


def _caught(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int, int]]:
    """Yield (exception, first line, last line) of each ``try`` that catches it: a ``raise`` there gives a reason."""
    for node in nodes:
        if isinstance(node, ast.Try):
            for handler in node.handlers:
                kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
                for kind in kinds:
                    if isinstance(kind, ast.Name):
                        yield kind.id, node.body[0].lineno, node.body[-1].end_lineno or 0


def _is_kind(name: str, of: str) -> bool:
    own, other = getattr(builtins, name, None), getattr(builtins, of, None)
    return name == of or (own is not None and other is not None and issubclass(own, other))


def messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each ``raise`` whose text stands in its module.

    Example:
        >>> import ast
        >>> tree = ast.parse("text = 'x must be 2-D'; raise ValueError(text)")
        >>> list(messages(ast.walk(tree)))
        [(1, 'x must be 2-D')]
        >>> tree = ast.parse("raise ValueError(f'load: {error}')")
        >>> list(messages(ast.walk(tree)))
        []
    """
    nodes = list(nodes)
    caught = list(_caught(nodes))
    variables = _variables(nodes)
    for node in nodes:
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call):
            continue
        line = call.lineno
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if not READ.search(name) or name in SILENT:
            continue
        if any(first <= line <= last and _is_kind(name, kind) for kind, first, last in caught):
            continue
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        names = variables(line)
        texts = [text for value in given if (text := written(value, names)) is not None]
        # Words beside a message are a code of it, or the name of an option.
        if len(given) > 1:
            texts = [text for text in texts if " " in text]
        passed_on = "str(error)" in map(ast.unparse, given) or all(map(PASSED_ON.match, texts))
        if texts and not passed_on:
            # Values that are arguments of the exception itself count as shown: it puts them into its text.
            shown = "".join(
                f" {{{ast.unparse(value)}}}" for value in given if written(value, names) is None
            )
            yield line, " ".join(texts) + shown


def lacks(text: str) -> list[str]:
    """Return which parts of the form a message lacks, of ``expected``, ``given`` and ``to do``.

    Example:
        >>> lacks("rms_norm: weight must be 1-D, got {weight.dim()}-D")
        []
        >>> lacks("wrong weight")
        ['expected', 'given', 'to do']
    """
    found = [] if EXPECTED.search(text) else ["expected"]
    found += [] if GIVEN.search(text) else ["given"]
    return found + ([] if TO_DO.search(text) else ["to do"])


def incomplete(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, what is missing and the text) of each message without the form."""
    for line, text in messages(nodes):
        if missing := [] if any(other in text for other in NOT_OURS) else lacks(text):
            yield line, f"lacks {', '.join(missing)}: {text}"

# SPDX-License-Identifier: Apache-2.0
"""Messages of errors, read from the sources: do they say what was expected, what was given, and what to do?

``raise`` with a text is read; ``check(condition, op, argument, expectation, value)`` has the form by construction. A
text that is made elsewhere is not judged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

__all__ = ["incomplete", "lacks", "messages", "written"]

#: What says how it should be.
EXPECTED = re.compile(
    r"\b(must|expects?|expected|needs?|needed|requires?|required|takes?|supports?|supported|has to|have to|should|only"
    r"|allowed|at least|at most|cannot|no|not|unknown|neither|without)\b",
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
#: Reasons and invariants, though their names end so.
SILENT = {"AssertionError", "FallbackError", "KeyError", "MatchError", "_NoTraceError"}


def written(node: ast.AST) -> str | None:
    """Return the text of an expression, values as ``{expression}``, or None if it has no text of its own.

    Example:
        >>> import ast
        >>> written(ast.parse("f'x must be 2-D, got {x.dim()}-D'", mode="eval").body)
        'x must be 2-D, got {x.dim()}-D'
    """
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        parts = []
        for value in node.values:
            if isinstance(value, ast.FormattedValue):
                parts.append(f"{{{ast.unparse(value.value)}}}")
            elif isinstance(value, ast.Constant):
                parts.append(str(value.value))
        return "".join(parts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mod):
        left, right = written(node.left), written(node.right)
        if left is None and right is None:
            return None
        return (left or f"{{{ast.unparse(node.left)}}}") + (
            right or f"{{{ast.unparse(node.right)}}}"
        )
    if isinstance(node, ast.IfExp):
        both = [text for text in (written(node.body), written(node.orelse)) if text is not None]
        return " | ".join(both) if both else None
    return None


def messages(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of each ``raise`` whose text stands there."""
    for node in nodes:
        call = node.exc if isinstance(node, ast.Raise) else None
        if not isinstance(call, ast.Call):
            continue
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        texts = [text for text in map(written, given) if text is not None]
        if READ.search(name) and name not in SILENT and texts and isinstance(node, ast.Raise):
            # Values that are arguments of the exception itself count as shown: it puts them into its text.
            shown = "".join(
                f" {{{ast.unparse(value)}}}" for value in given if written(value) is None
            )
            yield node.lineno, " ".join(texts) + shown


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
        # The text that Python itself has for names that are not there.
        if missing := [] if "has no attribute" in text else lacks(text):
            yield line, f"lacks {', '.join(missing)}: {text}"

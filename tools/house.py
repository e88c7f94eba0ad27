#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the house: what imports what, how large it is, and which habits are left.

``python tools/house.py`` prints the table of checks: number, bound, goal. ``tests/test_house.py`` holds the numbers.

``python tools/house.py --show CHECK`` lists what a check counts. ``--tighten`` lowers the bounds in
``tests/data/house.tsv`` to what was reached. ``--set CHECK`` writes the present number of a check, a larger one too;
``--set all`` writes each. Say in the commit why. All is read from the sources, so nothing has to be installed.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import gc
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import generate_isa
import house_messages
from house_rooms import ARROWS, HOUSE, room_of

__all__ = [
    "CHECKS",
    "Finding",
    "Import",
    "Module",
    "counts",
    "imports",
    "modules",
    "table",
    "verdict",
]

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "data" / "house.tsv"
PLACES = ROOT / "tests" / "data" / "house_places.tsv"
#: Import names that come with a wheel of another name.
ALIASES = {"intel_extension_for_pytorch": "ipex", "ipex_bench": "ipex", "ipex_cli": "ipex"}
WHEELS = {*ARROWS, *ALIASES}


#: Nodes without others below them that no check looks for: half of all.
SIMPLE = (ast.Name, ast.expr_context, ast.operator)
#: Nodes that checks look for.
KINDS = (
    *(ast.Import, ast.ImportFrom, ast.If, ast.Call, ast.Raise, ast.Constant),
    *(ast.Tuple, ast.Set, ast.List),
    *(ast.Assign, ast.FunctionDef, ast.AsyncFunctionDef, ast.Try),
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a check counts.

    Attributes:
        place: The file, or the room, that has it.
        line: Line of the file, 0 if it is about the whole place.
        text: What it is.
        count: How much it counts.
    """

    place: str
    line: int
    text: str
    count: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """One Python file of a wheel.

    Attributes:
        name: Full name, ``ipex_core.nn``.
        path: Its file.
        text: Its source.
    """

    name: str
    path: Path
    text: str

    @property
    def wheel(self) -> str:
        """Import name of its wheel."""
        top = self.name.partition(".")[0]
        return ALIASES.get(top, top)

    @property
    def room(self) -> str:
        """Wheel and room, ``ipex_core/nn``."""
        return f"{self.wheel}/{room_of(self.wheel, self.name)}".removesuffix("/")

    @property
    def file(self) -> str:
        """Path from the root of the checkout."""
        return self.path.relative_to(ROOT).as_posix()

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Nodes of its syntax tree, of the kinds that checks look for."""
        collected = gc.isenabled()
        gc.disable()  # a tree has no garbage, but makes the collector walk through all that there is
        try:
            found: list[ast.AST] = [ast.parse(self.text)]
            for node in found:  # as `ast.walk` does, but quicker
                for field in node._fields:
                    value = getattr(node, field, None)
                    if isinstance(value, list):
                        found += [item for item in value if isinstance(item, ast.AST)]
                    elif isinstance(value, ast.AST) and not isinstance(value, SIMPLE):
                        found.append(value)
            return [node for node in found if isinstance(node, KINDS)]
        finally:
            if collected:
                gc.enable()


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name.

    Attributes:
        module: Who imports.
        target: Full name of the module that is imported; of the house or not.
        name: What is taken from it, "" for the module itself.
        line: Line of the import.
        typing: Whether only type checkers see it.
    """

    module: Module
    target: str
    name: str
    line: int
    typing: bool


@functools.cache
def modules() -> dict[str, Module]:
    """Return all modules of all wheels by name."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts[3:])
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        found[name] = Module(name, path, path.read_text(encoding="utf-8"))
    return found


def forget() -> None:
    """Read the sources again at the next check, and free their syntax trees."""
    for cache in (modules, imports, graph, counts):
        cache.cache_clear()


def _typing_only(nodes: Iterable[ast.AST]) -> set[ast.AST]:
    """Return the nodes below ``if TYPE_CHECKING:``."""
    return {
        inner
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    """Return the full name of the module that a ``from`` import names."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    up = node.level - (module.path.name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], *filter(None, [node.module])])


@functools.cache
def imports() -> tuple[Import, ...]:
    """Return all imports of all wheels, those in functions and ``import_module("...")`` included."""
    return tuple(entry for module in modules().values() for entry in _imports_of(module))


def _imports_of(module: Module) -> Iterator[Import]:
    typing = _typing_only(module.nodes)
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, "", node.lineno, node in typing)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield Import(
                    module, _absolute(module, node), alias.name, node.lineno, node in typing
                )
        elif (name := _imported_by_call(node)) is not None:
            assert isinstance(node, ast.Call)
            if isinstance(name, ast.Constant) and not str(name.value).startswith("."):
                yield Import(module, str(name.value), "", node.lineno, False)


def _imported_by_call(node: ast.AST) -> ast.expr | None:
    """Return the first argument of ``import_module(...)`` and ``__import__(...)``."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    return node.args[0] if name in {"import_module", "__import__"} else None


def resolved(entry: Import) -> Module | None:
    """Return the module of the house that an import runs, or None for other libraries."""
    found = modules()
    for name in (f"{entry.target}.{entry.name}", entry.target):
        if name in found:
            return found[name]
    return None


@functools.cache
def graph(typing: bool) -> dict[Module, set[Module]]:
    """Return which module imports which within the house.

    Args:
        typing: Whether imports under ``TYPE_CHECKING`` count.
    """
    arrows: dict[Module, set[Module]] = {module: set() for module in modules().values()}
    for entry in imports():
        target = resolved(entry)
        if target is not None and target is not entry.module and (typing or not entry.typing):
            arrows[entry.module].add(target)
    return arrows


def components(arrows: dict[Module, set[Module]]) -> list[list[Module]]:
    """Return the cycles of a graph: its strongly connected components of more than one module."""
    numbers: dict[Module, int] = {}
    lowest: dict[Module, int] = {}
    stack: list[Module] = []
    found = []
    for root, targets in arrows.items():
        if root in numbers:
            continue
        work = [(root, iter(sorted(targets, key=lambda m: m.name)))]
        numbers[root] = lowest[root] = len(numbers)
        stack.append(root)
        while work:
            module, rest = work[-1]
            for target in rest:
                if target not in numbers:
                    numbers[target] = lowest[target] = len(numbers)
                    stack.append(target)
                    work.append((target, iter(sorted(arrows[target], key=lambda m: m.name))))
                    break
                if target in stack:
                    lowest[module] = min(lowest[module], numbers[target])
            else:
                work.pop()
                if work:
                    lowest[work[-1][0]] = min(lowest[work[-1][0]], lowest[module])
                if lowest[module] == numbers[module]:
                    at = stack.index(module)
                    component, stack[at:] = stack[at:], []
                    if len(component) > 1:
                        found.append(component)
    return found


# -- imports ------------------------------------------------------------------------------------------------------


def wheel_arrows() -> Iterator[Finding]:
    """Imports of a wheel that the importing wheel may not know."""
    for entry in imports():
        top = entry.target.partition(".")[0]
        wheel = ALIASES.get(top, top)
        own = entry.module.wheel
        if top in WHEELS and wheel != own and wheel not in ARROWS[own]:
            yield Finding(entry.module.file, entry.line, f"imports {entry.target}")


#: Files that may compute the name of what they import: helpers of ``__getattr__``, lists of a folder, names of IPEX.
COMPUTED = re.compile(r"__init__\.py$|/_lazy\.py$|/ipex/compat/|/ipex_bench/")


def hidden_imports() -> Iterator[Finding]:
    """``import_module`` of a computed name that may be another wheel's, outside of the files that may."""
    for module in modules().values():
        if COMPUTED.search(module.file):
            continue
        for node in module.nodes:
            name = _imported_by_call(node)
            written = "" if name is None else ast.unparse(name)
            if "f'" in written and not written.startswith(f"f'{module.wheel}."):
                assert name is not None
                yield Finding(module.file, name.lineno, f"imports {written}")


def room_arrows() -> Iterator[Finding]:
    """Imports of a room that stands below the importing one, within a wheel."""
    order = {(w, room.name): i for w, rooms in HOUSE.items() for i, room in enumerate(rooms)}
    seen = set()
    for entry in imports():
        target = resolved(entry)
        if target is None or entry.typing or target.wheel != entry.module.wheel:
            continue
        rooms = [room_of(module.wheel, module.name) or "" for module in (entry.module, target)]
        above, below = (order[target.wheel, room] for room in rooms)
        # `from ipex_core import nn` in a function reaches a public name, through the face of the wheel.
        if above < below and (entry.module, target) not in seen and target.room != target.wheel:
            seen.add((entry.module, target))
            text = f"{rooms[0]} imports {rooms[1]}: {entry.module.name} -> {target.name}"
            yield Finding(entry.module.file, entry.line, text)


def _cycles(typing: bool) -> Iterator[Finding]:
    for component in components(graph(typing)):
        names = sorted(module.name for module in component)
        yield Finding(names[0], 0, f"{len(names)} modules: {', '.join(names)}")


def _in_cycles(typing: bool) -> Iterator[Finding]:
    for component in components(graph(typing)):
        inside = set(component)
        for module in sorted(component, key=lambda m: m.name):
            others = sorted(target.name for target in graph(typing)[module] & inside)
            yield Finding(module.file, 0, f"imports {', '.join(others)}")


def cycles() -> Iterator[Finding]:
    """Cycles of imports, those in functions included."""
    return _cycles(False)


def cycles_typing() -> Iterator[Finding]:
    """Cycles of imports, those for type checkers included."""
    return _cycles(True)


def modules_in_cycles() -> Iterator[Finding]:
    """Modules that lie in a cycle of imports."""
    return _in_cycles(False)


def modules_in_cycles_typing() -> Iterator[Finding]:
    """Modules that lie in a cycle of imports, those for type checkers included."""
    return _in_cycles(True)


#: An import in Python or in Markdown; quicker than a syntax tree of thousands of tests.
IMPORT = re.compile(
    r"^\s*(?:>>> )?(?:from (?P<module>[\w.]+) )?import (?:\((?P<many>[^)]*)\)|(?P<one>[^\n(;#]+))",
    re.MULTILINE,
)


def _private(*parts: str) -> bool:
    return any(part.startswith("_") and not part.endswith("__") for part in parts)


def private_imports() -> Iterator[Finding]:
    """Private names of one wheel that another one imports."""
    for entry in imports():
        target = entry.target.split(".")
        top = target[0]
        if (
            top in WHEELS
            and ALIASES.get(top, top) != entry.module.wheel
            and _private(*target, *filter(None, [entry.name]))
        ):
            name = f"{entry.target}.{entry.name}".strip(".")
            yield Finding(entry.module.file, entry.line, f"imports {name}")


def _private_imports_of(path: Path) -> Iterator[Finding]:
    """Yield the private imports of a file that belongs to no wheel: Python, or Markdown with Python in it."""
    text = path.read_text(encoding="utf-8")
    file = path.relative_to(ROOT).as_posix()
    for match in IMPORT.finditer(text):
        names = re.sub(r"#.*", "", match["many"] or match["one"])
        line = text.count("\n", 0, match.start(match.lastgroup or 0)) + 1
        start = f"{match['module']}." if match["module"] else ""
        for name in re.findall(r"([\w.]+)(?:\s+as\s+\w+)?", names):
            parts = f"{start}{name}".split(".")
            # Names of IPEX, some of which begin with an underscore, are public: scripts import them.
            own = parts[0] in WHEELS and parts[0] != "intel_extension_for_pytorch"
            if own and _private(*parts):
                yield Finding(file, line, f"imports {'.'.join(parts)}")


def private_imports_docs() -> Iterator[Finding]:
    """Private names that docs, tools, examples and benchmarks import."""
    yield from _private_in("docs/*.md", "docs/tools/*.md", "docs/tutorials/**/*", "docs/_ext/*.py")
    yield from _private_in("tools/*.py", "examples/**/*.py", "packages/*/benchmarks/**/*.py")
    yield from _private_in("packages/*/README.md", "README.md", "CONTRIBUTING.md")


def private_imports_tests() -> Iterator[Finding]:
    """Private names that tests import."""
    yield from _private_in("packages/*/tests/**/*.py", "tests/**/*.py", "conftest.py")


def _private_in(*patterns: str) -> Iterator[Finding]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.suffix in {".py", ".md"}:
                yield from _private_imports_of(path)


# -- sizes --------------------------------------------------------------------------------------------------------


def _lines(module: Module) -> int:
    return module.text.count("\n")


def lines() -> Iterator[Finding]:
    """Lines of Python in src."""
    for module in modules().values():
        yield Finding(module.room, 0, "", _lines(module))


def files() -> Iterator[Finding]:
    """Python files in src."""
    for module in modules().values():
        yield Finding(module.file, 0, "")


def small_files() -> Iterator[Finding]:
    """Python files in src below 60 lines."""
    for module in modules().values():
        if _lines(module) < 60:
            yield Finding(module.file, 0, f"{_lines(module)} lines")


def facade_lines() -> Iterator[Finding]:
    """Lines of the facade, without names of IPEX and the command."""
    for module in modules().values():
        if module.name.split(".")[0] == "ipex" and module.name.split(".")[1:2] not in (
            ["compat"],
            ["cli"],
        ):
            yield Finding(module.file, 0, module.name, _lines(module))


# -- mechanisms ---------------------------------------------------------------------------------------------------


def meta_path() -> Iterator[Finding]:
    """Files that put a finder of their own on ``sys.meta_path``."""
    for module in modules().values():
        for number, line in enumerate(module.text.splitlines(), 1):
            if re.search(r"sys\.meta_path(\.(insert|append)\(|\[.*\] *=)", line):
                yield Finding(module.file, number, line.strip())


def class_assignments() -> Iterator[Finding]:
    """Places that change the class of an object, outside of ``module_swap`` and ``compat``."""
    for module in modules().values():
        if re.search(r"/(module_swap|compat)/", module.file):
            continue
        for number, line in enumerate(module.text.splitlines(), 1):
            if re.search(r"\.__class__ *= |setattr\(.*[\"']__class__[\"']", line):
                yield Finding(module.file, number, line.strip())


def hidden_attributes() -> Iterator[Finding]:
    """Names ``_ipex_*`` that are kept on objects of the user."""
    first: dict[str, Finding] = {}
    for module in modules().values():
        for number, line in enumerate(module.text.splitlines(), 1):
            for name in re.findall(r"[\"'.](_ipex_[a-z_]+)", line):
                first.setdefault(name, Finding(module.file, number, name))
    yield from first.values()


#: What only few places may do, and where anybody may.
HACKS = {
    r"\bsys\._getframe\b": "",
    r"\bsys\.argv\b": r"/(cli|launch|commands|ipex_cli)(/|\.py)",
    r"(?<![.\w])exec\(": "",
    r"\btypes\.FunctionType\(": "",
}


def hacks() -> Iterator[Finding]:
    """``sys._getframe``, ``exec``, ``types.FunctionType``; ``sys.argv`` outside of commands."""
    for module in modules().values():
        for number, line in enumerate(module.text.splitlines(), 1):
            for pattern, free in HACKS.items():
                if re.search(pattern, line) and not (free and re.search(free, module.file)):
                    yield Finding(module.file, number, line.strip())


def isa_lists() -> Iterator[Finding]:
    """Files that name four ISA levels or more; one is generated from the table of the kernels."""
    cmake = ROOT / "packages" / "ipex-cpu-kernels" / "cmake" / "IsaLevels.cmake"
    levels = generate_isa.levels(cmake.read_text("utf-8"))
    for module in modules().values():
        named = {
            str(node.value)
            for node in module.nodes
            if isinstance(node, ast.Constant) and node.value in levels
        }
        if len(named) >= 4:
            yield Finding(module.file, 0, ", ".join(sorted(named)))


def dtype_triples() -> Iterator[Finding]:
    """Definitions of the three float dtypes, in any order."""
    triple = {f"torch.{name}" for name in ("float32", "bfloat16", "float16")}
    for module in modules().values():
        for node in module.nodes:
            items = node.elts if isinstance(node, ast.Tuple | ast.Set | ast.List) else []
            if len(items) == 3 and {ast.unparse(item) for item in items} == triple:
                yield Finding(module.file, items[0].lineno, ast.unparse(node))


# -- words --------------------------------------------------------------------------------------------------------

IDIOMS = re.compile(
    r"\bgot\s+another\b|\b(?:that|those) of\b|\bis none\b|\b(?i:nobody|whoever|anew)\b"
)
ISE = re.compile(r"(?<![A-Za-z])(?i:[a-z]{3,}is(?:e[sdr]?|ers|ing|ations?|able))(?![a-z])")
#: Words that end so in American English, too.
NOT_ISE = re.compile(
    r"(?i)wise|promis|premis|prais|precis|nois|pois|exercis|advis|revis|devis|supervis|surpris|compris|concise|"
    r"expertis|disguis|treatis|franchis|paradis|rais|aris|axis|disable|televis|improvis|advertis|merchandis|bruis|"
    r"cruis|demis|enterpris|incis|excis|likewise|mayonnais|despis|chis|vis[ei]|malaise"
)


def _texts() -> Iterator[tuple[str, str]]:
    """Yield (file, text) of what people read: Python and C++ sources, and docs."""
    for module in modules().values():
        yield module.file, module.text
    native = ("packages/*/csrc/**/*.h", "packages/*/csrc/**/*.cpp")
    for pattern in (*native, "docs/*.md", "docs/tools/*.md", "docs/tutorials/**/*.md", "*.md"):
        for path in sorted(ROOT.glob(pattern)):
            # The changelog tells what was; the glossary names the words.
            if path.name not in {"CHANGELOG.md", "glossary.md"}:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def idioms() -> Iterator[Finding]:
    """Phrases that need a second reading, in src, csrc and docs."""
    for file, text in _texts():
        for match in IDIOMS.finditer(text):
            yield Finding(file, text.count("\n", 0, match.start()) + 1, match[0].replace("\n", " "))


def ise_spellings() -> Iterator[Finding]:
    """British spellings with -ise, in src, csrc and docs."""
    for file, text in _texts():
        for match in ISE.finditer(text):
            if not NOT_ISE.search(match[0]):
                yield Finding(file, text.count("\n", 0, match.start()) + 1, match[0])


def error_messages() -> Iterator[Finding]:
    """Messages of errors that lack what was expected, what was given, or what to do."""
    for module in modules().values():
        for line, text in house_messages.incomplete(module.nodes):
            yield Finding(module.file, line, text)


def error_idioms() -> Iterator[Finding]:
    """Idioms in messages of errors, Python and C++."""
    for module in modules().values():
        for line, text in house_messages.messages(module.nodes):
            if IDIOMS.search(text):
                yield Finding(module.file, line, text)
    for pattern in ("packages/*/csrc/**/*.h", "packages/*/csrc/**/*.cpp"):
        for path in sorted(ROOT.glob(pattern)):
            for number, row in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                for quoted in re.findall(r'"((?:[^"\\]|\\.)*)"', row):
                    if IDIOMS.search(quoted):
                        yield Finding(path.relative_to(ROOT).as_posix(), number, quoted)


# -- the table ----------------------------------------------------------------------------------------------------

#: Name of a check in the table -> what it counts.
CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    check.__name__: check
    for check in (
        *(wheel_arrows, hidden_imports, room_arrows),
        *(cycles, cycles_typing, modules_in_cycles, modules_in_cycles_typing),
        *(private_imports, private_imports_docs, private_imports_tests),
        *(lines, files, small_files, facade_lines),
        *(meta_path, class_assignments, hidden_attributes, hacks, isa_lists, dtype_triples),
        *(idioms, ise_spellings, error_messages, error_idioms),
    )
}


@dataclasses.dataclass(frozen=True)
class Bound:
    """One row of the table.

    Attributes:
        check: Name of a check, or ``path NAME``.
        today: The most that is allowed.
        slack: How far below the number may be before the bound has to follow.
        goal: What it shall become.
    """

    check: str
    today: int
    slack: int
    goal: int


def table() -> dict[str, Bound]:
    """Return the bounds of ``tests/data/house.tsv`` by the name of the check."""
    rows = [line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return {row[0]: Bound(row[0], *map(int, row[1:])) for row in rows[1:]}


@functools.cache
def counts(check: str) -> dict[str, int]:
    """Return place -> number of one check."""
    found: Counter[str] = Counter()
    for finding in CHECKS[check]():
        found[finding.place] += finding.count
    return dict(found)


def places() -> dict[str, dict[str, int]]:
    """Return check -> place -> number, as they were when the bounds were written."""
    found: dict[str, dict[str, int]] = {}
    for line in PLACES.read_text(encoding="utf-8").splitlines()[1:]:
        check, place, number = line.split("\t")
        found.setdefault(check, {})[place] = int(number)
    return found


def grown(check: str, now: dict[str, int]) -> list[str]:
    """Return what is in places that had less of it when the bound was written.

    Args:
        check: Name of the check.
        now: Place -> number.
    """
    before = places().get(check, {})
    more = {place for place, number in now.items() if number > before.get(place, 0)}
    found = [f"{place}: {now[place]}, was {before.get(place, 0)}" for place in sorted(more)]
    for finding in CHECKS[check]() if check in CHECKS else ():
        if finding.place in more and finding.text:
            at = f"{finding.place}:{finding.line}" if finding.line else finding.place
            found.append(f"  {at}: {finding.text}")
    return found


def verdict(check: str, now: dict[str, int]) -> str:
    """Return what is wrong with the number of a check, with names and what to do, or an empty string.

    Args:
        check: Name of a row of the table.
        now: Place -> number.
    """
    bound, number = table()[check], sum(now.values())
    if number > bound.today:
        more = grown(check, now)
        return "\n".join(
            [
                f"{check} is {number}, at most {bound.today} (goal {bound.goal}). What is new:",
                *more,
                "Do without it. If it has to be, `python tools/house.py --set "
                f"{check!r}` raises the bound; say why in the commit.",
            ]
        )
    if number < bound.today - bound.slack:
        return (
            f"{check} fell to {number}, its bound is still {bound.today}: run"
            " `python tools/house.py --tighten --paths`, so that it cannot grow again."
        )
    return ""


def write(
    names: Iterable[str] = (), measured: dict[str, dict[str, int]] | None = None
) -> list[str]:
    """Lower the bounds to the present numbers and remember where things are.

    Args:
        names: Checks whose bound takes the present number even if it has grown.
        measured: ``path NAME`` -> place -> number, of the checks that run the program.

    Returns:
        One line for each bound that changed.
    """
    now = {check: counts(check) for check in CHECKS} | (measured or {})
    old = places() if PLACES.exists() else {}
    told, bounds, rows = [], ["check\ttoday\tslack\tgoal"], ["check\tplace\tnumber"]
    for check, bound in table().items():
        number = sum(now[check].values()) if check in now else bound.today
        fell = number <= bound.today or check in names
        if fell and number != bound.today:
            told.append(f"{check}: {bound.today} -> {number}")
            bound = dataclasses.replace(bound, today=number, goal=min(bound.goal, number))
        bounds.append("\t".join(map(str, dataclasses.astuple(bound))))
        # What has grown beyond its bound keeps its old places, so that the test still says what is new.
        kept = now[check] if fell and check in now else old.get(check, {})
        rows += [f"{check}\t{place}\t{count}" for place, count in sorted(kept.items())]
    TABLE.write_text("\n".join(bounds) + "\n", encoding="utf-8")
    PLACES.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return told


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--show", choices=CHECKS, help="list what this check counts")
    parser.add_argument("--tighten", action="store_true", help="lower the bounds to what is")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="CHECK", help="write these bounds, or `all`"
    )
    parser.add_argument("--paths", action="store_true", help="run the program, too: path budgets")
    options = parser.parse_args(arguments)
    if options.set == ["all"]:
        options.set = list(table())
    if unknown := set(options.set) - set(table()):
        parser.error(f"--set takes names of the table, got {', '.join(sorted(unknown))}")
    if options.show:
        for finding in CHECKS[options.show]():
            print(f"{finding.place}:{finding.line}: {finding.text} ({finding.count})")
        return 0
    measured: dict[str, dict[str, int]] = {}
    if options.paths or any(name.startswith("path ") for name in options.set):
        import house_paths

        measured = {
            f"path {name}": dict.fromkeys(files, 1)
            for name, files in house_paths.measured().items()
        }
    if options.tighten or options.set:
        print("\n".join(write(options.set, measured)) or "no bound changes")
        return 0
    print(f"{'check':26} {'now':>7} {'bound':>7} {'goal':>7}  counts")
    for check, bound in table().items():
        what = (CHECKS[check].__doc__ or "") if check in CHECKS else "Files that it runs through."
        found = counts(check) if check in CHECKS else measured.get(check)
        now = "" if found is None else sum(found.values())
        print(
            f"{check:26} {now:>7} {bound.today:>7} {bound.goal:>7}  {what.splitlines()[0].replace('', '')}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

# SPDX-License-Identifier: Apache-2.0
"""Fail when versions that must agree do not.

Checked:

1. A package's version is the same wherever it is written (``_version.py``, ``pyproject.toml``).
2. A range by which one package depends on another (extras and build requirements included) admits the version of that
   package in this tree, and has both ends, so that a later incompatible release is not picked up.
3. The contract number of the native boundary, ``KERNEL_API``, is the same in ipex_core and in the C++ headers.
4. The tools pinned in ``.pre-commit-config.yaml`` are those of ``constraints.txt``.
5. Every package has a section in ``CHANGELOG.md``.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover
    import tomli as tomllib

__all__ = ["Project", "load_project", "main", "problems"]

_VERSION = re.compile(r"""^__version__(?:\s*:\s*\w+)?\s*=\s*["']([^"']+)["']""", re.MULTILINE)
_PYTHON_API = re.compile(r"^KERNEL_API(?:\s*:\s*\w+)?\s*=\s*(\d+)", re.MULTILINE)
_NATIVE_API = re.compile(r"\b(?:kKernelApi|IPEX_KERNEL_API_VERSION)\b\s*=?\s*(\d+)")


@dataclasses.dataclass(frozen=True)
class Project:
    """What matters here of one package's ``pyproject.toml``."""

    name: str
    version: str
    dependencies: tuple[Requirement, ...]
    optional: tuple[Requirement, ...]
    build: tuple[Requirement, ...]
    complaints: tuple[str, ...] = ()


def load_project(folder: Path) -> Project:
    """Read the package in ``folder``."""
    data = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    table = data["project"]
    written = {
        path.relative_to(folder).as_posix(): match.group(1)
        for path in sorted(folder.glob("src/*/_version.py"))
        if (match := _VERSION.search(path.read_text(encoding="utf-8")))
    }
    if "version" in table:
        written["pyproject.toml"] = table["version"]
    complaints = []
    if not written:
        complaints.append(f"{table['name']}: no version found")
    elif len(set(written.values())) > 1:
        complaints.append(f"{table['name']}: versions differ: {written}")
    extras = table.get("optional-dependencies", {})
    # Those that a build completes.
    later = data.get("tool", {}).get("dynamic-metadata", ())
    needed = [text for part in (table, *later) for text in part.get("dependencies", ())]
    return Project(
        name=canonicalize_name(table["name"]),
        version=next(iter(written.values()), ""),
        dependencies=tuple(map(Requirement, needed)),
        optional=tuple(Requirement(text) for texts in extras.values() for text in texts),
        build=tuple(map(Requirement, data["build-system"]["requires"])),
        complaints=tuple(complaints),
    )


def range_problems(projects: dict[str, Project]) -> list[str]:
    """Compare the ranges between packages with the versions in the tree."""
    found = []
    for project in projects.values():
        for requirement in (*project.dependencies, *project.optional, *project.build):
            sibling = projects.get(canonicalize_name(requirement.name))
            if sibling is None or sibling is project:
                continue
            if not requirement.specifier.contains(sibling.version, prereleases=True):
                found.append(
                    f"{project.name}: '{requirement}' excludes {sibling.name} {sibling.version} of this tree"
                )
            operators = {part.operator for part in requirement.specifier}
            if not operators & {"~=", "==", "<", "<="}:
                found.append(f"{project.name}: '{requirement}' has no upper end")
    return found


def api_problems(root: Path) -> list[str]:
    """Compare KERNEL_API of core with the one compiled into the kernels."""
    python = root / "packages/ipex-core/src/ipex_core/kernels/providers.py"
    match = _PYTHON_API.search(python.read_text(encoding="utf-8")) if python.exists() else None
    if match is None:
        return ["ipex-core: KERNEL_API not found in kernels/providers.py"]
    found = []
    for native in sorted(root.glob("packages/*-kernels")):
        numbers = {
            path.relative_to(root).as_posix(): number.group(1)
            for path in sorted(native.glob("csrc/**/*.h"))
            if (number := _NATIVE_API.search(path.read_text(encoding="utf-8")))
        }
        in_python = {
            path.relative_to(root).as_posix(): number.group(1)
            for path in sorted(native.glob("src/*/*.py"))
            if (number := _PYTHON_API.search(path.read_text(encoding="utf-8")))
        }
        if not numbers:
            found.append(f"{native.name}: no header defines the KERNEL_API number")
        found += [
            f"{path}: KERNEL_API is {number}, ipex_core has {match.group(1)}"
            for path, number in {**numbers, **in_python}.items()
            if number != match.group(1)
        ]
    return found


def pin_problems(root: Path) -> list[str]:
    """Compare the exact pins of the hooks with the constraints."""
    hooks = root / ".pre-commit-config.yaml"
    constraints = root / "constraints.txt"
    if not (hooks.exists() and constraints.exists()):
        return []
    pins = set(
        re.findall(r"^[\w.-]+==[\w.]+", constraints.read_text(encoding="utf-8"), re.MULTILINE)
    )
    used = re.findall(r"[\w.-]+==[\w.]+", hooks.read_text(encoding="utf-8"))
    return [
        f".pre-commit-config.yaml: {pin} is not in constraints.txt"
        for pin in used
        if pin not in pins
    ]


def changelog_problems(root: Path, projects: dict[str, Project]) -> list[str]:
    """Look for a section of each package in the changelog."""
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.exists() else ""
    return [
        f"CHANGELOG.md: no section '## {name}'"
        for name in projects
        if not re.search(rf"^## {re.escape(name)}$", text, re.MULTILINE)
    ]


def problems(root: Path) -> list[str]:
    """Return all disagreements in the tree at ``root``."""
    folders = sorted(path.parent for path in root.glob("packages/*/pyproject.toml"))
    projects = {project.name: project for project in map(load_project, folders)}
    found = [complaint for project in projects.values() for complaint in project.complaints]
    found += range_problems(projects)
    found += api_problems(root)
    found += pin_problems(root)
    found += changelog_problems(root, projects)
    return found


def main() -> int:
    """Print the disagreements; return 1 if there are any."""
    found = problems(Path(__file__).resolve().parent.parent)
    for line in found:
        print(line)
    if not found:
        print("check_versions: ok")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

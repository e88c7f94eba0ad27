# SPDX-License-Identifier: Apache-2.0
"""Read the table of ISA levels, and write its Python side: packages/ipex-core/src/ipex_core/config/isa_levels.py.

The table is ``packages/ipex-cpu-kernels/cmake/IsaLevels.cmake``. ipex-core builds from its own sdist, which does not
have that file, so what it needs is a generated file in the repository; with ``--check`` this tool fails if that is out
of date.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

__all__ = ["FILE", "TABLE", "Level", "levels", "main", "text"]

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "packages/ipex-cpu-kernels/cmake/IsaLevels.cmake"
FILE = ROOT / "packages/ipex-core/src/ipex_core/config/isa_levels.py"
HEAD = '''\
# SPDX-License-Identifier: Apache-2.0
# Generated from packages/ipex-cpu-kernels/cmake/IsaLevels.cmake, do not edit: python tools/generate_isa.py
"""The ISA levels of the CPU kernels, lowest first, and what each needs."""

'''
TAIL = """
#: Level -> the features that it needs, by their names in ``/proc/cpuinfo``. Used only to explain: the choice is made by
#: the kernel package from cpuid.
LEVEL_FEATURES: dict[str, tuple[str, ...]] = {
    level: tuple(feature for bit in bits.split() for feature in _NAMES[bit].split())
    for level, bits in _BITS.items()
}

#: Levels that this release knows, lowest first. A kernel package may bring more (see `variables.py`).
ISA_LEVELS: tuple[str, ...] = tuple(LEVEL_FEATURES)
"""


@dataclasses.dataclass(frozen=True)
class Level:
    """One row of the table.

    Attributes:
        name: Such as ``avx512_bf16``.
        bits: Feature bits of ``csrc/runtime/cpu_features.h`` that it needs -> their names in ``/proc/cpuinfo``.
    """

    name: str
    bits: dict[str, tuple[str, ...]]


def levels(table: str | None = None) -> dict[str, Level]:
    """Return the levels by name, lowest first.

    Args:
        table: Text of a table; None reads `TABLE`.

    Raises:
        ValueError: A level needs a bit that has no row in ``IPEX_ISA_FEATURES``, or there is no level at all.
    """
    if table is None:
        table = TABLE.read_text(encoding="utf-8")
    names = {bit: tuple(row.split()) for bit, row in _rows(table, r"k\w+")}
    found = {}
    for name, row in _rows(table, r"[a-z0-9_]+"):
        bits = tuple(bit for bit in row.partition("|")[0].split("+") if bit != "0")
        if missing := [bit for bit in bits if bit not in names]:
            raise ValueError(
                f"IsaLevels.cmake: the level {name} needs {', '.join(missing)}, which IPEX_ISA_FEATURES does not name:"
                f' add a row such as "{missing[0]}|name_in_cpuinfo"'
            )
        found[name] = Level(name, {bit: names[bit] for bit in bits})
    if not found:
        raise ValueError('IsaLevels.cmake: expected rows such as "default|0|", found none')
    return found


def _rows(table: str, name: str) -> list[tuple[str, str]]:
    return re.findall(rf'^\s*"({name})\|([^"]*)"', table, re.MULTILINE)


def text(table: str | None = None) -> str:
    """Return what the file must contain, as the formatter would write it."""
    found = levels(table).values()
    names = {b: " ".join(f) for level in found for b, f in level.bits.items()}
    bits = {level.name: " ".join(level.bits) for level in found}
    return f"{HEAD}{_dict('_NAMES', names)}{_dict('_BITS', bits)}{TAIL}"


def _dict(name: str, rows: dict[str, str]) -> str:
    return f"{name} = {{\n" + "".join(f'    "{k}": "{v}",\n' for k, v in rows.items()) + "}\n"


def main(arguments: list[str]) -> int:
    """Write the file, or compare it; return 1 if it is out of date."""
    wanted = text()
    if "--check" not in arguments:
        FILE.write_text(wanted, encoding="utf-8")
        return 0
    if FILE.exists() and FILE.read_text(encoding="utf-8") == wanted:
        print("generate_isa: ok")
        return 0
    print(f"{FILE.relative_to(ROOT)} is out of date: python tools/generate_isa.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the table of measured choices from the results of ``ipex bench corpus --kernels`` in ``docs/data``.

``ipex_core/kernels/measured.tsv`` chooses between our kernel, oneDNN and the stock op. Of a shape that several cases
share, the side is taken whose worst case is the best. Ours is taken unless another side is faster by 3 %::

    python tools/policy_table.py            # write the table
    python tools/policy_table.py --check    # exit 1 if it is not what this program writes
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
for _wheel in ("ipex", "ipex-core"):
    sys.path.insert(0, str(ROOT / "packages" / _wheel / "src"))

from ipex_bench import corpus  # noqa: E402
from ipex_core.kernels import measured  # noqa: E402

__all__ = ["RESULTS", "lines", "times"]

RESULTS = "corpus-*.json"
Times = dict[str, float]
_Shape = tuple[str, str, str, str, tuple[int, ...]]


def times(result: corpus.Measured) -> Times:
    """Return the microseconds of each side that was measured."""
    found = {name: us for name, us in result.us.items() if name in measured.SIDES}
    # What ran as "ours" is the time of its side, with the way there.
    if result.side != "stock":
        found[result.side] = result.us["ours"]
    return found


def side_of(group: Iterable[Times], good: Iterable[str | None] = ()) -> str:
    """Return the side for cases that share a shape.

    Args:
        group: Microseconds of the sides in each case.
        good: For each case, the side that ran in pairs with the others and was not slower beyond its spread.
    """
    cases = list(group)
    paired = [*good] or [None] * len(cases)

    def worst(side: str) -> float:
        return min(
            1.0 if side == same else min(one.values()) / one[side] if side in one else 0.0
            for one, same in zip(cases, paired, strict=True)
        )

    best = max(measured.SIDES, key=worst)
    return "ipex" if worst("ipex") >= corpus.LEAST else best


def lines(folder: Path = ROOT / "docs" / "data") -> Iterator[str]:
    """Yield the lines of the table, with its head."""
    text = measured.FILE.read_text(encoding="utf-8")
    yield from (line for line in text.splitlines() if line.startswith("#"))
    groups: dict[_Shape, list[corpus.Measured]] = {}
    for file in sorted(folder.glob(RESULTS)):
        for result in corpus.read(file)[1]:
            chosen = corpus.chosen_by(result)
            if chosen is None:
                continue
            threads = "1" if result.threads == 1 else "many"
            shape = (result.level, threads, chosen[0], result.dtype, chosen[1])
            groups.setdefault(shape, []).append(result)
    common: tuple[str, ...] = ()
    for (*names, sizes), group in sorted(groups.items()):
        if tuple(names) != common:
            common = tuple(names)
            yield "\t".join(common)
        yield _line(sizes, group)


def _line(sizes: tuple[int, ...], results: list[corpus.Measured]) -> str:
    group = [times(result) for result in results]
    side = side_of(group, (None if result.slower else result.side for result in results))
    # Of several cases the one is shown in which the side does worst.
    shown: Mapping[str, float] = min(group, key=lambda one: min(one.values()) / one.get(side, 1e9))
    numbers = [
        _number(shown[name]) if name in shown else "-" for name in ("stock", "onednn", "ipex")
    ]
    return "\t".join([",".join(map(str, sizes)), side[0], *numbers])


def _number(microseconds: float) -> str:
    """Return a time with no more digits than a run would give again."""
    return f"{round(microseconds, 1 if microseconds >= 100 else 2):g}"


def main() -> int:
    """Write or check the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    text = "".join(line + "\n" for line in lines())
    if not parser.parse_args().check:
        measured.FILE.write_text(text, encoding="utf-8")
        return 0
    if measured.FILE.read_text(encoding="utf-8") == text:
        return 0
    print(f"{measured.FILE.name} is not what tools/policy_table.py writes; run it", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())

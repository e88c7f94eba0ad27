# SPDX-License-Identifier: Apache-2.0
"""Cases of the corpus, results in docs/data and the table of choices belong together."""

from __future__ import annotations

from pathlib import Path

import pytest

import corpus_cases
import policy_table
from ipex_bench import corpus
from ipex_core.kernels import measured

DATA = Path(__file__).resolve().parents[1] / "docs" / "data"
FILES = sorted(DATA.glob(policy_table.RESULTS))


def test_cases_are_what_the_tool_writes():
    text = corpus_cases.HEAD + "".join(line + "\n" for line in corpus_cases.lines())
    assert corpus_cases.FILE.read_text(encoding="utf-8") == text


def test_the_table_is_what_the_tool_writes():
    text = "".join(line + "\n" for line in policy_table.lines())
    assert measured.FILE.read_text(encoding="utf-8") == text


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_table_never_picks_a_side_that_was_measured_as_slower(file):
    rows = {
        (row.level, row.threads, row.op, row.dtype, row.sizes): row.side for row in measured.rows()
    }
    groups: dict[tuple[object, ...], list[corpus.Measured]] = {}
    for result in corpus.read(file)[1]:
        chosen = corpus.chosen_by(result)
        if chosen is not None:
            threads = "1" if result.threads == 1 else "many"
            shape = (result.level, threads, chosen[0], result.dtype, chosen[1])
            groups.setdefault(shape, []).append(result)
    slower = []
    for shape, results in groups.items():
        side, all_times = rows[shape], [policy_table.times(result) for result in results]

        def worse(one: dict[str, float], other: str, side: str = side) -> bool:
            return one.get(other, float("inf")) > one[side] / corpus.LEAST

        for result, times in zip(results, all_times, strict=True):
            # Of the side that ran as ours, the spread is known.
            beyond = result.slower if side == result.side else True
            faster = [name for name in times if times[name] < corpus.LEAST * times[side]]
            # What is faster here may be slower in another case of this shape, with an activation, say.
            never = [name for name in faster if not any(worse(one, name) for one in all_times)]
            if beyond and never:
                slower.append((result.op, result.sizes, result.dtype, result.threads, side, times))
    assert len(groups) > 100
    assert not slower, slower


def test_of_cases_with_one_shape_the_worst_decides():
    cases = [{"stock": 10.0, "ipex": 9.0}, {"stock": 5.0, "ipex": 10.0}]
    assert policy_table.side_of(cases) == "stock"
    assert policy_table.side_of(cases[:1]) == "ipex"
    assert policy_table.side_of([{"stock": 10.0, "onednn": 9.9, "ipex": 10.0}]) == "ipex"
    assert policy_table.side_of([{"stock": 10.0, "onednn": 5.0}]) == "onednn"

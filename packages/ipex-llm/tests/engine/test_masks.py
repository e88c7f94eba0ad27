# SPDX-License-Identifier: Apache-2.0
"""The threads that find the tokens that grammars allow."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from fake_runner import FakeRunner, drain, engine

from ipex_llm.engine import SamplingParams, masks


class Even:
    """Allows tokens with even ids; finds them when ``go`` is set."""

    def __init__(self, go: threading.Event | None = None) -> None:
        self.go = go
        self.done = False
        self.error = None
        self.single = 0

    def matcher(self):
        return self

    def fill(self, drafts=()):
        self.single += 1
        assert self.go is None or self.go.wait(30)

    def apply(self, row, ahead=0):
        row[1::2] = -float("inf")

    def accept(self, token):
        assert token % 2 == 0


class Many(Even):
    """Can be asked together with others."""

    calls: list[int] = []

    @staticmethod
    def fill_together(matchers: Sequence[Even]) -> None:
        Many.calls.append(len(matchers))


def run(grammars, **options):
    e = engine(FakeRunner(), max_num_seqs=len(grammars), **options)
    for grammar in grammars:
        e.add_request([1, 2, 3], SamplingParams(max_new_tokens=6, grammar=grammar))
    return {n: [t for o in found for t in o.tokens] for n, found in drain(e).items()}


def test_masks_of_a_step_are_found_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SLOW", 60.0)
    Many.calls.clear()
    together, alone = [Many() for _ in range(3)], [Even() for _ in range(3)]
    assert run(together) == run(alone)
    assert Many.calls == [3] * 6
    assert [m.single for m in together] == [0] * 3 and [m.single for m in alone] == [6] * 3


def test_slow_grammars_have_jobs_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_SLOW", -1.0)
    Many.calls.clear()
    run([Many() for _ in range(3)])
    assert Many.calls == [3]  # then each alone


def test_others_go_on_while_a_grammar_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_PATIENCE", 0.01)
    go = threading.Event()
    e = engine(FakeRunner(), max_num_seqs=2)
    late = e.add_request([1, 2, 3], SamplingParams(max_new_tokens=4, grammar=Even(go)))
    other = e.add_request([1, 2, 3], SamplingParams(max_new_tokens=4))
    tokens: dict[str, int] = {late: 0, other: 0}
    while tokens[other] < 4:
        for output in e.step():
            tokens[output.request_id] += len(output.tokens)
    assert tokens[late] == 0
    go.set()
    assert sum(len(o.tokens) for o in drain(e)[late]) == 4

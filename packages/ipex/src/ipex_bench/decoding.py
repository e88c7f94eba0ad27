# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding for engines that have no ``generate`` of their own. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .task import Prepared, Task

__all__ = ["greedy"]


def greedy(task: Task, step: Callable[[Any, int], Any], precision: str, note: str = "") -> Prepared:
    """Return a language model ready to decode.

    Args:
        task: The task.
        step: Gets token ids [batch, tokens] and the place of the first one in the text; 0 begins a new text. Returns
            the logits of the last token, [batch, vocabulary]; they may be overwritten by the next step.
        precision: In which it computes.
        note: Goes into the table.
    """
    import numpy

    ids, forced = task.inputs()["input_ids"], task.forced()
    length, new = ids.shape[1], task.shape["new"]

    def make(count: int) -> Any:
        logits = step(ids, 0)
        for place in range(length, length + count - 1):
            logits = step(logits.argmax(-1)[:, None], place)
        return logits

    def answer() -> Any:
        found = [step(ids, 0).copy()]
        for place in range(forced.shape[1]):
            found.append(step(forced[:, place : place + 1], length + place).copy())
        return numpy.stack(found, 1)

    def whole() -> Any:
        return step(numpy.concatenate([ids, forced], 1), 0).copy()

    calls = {"first": lambda: make(1), "all": lambda: make(new)}
    return Prepared(precision, answer, calls, note, whole)

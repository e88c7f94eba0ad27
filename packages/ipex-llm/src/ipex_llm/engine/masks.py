# SPDX-License-Identifier: Apache-2.0
"""Finds the tokens that grammars allow, in threads beside the model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import Any

from ipex_llm.engine.request import Request

__all__ = ["Masks"]

#: Seconds that a step waits for the tokens that a grammar allows, where it has nothing else to do.
_PATIENCE = 0.05
#: Seconds of a job, above which the grammars in it are slow.
_SLOW = 0.01

Chosen = Sequence[tuple[Request, int]]


class Masks:
    """The masks of all requests of an engine.

    Those of a step are found by one job: a job for each would take longer than most masks. A grammar that has been slow
    has a job of its own, in another thread, so that no other request waits for it.
    """

    def __init__(self) -> None:
        self._fast = ThreadPoolExecutor(1, "ipex-llm-masks")
        self._slow = ThreadPoolExecutor(1, "ipex-llm-slow-masks")

    @staticmethod
    def ready(chosen: Chosen) -> list[tuple[Request, int]]:
        """Return what can be computed: a request whose mask was late is left out until it is there.

        Args:
            chosen: Requests with the number of tokens that each computes.

        Returns:
            The others; empty after a while in which none became ready.
        """
        found = []
        waiting = set()
        for request, count in chosen:
            mask = request.mask
            if mask is not None and count == request.missing and not mask.done():
                waiting.add(mask)
            else:
                found.append((request, count))
        if not found:
            wait(waiting, timeout=_PATIENCE, return_when=FIRST_COMPLETED)
        return found

    def begin(self, chosen: Chosen) -> None:
        """Begin to find the masks of the requests that get a token next.

        Args:
            chosen: Requests with the number of tokens that each computes.
        """
        wanted = [
            request
            for request, count in chosen
            if request.matcher is not None and request.mask is None and count == request.missing
        ]
        together = [request for request in wanted if not request.slow]
        if together:
            job = self._fast.submit(_fill, together)
            for request in together:
                request.mask = job
        for request in wanted:
            if request.slow:
                request.mask = self._slow.submit(_fill, [request])

    @staticmethod
    def late(chosen: Chosen, elapsed: float) -> set[str]:
        """Return the requests whose grammar takes longer than the others may wait, which is as long as the model.

        Args:
            chosen: The requests of the step.
            elapsed: Seconds that the model took.
        """
        masks = {r.id: r.mask for r, n in chosen if r.mask is not None and n == r.missing}
        if not masks:
            return set()
        jobs = set(masks.values())
        others = len(masks) < len(chosen) or len(jobs) > 1
        wait(jobs, timeout=max(elapsed, _PATIENCE / 10) if others else _PATIENCE)
        for job in jobs:
            if job.done():
                job.result()  # raises what went wrong in it
        return {name for name, job in masks.items() if not job.done()}


def _fill(requests: Sequence[Request]) -> None:
    begun = time.monotonic()
    matchers: list[Any] = [request.matcher for request in requests]
    together = getattr(type(matchers[0]), "fill_together", None)
    if together is not None and len(requests) > 1 and not any(r.drafts for r in requests):
        together(matchers)
        _note(requests, begun)
        return
    for request, matcher in zip(requests, matchers, strict=True):
        begun = time.monotonic()
        matcher.fill(tuple(request.drafts))
        _note([request], begun)


def _note(requests: Sequence[Request], begun: float) -> None:
    """Note whether masks took long; of several it shows next time which one."""
    slow = time.monotonic() - begun > _SLOW
    for request in requests:
        request.slow = slow

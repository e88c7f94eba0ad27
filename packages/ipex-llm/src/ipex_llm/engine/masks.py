# SPDX-License-Identifier: Apache-2.0
"""Threads that find the tokens that grammars allow, while the model runs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ipex_llm.engine.params import Matcher


class _Task(NamedTuple):
    done: Future[None]
    matcher: Matcher
    drafts: tuple[int, ...]


class MaskThreads:
    """Runs `Matcher.fill`, for one matcher beside a slow one.

    To wake a thread takes the caller longer than a mask takes. So the tasks of a step wake one thread, which wakes the
    next while there is more to do.

    Args:
        count: Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "ipex-llm-masks")
        self._tasks: deque[_Task] = deque()

    def fill(self, wanted: Sequence[tuple[Matcher, Sequence[int]]]) -> list[Future[None]]:
        """Begin with matchers, each with the drafts that it is asked for; return what tells that each is done."""
        tasks = [_Task(Future(), matcher, tuple(drafts)) for matcher, drafts in wanted]
        self._tasks += tasks
        if tasks:
            self._pool.submit(_work, self._tasks, self._pool)
        return [task.done for task in tasks]


def _work(tasks: deque[_Task], pool: ThreadPoolExecutor) -> None:
    if len(tasks) > 1:
        pool.submit(_work, tasks, pool)
    while True:
        try:
            done, matcher, drafts = tasks.popleft()
        except IndexError:
            return
        try:
            matcher.fill(drafts)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

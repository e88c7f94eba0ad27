# SPDX-License-Identifier: Apache-2.0
"""PyTorch as it is: the baseline of all ratios."""

from __future__ import annotations

from ..task import Prepared, Task
from ..torch_work import prepare
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """Eager mode."""

    title = "stock eager"

    def prepare(self, task: Task) -> Prepared:
        """Cast the model and run it."""
        note = task.float_dtype if task.dtype in {"int8", "int4"} else ""
        return prepare(task, note=note)

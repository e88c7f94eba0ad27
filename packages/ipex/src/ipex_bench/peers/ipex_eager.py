# SPDX-License-Identifier: Apache-2.0
"""This project: ``ipex.optimize``, ``ipex.llm.optimize`` and dynamic int8, without ``torch.compile``."""

from __future__ import annotations

from ..ipex_work import prepare
from ..task import Prepared, Task
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """Eager ipex."""

    title = "ipex eager"
    module = "ipex"

    def prepare(self, task: Task) -> Prepared:
        """Optimize the model."""
        import ipex

        return prepare(task, ipex)

    def version(self) -> str:
        """Return the version of the facade."""
        from ipex._version import __version__

        return __version__

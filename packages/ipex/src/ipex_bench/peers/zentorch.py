# SPDX-License-Identifier: Apache-2.0
"""AMD's zentorch: ``torch.compile(backend="zentorch")``."""

from __future__ import annotations

from typing import Any

from ..task import Prepared, Task, UnsupportedError
from ..torch_work import prepare
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """zentorch."""

    title = "zentorch"
    module = "zentorch"
    install = "pip install zentorch, of the version of torch"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Compile the model with its backend."""
        import torch
        import zentorch  # noqa: F401  (registers the backend)

        if task.dtype in {"int8", "int4"}:
            raise UnsupportedError("only its floating point path is covered here")

        def compiled(model: Any) -> Any:
            return torch.compile(model, backend="zentorch")

        return prepare(task, compile_with=compiled)

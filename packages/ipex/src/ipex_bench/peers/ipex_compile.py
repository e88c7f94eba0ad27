# SPDX-License-Identifier: Apache-2.0
"""This project: ``torch.compile(backend="ipex")``."""

from __future__ import annotations

from typing import Any

from ..task import Prepared, Task, UnsupportedError
from ..torch_work import prepare
from . import Peer
from .ipex_eager import Engine as Eager

__all__ = ["Engine"]


class Engine(Peer):
    """Compiled ipex."""

    title = "ipex compile"
    module = "ipex"

    def prepare(self, task: Task) -> Prepared:
        """Compile the stock model with our backend."""
        import torch

        if task.dtype in {"int8", "int4"}:
            raise UnsupportedError("quantized models run eagerly; see the column of ipex eager")
        if task.kind == "train":
            import ipex

            from ..ipex_work import prepare as train

            return train(task, ipex, compile_with=torch.compile)

        def compiled(model: Any) -> Any:
            return torch.compile(model, backend="ipex")

        return prepare(task, compile_with=compiled)

    def version(self) -> str:
        """Return the version of the facade."""
        return Eager().version()

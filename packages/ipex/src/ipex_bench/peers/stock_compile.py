# SPDX-License-Identifier: Apache-2.0
"""``torch.compile`` with Inductor; for inference with its freezing switched on."""

from __future__ import annotations

from typing import Any

from ..task import Prepared, Task
from ..torch_work import prepare
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """Inductor."""

    title = "stock compile"

    def prepare(self, task: Task) -> Prepared:
        """Compile the model as it is."""
        import torch
        import torch._inductor.config as inductor

        inductor.freezing = task.kind != "train"
        return prepare(task, compile_with=lambda model: compiled(torch, model))


def compiled(torch: Any, model: Any) -> Any:
    """Return the compiled model."""
    return torch.compile(model)

# SPDX-License-Identifier: Apache-2.0
"""The native side of a program: the ops that run it and the encoding in which it is handed over."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ipex_core._program_run import Program

__all__ = ["NativeProgram"]


class NativeProgram:
    """The native form of one `Program`, made at its first run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def handle(self, program: Program) -> int | None:
        """Return the handle of the native program, or None where there is no native interpreter for it."""
        return None

    def run(self, handle: int, tensors: list[torch.Tensor], ints: list[int]) -> list[torch.Tensor]:
        """Run the native program."""
        raise NotImplementedError

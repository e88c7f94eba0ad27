# SPDX-License-Identifier: Apache-2.0
"""Timing stock code and ours while a graph is compiled, where no table can tell which is faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ipex_core._fastest import fastest

__all__ = ["against_ours"]

#: Seconds that a measurement may go on; the whole of a network should be far below the time that compiling takes.
_SECONDS = 0.04

_known: dict[Any, str | None] = {}


def against_ours(
    key: tuple[Any, ...], runs: Callable[[], dict[str, Callable[[], torch.Tensor]]]
) -> str | None:
    """Return why stock code is to run, None if ours was measured to be faster; once in a process.

    Args:
        key: What the times depend on, but for the number of threads.
        runs: Makes the candidates, ``"stock"`` and ``"ipex"``, on data of their own.
    """
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and a measurement may come out either way"
    key = (*key, torch.get_num_threads())
    if key not in _known:
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            best, text = fastest(runs(), _SECONDS)
        _known[key] = None if best == "ipex" else f"measured: {text}"
    return _known[key]

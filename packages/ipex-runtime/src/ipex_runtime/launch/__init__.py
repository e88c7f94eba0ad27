# SPDX-License-Identifier: Apache-2.0
"""The launcher ``ipexrun``: runs programs on the right cores. It needs neither torch nor numactl."""

from __future__ import annotations

import importlib
from typing import Any

#: Public name -> module that has it, relative to this one.
_LAZY = {
    "CPUPool": ".cpu_info",
    "CPUPoolList": ".cpu_info",
    "CoreInfo": ".cpu_info",
    "DistributedTrainingLauncher": ".launcher_distributed",
    "LaunchArgumentError": ".._errors",
    "Launcher": ".launcher_base",
    "MultiInstancesLauncher": ".launcher_multi_instances",
    "init_parser": ".launch",
    "run_main_with_args": ".launch",
}

__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(importlib.import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

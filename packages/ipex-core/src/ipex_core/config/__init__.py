# SPDX-License-Identifier: Apache-2.0
"""Configuration of all ipex packages: one typed table of environment variables, with getters and setters.

Every ``IPEX_*`` variable is one row of `VARIABLES`. The environment is read and checked once, when `ipex_core` is
imported: a bad value raises `ConfigError`, an unknown ``IPEX_*`` name gives one warning. Afterwards the values
change only through `set_value` and `override`::

    >>> from ipex_core import config
    >>> config.get("huge_pages")
    True
    >>> with config.override(strict=True):
    ...     config.strict
    True

A command that has to run although the environment is bad (``ipex doctor``) sets the interpreter option
``ipex-tolerant``: errors are then kept (`environment_errors`) and raised only when the bad value is read.
"""

from __future__ import annotations

from typing import Any

from ipex_core.config import values
from ipex_core.config.effects import (
    VERBOSE_OFF,
    VERBOSE_ON,
    VERBOSE_ON_CREATION,
    get_fp32_math_mode,
    set_fp32_math_mode,
    set_logging_level,
    verbose,
)
from ipex_core.config.isa_levels import ISA_LEVELS, LEVEL_FEATURES
from ipex_core.config.values import (
    IsaRequest,
    Setting,
    environment_errors,
    get,
    isa_request,
    override,
    reload,
    set_value,
    settings,
)
from ipex_core.config.variables import VARIABLES, FP32MathMode, Variable

__all__ = [
    "ISA_LEVELS",
    "LEVEL_FEATURES",
    "VARIABLES",
    "VERBOSE_OFF",
    "VERBOSE_ON",
    "VERBOSE_ON_CREATION",
    "FP32MathMode",
    "IsaRequest",
    "Setting",
    "Variable",
    "environment_errors",
    "get",
    "get_fp32_math_mode",
    "isa_request",
    "override",
    "reload",
    "set_fp32_math_mode",
    "set_logging_level",
    "set_value",
    "settings",
    "verbose",
]


def __getattr__(name: str) -> Any:
    if name in VARIABLES:
        return get(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


values.start()

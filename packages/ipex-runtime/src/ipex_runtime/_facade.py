# SPDX-License-Identifier: Apache-2.0
"""The package ipex, which is above this one: known by its name only, and needed by what optimises models."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["facade"]

NAME = "ipex"


def facade(part: str = "") -> Any:
    """Return the package, or a module of it.

    Args:
        part: Name of the module inside, empty for the package itself.

    Raises:
        ImportError: It is not installed, or has no such module.
    """
    try:
        return importlib.import_module(f"{NAME}.{part}" if part else NAME)
    except ModuleNotFoundError as error:
        if error.name != NAME:
            raise
        raise ImportError(f"the package {NAME} is not installed: pip install {NAME}") from error

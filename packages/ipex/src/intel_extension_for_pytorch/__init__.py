# SPDX-License-Identifier: Apache-2.0
"""The old import name: every attribute of `ipex` but ``__version__``, which is a version of IPEX.

Dotted names below it (``intel_extension_for_pytorch.nn``) are found by `ipex.compat.migration` and are the
same modules.

Importing it changes a few functions of torch, as IPEX did: `ipex.compat.torch_changes` lists them.
"""

from __future__ import annotations

from typing import Any

import ipex
from ipex import __all__ as __all__
from ipex.compat import migration

#: The release of IPEX whose names and arguments are here: programs ask for a least version before they call.
__version__ = "2.8.0+cpu"


def __getattr__(name: str) -> Any:
    return getattr(ipex, name)


def __dir__() -> list[str]:
    return dir(ipex)


if not migration.started_by_dash_m():  # commands start without torch
    from ipex.compat import torch_changes

    torch_changes.apply()

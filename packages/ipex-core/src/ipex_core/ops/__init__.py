# SPDX-License-Identifier: Apache-2.0
"""One module per op; importing this package registers them all.

A new op is a new file here: nothing else lists ops.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")

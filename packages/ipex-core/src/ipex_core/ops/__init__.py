# SPDX-License-Identifier: Apache-2.0
"""One module for each family of ops; importing this package registers them all.

A new op is a new file here, or joins its family: nothing else lists ops.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

# SPDX-License-Identifier: Apache-2.0
"""One module per op, in folders of families; importing this package registers them all.

A new op is a new file in a folder here: nothing else lists ops. Names that begin with an underscore hold what the ops
of a family share.
"""

from __future__ import annotations

import importlib
import pkgutil

for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    if "._" not in _module.name:
        importlib.import_module(_module.name)

# SPDX-License-Identifier: Apache-2.0
"""The op namespaces ``torch.ops.torch_ipex`` and ``torch.ops.ipex_prepack`` that other projects call.

Every op here is a second name: same argument order as in Intel Extension for PyTorch, computed by ops of
``torch.ops.ipex``. They are decompositions (``CompositeImplicitAutograd``): a trace, a compiled graph or a derivative
sees the ops below and needs nothing of its own. Importing this package registers them; ``import ipex`` does.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

import torch

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        importlib.import_module(f"{__name__}.{_module.name}")


class _Namespace(torch._ops._OpNamespace):
    """A namespace of ops that knows what IPEX had in it; ``hasattr`` is False for what is not there, as in torch."""

    def __getattr__(self, op_name: str) -> Any:
        try:
            return super().__getattr__(op_name)
        except AttributeError:
            from ipex.compat import migration

            if not op_name.startswith("__"):
                migration.refuse(f"torch.ops.{self.name}.{op_name}")
            raise


for _namespace in (torch.ops.torch_ipex, torch.ops.ipex_prepack):
    _namespace.__class__ = _Namespace

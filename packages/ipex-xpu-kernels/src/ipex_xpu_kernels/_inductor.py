# SPDX-License-Identifier: Apache-2.0
"""Plain ``torch.compile`` needs a Triton for XPU: torch's error then says what works without one."""

from __future__ import annotations

from types import ModuleType
from typing import Any

HINT = (
    " ipex-xpu-kernels has no Triton for its device. Use torch.compile(model, backend='ipex'), backend='aot_eager'"
    " or the model without torch.compile: they do not need Triton."
)


def install() -> None:
    """Add the hint when torch's module of these errors is imported, or now if it has been."""
    from ipex_core.util.import_hooks import when_imported

    when_imported("torch._inductor.exc", _add_hint)


def _add_hint(module: ModuleType) -> None:
    missing: Any = getattr(module, "TritonMissing", None)
    if missing is None:
        return  # of a torch that calls it otherwise

    class TritonMissing(missing):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            text, *others = BaseException.__getattribute__(self, "args")
            self.args = (f"{text}{HINT}", *others)

    TritonMissing.__module__, TritonMissing.__qualname__ = module.__name__, "TritonMissing"
    module.TritonMissing = TritonMissing  # type: ignore[attr-defined]

# SPDX-License-Identifier: Apache-2.0
"""A rewritten forward of the model itself, whose class stays what it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from ipex_core.module_swap.forward import InstanceForward, resolve

__all__ = ["RewrittenForward"]


class RewrittenForward(InstanceForward):
    """Runs other code in place of a module's forward; installed as ``module.__dict__["forward"]``.

    Unlike the forwards that ``optimize`` installs it stays for good: the modules that it calls compute other things
    than those of the original.

    Args:
        module: The module; it has the children that the code calls.
        source: Code of a function ``forward`` of the module and its arguments.
        names: For each global name of the code where it comes from, as ``"module:attribute"``.
        lines: The graph that the code was made from, as text.
    """

    def __init__(
        self, module: nn.Module, source: str, names: dict[str, str], lines: list[str]
    ) -> None:
        super().__init__(module)
        self.source = source
        self.names = names
        self.lines = lines
        namespace = {name: resolve(path) for name, path in names.items()}
        exec(compile(source, "<ipex rewritten forward>", "exec"), namespace)  # noqa: S102  (code that torch.fx made)
        self._function: Callable[..., Any] = namespace["forward"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code on the module."""
        return self._function(self._module(), *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = copy.deepcopy(self._module(), memo)
        assert module is not None
        return RewrittenForward(module, self.source, self.names, self.lines)

    def __reduce__(self) -> Any:
        return RewrittenForward, (self._module(), self.source, self.names, self.lines)

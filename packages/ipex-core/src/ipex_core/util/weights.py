# SPDX-License-Identifier: Apache-2.0
"""Whether weights are as they were when something was made of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

__all__ = ["Weights"]


class Weights:
    """Parameters and buffers, with their versions and places in memory.

    Versions tell of changes in place (``load_state_dict``), places of ``p.data = ...``. Inference tensors have no
    version, packed oneDNN weights no place. A look takes about 0.1 us a weight.

    Args:
        tensors: What is watched.
    """

    def __init__(self, tensors: Iterable[Tensor | None]) -> None:
        self._watch([("", None, "", tensor) for tensor in tensors])

    @classmethod
    def of(cls, model: nn.Module) -> Weights:
        """Watch a model, whose modules and tensors may be replaced, too."""
        found = cls(())
        found._watch(
            [
                (f"{path}.{name}" if path else name, held, name, value)
                for path, module in model.named_modules()
                for held in (module._parameters, module._buffers, module._modules)
                for name, value in held.items()
            ]
        )
        return found

    def _watch(self, entries: list[tuple[str, Any, str, Any]]) -> None:
        self._paths = [path for path, *_ in entries]
        self._owners = [(held, name) for _, held, name, _ in entries if held is not None]
        self._held = [value for *_, value in entries]
        tensors = [value for value in self._held if isinstance(value, Tensor)]
        self._counted = [t for t in tensors if not t.is_inference()]
        self._located = [t for t in tensors if not t.is_mkldnn]
        self._state = self._versions()

    def _versions(self) -> tuple[list[int], list[int]]:
        return (
            [tensor._version for tensor in self._counted],
            [tensor.data_ptr() for tensor in self._located],
        )

    def _replaced(self) -> list[Any]:
        return [held.get(name) for held, name in self._owners]

    def same(self) -> bool:
        """Return whether nothing was replaced or changed."""
        return all(map(operator.is_, self._replaced(), self._held)) and (
            self._versions() == self._state
        )

    def changed(self) -> str:
        """Return the path of the first that was replaced or changed, or an empty string."""
        changed = {
            id(tensor)
            for tensors, old, new in zip(
                (self._counted, self._located), self._state, self._versions(), strict=True
            )
            for tensor, before, after in zip(tensors, old, new, strict=True)
            if before != after
        }
        return next(
            (
                path
                for path, now, value in zip(self._paths, self._replaced(), self._held, strict=True)
                if now is not value or id(value) in changed
            ),
            "",
        )

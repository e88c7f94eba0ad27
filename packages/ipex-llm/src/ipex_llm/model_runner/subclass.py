# SPDX-License-Identifier: Apache-2.0
"""Subclasses that put a mixin in front of a module's own class, once for each pair."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

__all__ = ["rebuild", "subclass"]

_classes: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def subclass(kind: type[nn.Module], mixin: type[nn.Module]) -> type[nn.Module]:
    """Return ``kind`` with ``mixin`` in front, whose modules can be copied and pickled.

    It has the same name, since transformers looks at names.
    """
    known = _classes.get((kind, mixin))
    if known is not None:
        return known
    content: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_ipex_original": kind,
        "_ipex_mixin": mixin,
        "__reduce_ex__": _reduce,
    }
    if "forward" in mixin.__dict__:
        forward = mixin.__dict__["forward"]

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        functools.update_wrapper(wrapped, kind.forward)
        content["forward"] = wrapped
    made = _classes[kind, mixin] = type(kind.__name__, (mixin, kind), content)
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    # A class of `subclass` is not found by its name, which is that of the module's own class.
    return rebuild, (self._ipex_original, self._ipex_mixin), self.__getstate__()


def rebuild(kind: type[nn.Module], mixin: type[nn.Module]) -> nn.Module:
    """Return an empty module of such a class, for pickling."""
    new = subclass(kind, mixin)
    return new.__new__(new)

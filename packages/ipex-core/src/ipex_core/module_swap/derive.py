# SPDX-License-Identifier: Apache-2.0
"""A mixin in front of an object's own class, and the way back.

The object stays the same: ``isinstance`` tests, names, hooks and references stay valid. This is the only place, with
`swap_class` for optimized layers, where the class of an object changes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

__all__ = [
    "as_original",
    "derive",
    "original_class",
    "rebuild",
    "restore_class",
    "set_class",
    "swap",
]

_classes: dict[tuple[type, type], type] = {}


def derive(kind: type, mixin: type, content: Callable[[], Mapping[str, Any]] | None = None) -> Any:
    """Return ``kind`` with ``mixin`` in front, once for each pair; its objects can be copied and pickled.

    It has the name, module and docstring of ``kind``, since transformers looks at names. A forward of the mixin gets
    the signature of the forward of ``kind``.

    Args:
        kind: The class of the user.
        mixin: What comes first.
        content: Returns further attributes of the class.
    """
    known = _classes.get((kind, mixin))
    if known is not None:
        return known
    members: dict[str, Any] = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "_ipex_original": kind,
        "_ipex_mixin": mixin,
    }
    if "__reduce_ex__" not in mixin.__dict__:
        members["__reduce_ex__"] = _reduce
    if "forward" in mixin.__dict__ and issubclass(kind, nn.Module):
        forward = mixin.__dict__["forward"]

        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, *args, **kwargs)

        functools.update_wrapper(wrapped, kind.forward)
        members["forward"] = wrapped
    if content is not None:
        members.update(content())
    made = _classes[kind, mixin] = type(kind.__name__, (mixin, kind), members)
    return made


def _reduce(self: Any, protocol: Any) -> Any:
    # A derived class has the name of its original, so pickle would find the original by that name.
    return rebuild, (self._ipex_original, self._ipex_mixin), self.__getstate__()


def rebuild(kind: type, mixin: type) -> Any:
    """Return an empty object of a derived class, for pickling."""
    new = derive(kind, mixin)
    return new.__new__(new)


def original_class(value: Any) -> Any:
    """Return the class that an object had before `swap`, or has."""
    kind = type(value)
    return getattr(kind, "_ipex_original", kind)


def swap(value: Any, mixin: type, content: Callable[[], Mapping[str, Any]] | None = None) -> None:
    """Put ``mixin`` in front of the original class of an object, in the place of another one."""
    value.__class__ = derive(original_class(value), mixin, content)


def restore_class(value: Any) -> None:
    """Give an object the class that it had before `swap`."""
    value.__class__ = original_class(value)


def set_class(value: Any, kind: type) -> None:
    """Give an object a class of ours that derives from its own, or its own again."""
    value.__class__ = kind


@contextlib.contextmanager
def as_original(*values: Any) -> Iterator[None]:
    """Give objects their original classes within a ``with`` block."""
    former = [type(value) for value in values]
    for value in values:
        restore_class(value)
    try:
        yield
    finally:
        for value, kind in zip(values, former, strict=True):
            value.__class__ = kind

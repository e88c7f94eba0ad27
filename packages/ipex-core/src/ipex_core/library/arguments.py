# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of an op, by the names of its schema."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

from ipex_core.errors import OpArgumentError

__all__ = ["Arguments", "bind"]


class Arguments:
    """The arguments of one call: ``a.x``, ``a.eps``, those left out with the defaults of the schema.

    Checks and fake kernels take it, so that the schema is the only signature of an op.

    Attributes:
        op: Name of the op.
    """

    op: str

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, values: dict[str, Any]) -> None:
        # The dictionary itself: this runs at each call with fake tensors.
        self.__dict__ = values

    def require(self, condition: bool, argument: str, expected: str, *got: object) -> None:
        """Raise `OpArgumentError` with the project's one message form if ``condition`` is false.

        Args:
            condition: What must hold.
            argument: Name of the argument.
            expected: What it must be or do: ``"be positive"``.
            got: What was given, where that is not the argument as it is printed: a shape, a dtype.

        Example:
            >>> bind("gelu", "(Tensor x, str approximate) -> Tensor", (None, "no"), {}).require(
            ...     False, "approximate", "be one of none, tanh"
            ... )
            Traceback (most recent call last):
            ipex_core.errors.OpArgumentError: gelu: approximate must be one of none, tanh, got no
        """
        if not condition:
            value = got[0] if got else self.__dict__[argument]
            text = str(value) or "''"
            raise OpArgumentError(f"{self.op}: {argument} must {expected}, got {text}")


def bind(op: str, schema: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call by name.

    Raises:
        TypeError: There are too many, one is unknown, or one without a default is missing.
    """
    names, defaults, required = _signature(schema)
    if len(args) > len(names):
        raise TypeError(f"{op}: takes at most {len(names)} arguments, got {len(args)}")
    values = {**defaults, **dict(zip(names, args, strict=False)), **kwargs, "op": op}
    if len(values) != len(names) + 1:
        unknown = sorted(kwargs.keys() - set(names))
        if unknown:
            raise TypeError(
                f"{op}: unknown arguments {', '.join(unknown)}; known: {', '.join(names)}"
            )
        missing = [name for name in required if name not in values]
        raise TypeError(f"{op}: arguments {', '.join(missing)} must be given")
    return Arguments(values)


@functools.cache
def _signature(schema: str) -> tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]:
    """Return the names of a schema's arguments, the defaults, and the names without one."""
    arguments = torch._C.parse_schema(f"ipex::op{schema}").arguments
    names = tuple(argument.name for argument in arguments)
    defaults = {one.name: one.default_value for one in arguments if one.has_default_value()}
    return names, defaults, tuple(name for name in names if name not in defaults)

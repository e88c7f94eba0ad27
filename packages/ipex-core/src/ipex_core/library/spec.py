# SPDX-License-Identifier: Apache-2.0
"""The arguments of one call of an op, by the names of its schema."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import string
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch

from ipex_core.errors import OpArgumentError

__all__ = [
    "Arguments",
    "BenchCase",
    "CHANNELS_LAST",
    "FLOATS",
    "FUNCTIONAL",
    "NAMESPACE",
    "OpSpec",
    "PORTABLE",
    "Sample",
    "bind",
    "check",
    "dtype_name",
]


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


@functools.cache
def _schema_type(annotation: Any) -> str:
    if not isinstance(annotation, str):
        raise TypeError(
            "the reference of an op must have annotations that are text, got"
            f" {annotation!r}: import annotations from __future__, or give a schema"
        )
    text = annotation.replace("torch.Tensor", "Tensor").replace("torch.dtype", "ScalarType")
    return re.sub(r"(?:Sequence|list)\[(\w+)\]", r"\1[]", text).replace(" | None", "?")


def schema_of(function: Callable[..., Any], mutates: Collection[str] = ()) -> str:
    """Return the schema that the annotations of a function spell, without a name.

    Args:
        function: Its module imports ``annotations`` from ``__future__``.
        mutates: Names of the arguments that it writes to.

    Example:
        >>> def add(x: Tensor, to: Tensor | None, alpha: float = 1.0) -> Tensor: ...
        >>> schema_of(add, ["to"])
        '(Tensor x, Tensor(a!)? to, float alpha=1.0) -> Tensor'
    """
    letters, arguments = iter(string.ascii_lowercase), []
    signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        argument = f"{_schema_type(parameter.annotation)} {name}"
        if name in mutates:
            argument = argument.replace("Tensor", f"Tensor({next(letters)}!)", 1)
        if isinstance(parameter.default, str):
            argument += f'="{parameter.default}"'
        elif parameter.default is not parameter.empty:
            # 1e-6 and 1e30, which Python spells 1e-06 and 1e+30.
            argument += f"={parameter.default!r}".replace("e-0", "e-").replace("e+", "e")
        arguments.append(argument)
    result = _schema_type(signature.return_annotation)
    if result == "None":
        result = "()"
    elif result.startswith("tuple["):
        result = f"({result[6:-1]})"
    return f"({', '.join(arguments)}) -> {result}"


# --- specifications ---------------------------------------------------------------------------------------------------


NAMESPACE = "ipex"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
#: Number of dimensions -> the layout with the channels side by side.
CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

#: See `OpSpec.autocast`.
AutocastRule = Literal["lower_precision", "lower_precision_unless_packed", "widest_type", "float32"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One call of an op, used to check kernels against the reference.

    Attributes:
        args: Positional arguments; tensors are on the CPU.
        kwargs: Keyword arguments.
        id: Short name shown in test reports.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    id: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class BenchCase:
    """One shape of an op's benchmark.

    Attributes:
        id: Short name, for instance ``"512x4096"``.
        make: Returns the op's arguments for a dtype.
        bytes: Bytes that must move at the least, each input read once and each output written once.
        flops: Floating-point operations, or 0 for an op that is bound by memory.
        rotate: Whether successive calls get other arguments, so many of them that no cache holds all: for weights
            and caches, which a model reads once per step.
        unit: The dtype whose matrix product is the limit of the arithmetic where that is not the dtype of the case:
            ``torch.int8`` for products of 8-bit integers.
    """

    id: str
    make: Callable[[torch.dtype], tuple[Any, ...]]
    bytes: Callable[[torch.dtype], int]
    flops: int = 0
    rotate: bool = False
    unit: torch.dtype | None = None


def _no_result(a: Arguments) -> None:
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Everything there is to know about one op.

    Attributes:
        name: Name under ``torch.ops.ipex``; left out, the name of the reference without underscores before it.
        schema: Schema without the name: ``"(Tensor x, float eps) -> Tensor"``; left out, what the annotations of the
            reference spell. An op that writes to an argument, ``"(Tensor(a!) cache, Tensor rows) -> ()"``, returns
            nothing or new tensors, never an alias.
        reference: The op in plain PyTorch, for any device. It is the meaning of the op.
        check: Validates the arguments of a call, see `bind`; raises `OpArgumentError`. Kernels repeat the same checks
            with the same text.
        fake: Shapes, dtypes and strides of the result of a call, without data; left out, the op returns nothing.
        samples: Calls on which every kernel is compared with the reference, for one dtype.
        stock: What a user of stock PyTorch would write; the baseline of the benchmark.
        stock_args: Returns the arguments of ``stock`` from the op's, outside the timing (a packed weight into a plain
            one). None where they are the same.
        dtypes: Dtypes of the leading tensor argument that the op accepts.
        backward: ``"reference"`` differentiates the reference; ``None`` makes the backward pass an error. An op that
            writes to an argument has one of these two. With ``"reference"`` the reference runs in the place of the
            kernel where a gradient is wanted, so torch's rules for operations in place hold. A function computes the
            gradients itself: it is called with the gradients of the outputs and then with the arguments, and returns a
            gradient or None for each argument (a list of them for an argument that is a list).
        autocast: What happens to floating inputs inside ``torch.autocast``: ``"lower_precision"``, ``"float32"``;
            ``"lower_precision_unless_packed"``, for an op whose weight may be packed (uint8) in a dtype of its own;
            ``"widest_type"``, the arguments that are not optional get the widest dtype among them, as stock
            arithmetic would promote them; or ``None`` (the op runs in the dtype of its inputs).
        tolerance: ``(rtol, atol)`` per dtype for comparing a kernel with the reference in float64. Integers must be
            equal unless their dtype is named.
        lift: Whether the reference is computed in float64 for that comparison. False for ops that move bits or
            whose meaning depends on the dtype of an argument.
        bench: Shapes of the benchmark.
        mutates: Names of the arguments the op writes to, in the order of the schema; a schema that is given has them.
        summary: One line for tables; the docstring of the reference is the long text.
    """

    name: str = ""
    schema: str = ""
    reference: Callable[..., Any]
    check: Callable[[Arguments], None]
    fake: Callable[[Arguments], Any] = _no_result
    samples: Callable[[torch.dtype], Iterable[Sample]]
    stock: Callable[..., Any] | None = None
    stock_args: Callable[..., tuple[Any, ...]] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    backward: Literal["reference"] | Callable[..., tuple[Any, ...]] | None = "reference"
    autocast: AutocastRule | None = None
    tolerance: Mapping[torch.dtype, tuple[float, float]] = dataclasses.field(
        default_factory=lambda: {
            torch.float32: (1e-5, 1e-5),
            torch.bfloat16: (1.6e-2, 1e-2),
            torch.float16: (2e-3, 1e-3),
        }
    )
    lift: bool = True
    bench: Callable[[], Iterable[BenchCase]] | None = None
    mutates: tuple[str, ...] = ()
    summary: str = ""

    def __post_init__(self) -> None:
        schema = self.schema or schema_of(self.reference, self.mutates)
        result = schema.rpartition(" -> ")[2]
        if self.fake is _no_result and result != "()":
            raise ValueError(
                f"op {self.reference.__name__!r}: fake must be given for an op that returns {result}, got none:"
                " return empty tensors of the right shapes"
            )
        written = re.findall(r"Tensor\([a-z]!\)(?:\[\])?\??\s+(\w+)", schema)
        object.__setattr__(self, "name", self.name or self.reference.__name__.lstrip("_"))
        object.__setattr__(self, "schema", schema)
        object.__setattr__(self, "mutates", tuple(written))

    def bind(self, *args: Any, **kwargs: Any) -> Arguments:
        """Return the arguments of a call by the names of the schema, for `check` and `fake`.

        Raises:
            TypeError: There are too many, one is unknown, or one without a default is missing.
        """
        return bind(self.name, self.schema, args, kwargs)

    @property
    def op(self) -> Any:
        """The callable ``torch.ops.ipex.<name>``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as messages write it: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def check(condition: bool, op: str, argument: str, expected: str, got: object) -> None:
    """Raise `OpArgumentError` with the project's one message form if ``condition`` is false.

    Example:
        >>> check(False, "rms_norm", "weight", "be 1-D", [3, 4])
        Traceback (most recent call last):
        ipex_core.errors.OpArgumentError: rms_norm: weight must be 1-D, got [3, 4]
    """
    if not condition:
        text = str(got) or "''"
        raise OpArgumentError(f"{op}: {argument} must {expected}, got {text}")


# --- ops that exist in Python only ----------------------------------------------------------------------------------

#: Op -> the same in ops that C++ has. Packages with such ops add theirs.
PORTABLE: dict[Any, Callable[..., Any]] = {}

#: Op that writes to an argument that is not read afterwards -> the same without that; applied before `PORTABLE`.
FUNCTIONAL: dict[Any, Any] = {}

# SPDX-License-Identifier: Apache-2.0
"""Op specifications: the one place where an op of ``torch.ops.ipex`` is described.

A module in `ipex_core.ops` defines one or more `OpSpec` objects and passes each to `register`. Registration gives
torch the schema, the reference as the kernel of every device, the fake kernel, the derivative and the autocast rule.
Kernel packages add nothing but faster kernels for a dispatch key. The wheel that brings them is loaded at the first
call of any op, so that importing ipex stays cheap.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch.autograd import forward_ad
from torch.library import Library

from ipex_core.errors import KernelApiError, OpArgumentError
from ipex_core.library.derivatives import (
    VjpOfReference,
    check_not_leaf,
    differentiate_reference,
    flattened,
    has_tangent,
    mark_overwritten,
)

__all__ = ["BenchCase", "OpSpec", "Sample", "check", "define", "register", "schemas", "specs"]

NAMESPACE = "ipex"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: See `OpSpec.autocast`.
AutocastRule = Literal["lower_precision", "lower_precision_unless_packed", "widest_type", "float32"]

#: Devices whose autocast the rules of a spec apply to.
_AUTOCAST_DEVICES = ("cpu", "xpu")


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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OpSpec:
    """Everything there is to know about one op.

    Attributes:
        name: Name under ``torch.ops.ipex``.
        schema: Schema without the name: ``"(Tensor x, float eps) -> Tensor"``. An op that writes to an argument,
            ``"(Tensor(a!) cache, Tensor rows) -> ()"``, returns nothing or new tensors, never an alias.
        reference: The op in plain PyTorch, for any device. It is the meaning of the op.
        check: Validates the arguments; raises `OpArgumentError`. Kernels repeat the same checks with the same text.
        fake: Shapes, dtypes and strides of the result, without data.
        samples: Calls on which every kernel is compared with the reference, for one dtype.
        stock: What a user of stock PyTorch would write; the baseline of the benchmark.
        stock_args: Turns arguments of the op into those of ``stock``, outside the timing (a packed weight into a plain
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
        summary: One line for tables; the docstring of the reference is the long text.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    check: Callable[..., None]
    fake: Callable[..., Any]
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
    summary: str = ""

    @property
    def mutates(self) -> tuple[str, ...]:
        """Names of the arguments the op writes to, in the order of the schema."""
        return tuple(re.findall(r"Tensor\([a-z]!\)(?:\[\])?\??\s+(\w+)", self.schema))

    @property
    def op(self) -> Any:
        """The callable ``torch.ops.ipex.<name>``."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name)


_SPECS: dict[str, OpSpec] = {}
_LIBRARY = Library(NAMESPACE, "FRAGMENT")  # kept alive: its end would remove the registrations
_SCHEMAS: dict[str, str] = {}


def specs() -> Mapping[str, OpSpec]:
    """Return all registered op specifications by name."""
    return MappingProxyType(_SPECS)


def schemas() -> Mapping[str, str]:
    """Return the schema, name included, of each op that `define` was given, by name."""
    return MappingProxyType(_SCHEMAS)


def define(schema: str) -> None:
    """Give torch the schema of an op, unless a C++ library of ours, loaded before, has done that.

    Args:
        schema: With the name, ``"rms_norm(Tensor x, Tensor? weight) -> Tensor"``.

    Raises:
        KernelApiError: The C++ library knows another op of this name: it belongs to another version.
    """
    name = schema.partition("(")[0]
    _SCHEMAS[name] = schema
    known = torch._C._jit_get_schemas_for_operator(f"{NAMESPACE}::{name}")
    if not known:
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    elif known[0] != torch._C.parse_schema(f"{NAMESPACE}::{schema}"):
        raise KernelApiError(
            f"libipex_cpp.so of another version has been loaded: it defines {known[0]}, this ipex-core {schema}:"
            " pip install --upgrade ipex-core ipex-cpu-kernels"
        )


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
        raise OpArgumentError(f"{op}: {argument} must {expected}, got {got}")


def register(spec: OpSpec) -> OpSpec:
    """Make ``spec`` known to torch and return it.

    Raises:
        ValueError: An op of this name is registered already.
    """
    if spec.name in _SPECS:
        raise ValueError(f"op {spec.name!r} is registered twice")
    if spec.mutates and (callable(spec.backward) or spec.autocast is not None):
        raise ValueError(
            f"op {spec.name!r} writes to its arguments: backward must be 'reference' or None, autocast None"
        )
    define(spec.name + spec.schema)
    overload = spec.op.default
    qualname = f"{NAMESPACE}::{spec.name}"
    _LIBRARY.impl(spec.name, _first_call_kernel(spec, overload), "CompositeExplicitAutograd")
    torch.library.register_fake(qualname, _fake_kernel(spec), lib=_LIBRARY)
    _LIBRARY.impl(spec.name, _autograd_kernel(spec, overload), "Autograd", with_keyset=True)
    if spec.autocast is not None:
        for device in _AUTOCAST_DEVICES:
            kernel = _autocast_kernel(spec, overload, device)
            _LIBRARY.impl(spec.name, kernel, f"Autocast{device.upper()}")
    _SPECS[spec.name] = spec
    return spec


def _check_present(spec: OpSpec, args: Sequence[Any]) -> None:
    """Check that no tensor is missing: torch's dispatcher takes None for any of them."""
    if any(value is None for value in args):
        for value, argument in zip(args, spec.op.default._schema.arguments, strict=False):
            needed = value is None and isinstance(argument.type, torch.TensorType)
            check(not needed, spec.name, argument.name, "be a tensor", None)


def _first_call_kernel(spec: OpSpec, overload: Any) -> Callable[..., Any]:
    """Return the kernel torch runs where no kernel package provides one.

    The first call of any op loads the installed packages; the call is then dispatched again and may land in a
    kernel that has just been registered.
    """
    from ipex_core.kernels import providers

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not providers.providers_loaded():
            providers.load_providers()
            return overload(*args, **kwargs)
        _check_present(spec, args)
        spec.check(*args, **kwargs)
        providers.note_reference_call(spec.name, args)
        output = spec.reference(*args, **kwargs)
        if output is None:
            return None
        promised = spec.fake(*args, **kwargs)
        if isinstance(output, tuple):
            return tuple(map(_with_layout, output, promised))
        return _with_layout(output, promised)

    return kernel


def _with_layout(output: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    """Return ``output`` with the strides the fake kernel promises: those of an input may have come through."""
    return output if output.stride() == promised.stride() else promised.copy_(output)


def _fake_kernel(spec: OpSpec) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        _check_present(spec, args)
        spec.check(*args, **kwargs)
        return spec.fake(*args, **kwargs)

    return fake


def _autograd_kernel(spec: OpSpec, overload: Any) -> Callable[..., Any]:
    """Return the kernel of the Autograd key: go on below it, or record the derivative if one is wanted.

    `torch.library.register_autograd` does the same, but costs some 5 us per call even when nothing requires a
    gradient: as much as a small op itself.
    """
    redispatch = overload._handle.redispatch_boxed
    below = torch._C._after_autograd_keyset
    any_requires_grad = torch._C._any_requires_grad
    grad_enabled = torch.is_grad_enabled
    transformed = torch._C._are_functorch_transforms_active
    names = [argument.name for argument in overload._schema.arguments]
    mutated = [names.index(name) for name in spec.mutates]

    def kernel(keyset: Any, *args: Any) -> Any:
        recorded = grad_enabled() and any_requires_grad(*args)
        if transformed() or forward_ad._current_level >= 0:
            if recorded or has_tangent(args):
                _check_present(spec, args)
                spec.check(*args)
                return differentiate_reference(
                    spec, args, lambda: redispatch(keyset & below, *args)
                )
        elif recorded:
            if spec.mutates and spec.backward is not None:
                _check_present(spec, args)
                spec.check(*args)
                return spec.reference(*args)
            written = [args[i] for i in mutated if i < len(args)]
            check_not_leaf(spec.name, written)
            flat, counts = flattened(args)
            output = VjpOfReference.apply(spec, redispatch, keyset & below, counts, *flat)  # type: ignore[no-untyped-call]
            if written:
                mark_overwritten(spec.name, written, flat)
            return output
        try:
            return redispatch(keyset & below, *args)
        except RuntimeError:
            _check_present(
                spec, args
            )  # native kernels say nothing useful about a tensor that is None
            raise

    return kernel


def _autocast_kernel(spec: OpSpec, overload: Any, device: str) -> Callable[..., Any]:
    """Return the kernel of an Autocast key: cast as the rule of the op says, then go on without autocast.

    Casts are not taken from autocast's cache of weights, which has no interface: our ops have few weights that are not
    packed, and a cast is recorded by ``torch.jit.trace`` in any case.
    """
    rule = spec.autocast
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    excluded = torch._C.DispatchKeySet(key)
    required = len(re.findall(r"Tensor ", spec.schema.partition("->")[0]))

    def eligible(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.dtype in FLOATS
            and value.device.type == device
        )

    def cast(value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, (list, tuple)):
            return [cast(v, dtype) for v in value]
        return value.to(dtype) if eligible(value) else value

    def target(values: tuple[Any, ...]) -> torch.dtype | None:
        if rule == "float32":
            return torch.float32
        if rule == "widest_type":
            dtypes = {value.dtype for value in values[:required] if eligible(value)}
            # Two different ones of these three always promote to float32.
            return torch.float32 if len(dtypes) > 1 else None
        if rule == "lower_precision_unless_packed" and any(
            isinstance(value, torch.Tensor) and value.dtype is torch.uint8 for value in values
        ):
            return None
        return torch.get_autocast_dtype(device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher hands over positional arguments, in the order of the schema.
        dtype = target(args)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if dtype is None:
                return overload(*args, **kwargs)
            return overload(
                *(cast(value, dtype) for value in args),
                **{name: cast(value, dtype) for name, value in kwargs.items()},
            )

    return kernel

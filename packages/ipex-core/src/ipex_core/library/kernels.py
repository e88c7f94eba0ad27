# SPDX-License-Identifier: Apache-2.0
"""Registration of ops: what torch is given for each dispatch key.

Registration gives torch the schema, the reference as the kernel of every device, the fake kernel, the derivative and
the autocast rule. Kernel packages add nothing but faster kernels for a dispatch key. The wheel that brings them is
loaded at the first call of any op, so that importing ipex stays cheap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ParamSpec

import torch
from torch.autograd import forward_ad
from torch.library import Library

from ipex_core.errors import KernelApiError
from ipex_core.kernels import providers
from ipex_core.library.derivatives import (
    VjpOfReference,
    check_not_leaf,
    differentiate_reference,
    flattened,
    has_tangent,
    mark_overwritten,
)
from ipex_core.library.spec import FLOATS, NAMESPACE, AutocastRule, OpSpec, check

__all__ = [
    "LIBRARY",
    "autocast_arguments",
    "define",
    "register",
    "run_op",
    "schemas",
    "set_autocast_rule",
    "specs",
]

Fields = ParamSpec("Fields")

#: Devices whose autocast the rules of a spec apply to.
_AUTOCAST_DEVICES = ("cpu", "xpu")

_SPECS: dict[str, OpSpec] = {}
LIBRARY = Library(NAMESPACE, "FRAGMENT")  # kept alive: its end would remove the registrations
_SCHEMAS: dict[str, str] = {}


def specs() -> Mapping[str, OpSpec]:
    """Return all registered op specifications by name."""
    return MappingProxyType(_SPECS)


def schemas() -> Mapping[str, str]:
    """Return the schema, name included, of each op that `define` was given, by name."""
    return MappingProxyType(_SCHEMAS)


def run_op(name: str, dtype: torch.dtype, *args: Any) -> Any:
    """Call an op, or for float64, which has no kernels, its definition after the checks of the op.

    Args:
        name: Of the op.
        dtype: Of the leading argument.
        args: Positional arguments of the op.
    """
    spec = _SPECS[name]
    if dtype != torch.float64:
        return spec.op(*args)
    # Where torch follows each operation the checks would be followed, too.
    followed = (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    )
    if not followed:
        _check_present(spec, args)
        spec.check(spec.bind(*map(_as_float32, args)))
    return spec.reference(*args)


def _as_float32(value: Any) -> Any:
    """Return float64 tensors as float32 ones of the same shape and strides, whose numbers mean nothing: for checks."""
    if isinstance(value, (list, tuple)):
        return [_as_float32(part) for part in value]
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
        return value
    place = value.detach()
    if type(value) not in (torch.Tensor, torch.nn.Parameter):  # may have no memory of its own
        return place.float()
    return torch.empty(0, dtype=torch.float32, device=value.device).set_(
        place.untyped_storage(), 2 * place.storage_offset(), place.shape, place.stride()
    )


def define(schema: str, library: Library = LIBRARY) -> bool:
    """Give torch the schema of an op, unless a C++ library of ours, loaded before, has done that.

    Args:
        schema: With the name, ``"rms_norm(Tensor x, Tensor? weight) -> Tensor"``.
        library: Where to define it; the op gets its namespace.

    Returns:
        Whether the op is new. An op of another namespace that is not new has a CPU kernel, too.

    Raises:
        KernelApiError: The C++ library knows another op of this name: it belongs to another version.
    """
    name = schema.partition("(")[0]
    if library is LIBRARY:
        _SCHEMAS[name] = schema
    known = torch._C._jit_get_schemas_for_operator(f"{library.ns}::{name}")
    if not known:
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        return True
    if known[0] != torch._C.parse_schema(f"{library.ns}::{schema}"):
        raise KernelApiError(
            f"libipex_cpp.so must be of the version of ipex-core, which expects {schema}, got {known[0]}:"
            " pip install --upgrade ipex-core ipex-cpu-kernels"
        )
    return False


def register(spec: OpSpec) -> OpSpec:
    """Make ``spec`` known to torch and return it.

    Raises:
        ValueError: An op of this name is registered already.
    """
    if spec.name in _SPECS:
        raise ValueError(
            f"op {spec.name!r} is registered already: each op must have a name of its own"
        )
    if spec.mutates and (callable(spec.backward) or spec.autocast is not None):
        raise ValueError(
            f"op {spec.name!r} writes to its arguments: backward must be 'reference' or None, autocast None"
        )
    define(spec.name + spec.schema)
    overload = spec.op.default
    qualname = f"{NAMESPACE}::{spec.name}"
    LIBRARY.impl(spec.name, _first_call_kernel(spec, overload), "CompositeExplicitAutograd")
    torch.library.register_fake(qualname, _fake_kernel(spec), lib=LIBRARY)
    LIBRARY.impl(spec.name, _autograd_kernel(spec, overload), "Autograd", with_keyset=True)
    if spec.autocast is not None:
        arguments = spec.schema.partition("->")[0]
        _required_tensors[spec.name] = sum(map(arguments.count, ("Tensor ", "Tensor[] ")))
        for device in _AUTOCAST_DEVICES:
            kernel = _autocast_kernel(spec.name, overload, device)
            LIBRARY.impl(spec.name, kernel, f"Autocast{device.upper()}")
    _SPECS[spec.name] = spec
    return spec


def _then_register(make: Callable[Fields, OpSpec]) -> Callable[Fields, OpSpec]:
    return lambda *args, **fields: register(make(*args, **fields))


#: Registers an op: takes the fields of its `OpSpec`.
register_op = _then_register(OpSpec)


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

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not providers.providers_loaded():
            providers.load_providers()
            return overload(*args, **kwargs)
        _check_present(spec, args)
        bound = spec.bind(*args, **kwargs)
        spec.check(bound)
        providers.note_reference_call(spec.name, args)
        output = spec.reference(*args, **kwargs)
        if output is None:
            return None
        promised = spec.fake(bound)
        if isinstance(output, tuple):
            return tuple(map(_with_layout, output, promised))
        return _with_layout(output, promised)

    return kernel


def _with_layout(output: torch.Tensor, promised: torch.Tensor) -> torch.Tensor:
    """Return ``output`` with the strides of the fake kernel: a kernel may have kept the strides of an input."""
    return output if output.stride() == promised.stride() else promised.copy_(output)


def _fake_kernel(spec: OpSpec) -> Callable[..., Any]:
    def fake(*args: Any, **kwargs: Any) -> Any:
        _check_present(spec, args)
        bound = spec.bind(*args, **kwargs)
        spec.check(bound)
        return spec.fake(bound)

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
                spec.check(spec.bind(*args))
                return differentiate_reference(
                    spec, args, lambda: redispatch(keyset & below, *args)
                )
        elif recorded:
            if spec.mutates and spec.backward is not None:
                _check_present(spec, args)
                spec.check(spec.bind(*args))
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


#: Op with a rule -> how many arguments in front are tensors, or lists of them, that must be given.
_required_tensors: dict[str, int] = {}
#: Op -> the rule that it follows in place of its own.
_other_rules: dict[str, AutocastRule] = {}


def set_autocast_rule(name: str, rule: AutocastRule | None) -> AutocastRule | None:
    """Let an op follow another rule in ``torch.autocast`` than its specification has, in the whole process.

    Args:
        name: The op; its specification has a rule.
        rule: The rule, or None for its own.

    Returns:
        What this function was given for the op before.
    """
    before = _other_rules.pop(name, None)
    if rule is not None:
        _other_rules[name] = rule
    return before


def autocast_arguments(name: str, device: str, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of an op as its rule casts them in a region of ``torch.autocast``.

    Args:
        name: The op; its specification has a rule.
        device: Type of the device of the region.
        args: Positional arguments.
    """
    dtype = _autocast_dtype(name, device, args)
    return tuple(args) if dtype is None else tuple(_cast(value, dtype, device) for value in args)


def _autocast_dtype(name: str, device: str, args: Sequence[Any]) -> torch.dtype | None:
    rule = _other_rules.get(name, _SPECS[name].autocast)
    if rule == "float32":
        return torch.float32
    if rule == "widest_type":
        first = itertools.chain.from_iterable(
            value if isinstance(value, (list, tuple)) else (value,)
            for value in args[: _required_tensors[name]]
        )
        dtypes = {value.dtype for value in first if _eligible(value, device)}
        # Two different ones of these three always promote to float32.
        return torch.float32 if len(dtypes) > 1 else None
    if rule == "lower_precision_unless_packed" and any(
        isinstance(value, torch.Tensor) and value.dtype is torch.uint8 for value in args
    ):
        return None
    return torch.get_autocast_dtype(device)


def _eligible(value: Any, device: str) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS and value.device.type == device


def _cast(value: Any, dtype: torch.dtype, device: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_cast(v, dtype, device) for v in value]
    return value.to(dtype) if _eligible(value, device) else value


def _autocast_kernel(name: str, overload: Any, device: str) -> Callable[..., Any]:
    """Return the kernel of an Autocast key: cast as the rule of the op says, then go on without autocast.

    Casts are not taken from autocast's cache of weights, which has no interface: our ops have few weights that are not
    packed, and a cast is recorded by ``torch.jit.trace`` in any case.
    """
    key = getattr(torch._C.DispatchKey, f"Autocast{device.upper()}")
    excluded = torch._C.DispatchKeySet(key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        # The dispatcher hands over positional arguments, in the order of the schema.
        dtype = _autocast_dtype(name, device, args)
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            if dtype is None:
                return overload(*args, **kwargs)
            return overload(
                *(_cast(value, dtype, device) for value in args),
                **{one: _cast(value, dtype, device) for one, value in kwargs.items()},
            )

    return kernel

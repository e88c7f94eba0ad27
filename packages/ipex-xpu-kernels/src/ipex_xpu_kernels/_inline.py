# SPDX-License-Identifier: Apache-2.0
"""SYCL kernels that users write, compiled in the process: no oneAPI toolkit is needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ipex_xpu_kernels._device import kernels as native_kernels
from ipex_xpu_kernels._kernel import SyclKernel
from ipex_xpu_kernels._launch import programs

_HEADERS = Path(__file__).with_name("kernels")
#: Headers for kernels of users, by the names by which they are included.
_FILES = {"ipex/xpu.h": "prelude.h", "ipex/bfloat16.h": "bfloat16.h"}


class SyclCompileError(RuntimeError):
    """A SYCL source does not compile; the text comes from the compiler, with the lines of the source."""


@dataclass(frozen=True)
class SyclOp:
    """How an op calls its kernel.

    The kernel gets the op's arguments in their order, then the outputs, then the sizes of `size`: a pointer for each
    tensor, a number for each number and size.

    Attributes:
        schema: Arguments and results in torch's notation, such as ``"(Tensor x, float beta) -> Tensor"``; a tensor that
            the kernel writes to is a ``Tensor(a!)``.
        kernel: Name of the kernel; the name of the op by default. A mapping chooses by the dtype of the first tensor.
        outputs: Called with the op's arguments; returns the new tensor, or a tuple of them, that the kernel fills. By
            default tensors like the first argument. It also tells torch.compile the shapes.
        size: Called with the op's arguments; returns the number of work-items in 1 to 3 dimensions. By default the
            number of elements of the first output, or of the first tensor.
        local: Work-items of a group; see `SyclKernel`.
        backward: Called as ``backward(ctx, *gradients)``; returns a gradient or None for each argument. Without it the
            op cannot be differentiated.
        setup_context: Called as ``setup_context(ctx, inputs, output)`` after the op. By default the tensors among the
            inputs become ``ctx.saved_tensors`` and the others the list ``ctx.numbers``.
    """

    schema: str
    kernel: str | Mapping[torch.dtype, str] | None = None
    outputs: Callable[..., Any] | None = None
    size: Callable[..., int | Sequence[int]] | None = None
    local: int | Sequence[int] | None = None
    backward: Callable[..., Any] | None = None
    setup_context: Callable[..., None] | None = None


class SyclLibrary:
    """What `load_inline` returns: the functions by their names, and all kernels in ``kernels``."""

    def __init__(
        self, name: str, kernels: dict[str, SyclKernel], functions: dict[str, Any]
    ) -> None:
        self.name = name
        self.kernels = kernels
        self.functions = functions
        self.__dict__.update(functions)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[..., Any]: ...

    def __repr__(self) -> str:
        return f"SyclLibrary({self.name!r}: {', '.join(self.functions)})"


# Definitions of a name last as long as their library; a name that is loaded again takes the new ones.
_libraries: dict[str, torch.library.Library] = {}


def load_inline(
    name: str,
    sycl_source: str | Sequence[str],
    functions: Sequence[str] | Mapping[str, str | SyclOp],
    *,
    headers: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> SyclLibrary:
    """Compile SYCL kernels and make them functions, or ops of torch.

    The compiler is part of the SYCL run-time. It needs the C++ headers of the system, which come with g++.

    Args:
        name: Of the library; the namespace of its ops: ``torch.ops.<name>``.
        sycl_source: SYCL C++: kernels are free functions of pointers and numbers that return nothing, marked by
            ``IPEX_KERNEL(dimensions)`` of the header ``ipex/xpu.h`` (or by SYCL's property ``nd_range_kernel``).
        functions: Names of kernels (of a template with its arguments: ``"f<float>"``), which then are called with
            ``size=``, or a mapping from the names of ops to their schemas or `SyclOp`. Ops differentiate (with a
            ``backward``), compile and check their arguments.
        headers: Further files that the source includes, by name.
        options: Options of the compiler, such as ``["-DWIDTH=4"]``.

    Returns:
        An object with one attribute for each function.

    Raises:
        SyclCompileError: The source does not compile.
        ValueError: A kernel is not in the source, or its parameters do not match the op.
        TypeError: The source is not text.
        RuntimeError: There is no xpu device.

    Example:
        >>> source = '''
        ... #include "ipex/xpu.h"
        ... IPEX_KERNEL(1) void twice(const float* x, float* out, long n) {
        ...   const long i = ipex::global_id();
        ...   if (i < n) out[i] = 2 * x[i];
        ... }'''
        >>> ops = ipex.xpu.load_inline("demo", source, {"twice": "(Tensor x) -> Tensor"})  # doctest: +SKIP
        >>> ops.twice(torch.ones(3, device="xpu"))  # doctest: +SKIP
        tensor([2., 2., 2.], device='xpu:0')
    """
    native_kernels("load_inline")  # raises where there is no device
    if not re.fullmatch(r"[A-Za-z]\w*", name):
        raise ValueError(f"load_inline: name must be an identifier, got {name!r}")
    if isinstance(functions, str) or not functions:
        raise ValueError(
            f"load_inline: functions must be names of kernels or a mapping from ops to schemas, got {functions!r}"
        )
    parts = [sycl_source] if isinstance(sycl_source, str) else sycl_source
    if not isinstance(parts, Sequence) or not all(isinstance(part, str) for part in parts):
        raise TypeError(
            f"load_inline: sycl_source must be a string or strings, got {type(sycl_source).__name__}"
        )
    source = "\n".join(parts)
    ops: dict[str, SyclOp] = {}
    if isinstance(functions, Mapping):
        ops = {n: SyclOp(v) if isinstance(v, str) else v for n, v in functions.items()}
        wanted = {k for n, op in ops.items() for k in _kernels_of(n, op)}
    else:
        wanted = set(functions)
    schemas = {op_name: _schema(f"{name}::{op_name}", op) for op_name, op in ops.items()}
    program = _compile(name, source, sorted(wanted), headers or {}, options)
    kernels = {
        kernel: SyclKernel(program, name, kernel, _dimensions_of(kernel, source))
        for kernel in sorted(wanted)
    }
    if not ops:
        return SyclLibrary(name, kernels, dict(kernels))
    return SyclLibrary(name, kernels, _define(name, ops, schemas, kernels))


def _dimensions_of(kernel: str, source: str) -> int | None:
    """Return the dimensions that the source gives a kernel; None where another spelling hides them."""
    name = re.escape(kernel.partition("<")[0])
    found = re.search(rf"IPEX_KERNEL\(\s*([123])\s*\)\s*void\s+{name}\s*\(", source)
    return int(found[1]) if found else None


def _kernels_of(name: str, op: SyclOp) -> tuple[str, ...]:
    if op.kernel is None:
        return (name,)
    return (op.kernel,) if isinstance(op.kernel, str) else tuple(op.kernel.values())


def _compile(
    name: str,
    source: str,
    kernels: list[str],
    headers: Mapping[str, str],
    options: Sequence[str],
) -> Any:
    files = {
        **{name: (_HEADERS / file).read_text(encoding="utf-8") for name, file in _FILES.items()},
        **headers,
    }
    for kernel in kernels:
        template = re.escape(kernel.partition("<")[0])
        if not any(re.search(rf"\b{template}\b", text) for text in (source, *files.values())):
            raise ValueError(
                f"load_inline: the source has no kernel named {kernel}: define it, or remove it from kernels"
            )
    if any("bfloat16" in text for text in (source, *headers.values())):
        options = [*options, *(part for header in _FILES for part in ("-include", header))]
    try:
        return programs().SourceProgram(
            source, kernels, files, list(options), torch.xpu.current_stream().sycl_queue
        )
    except ValueError as error:
        raise ValueError(f"load_inline: {error}") from None
    except RuntimeError as error:
        text = re.sub(r"rtc_\d+\.cpp", f"{name}.cpp", str(error)).strip()
        hint = ""
        if (
            re.search(r"'\w+' file not found", text)
            and "ipex" not in text.split("file not found")[0]
        ):
            hint = "\nThe compiler needs the C++ headers of the system: install g++ (Debian: apt install g++)."
        raise SyclCompileError(f"load_inline: {name} does not compile:\n{text}{hint}") from None


def _define(
    name: str,
    ops: Mapping[str, SyclOp],
    schemas: Mapping[str, Any],
    kernels: Mapping[str, SyclKernel],
) -> dict[str, Any]:
    # Everything is checked before the first definition.
    for op_name, op in ops.items():
        for kernel in _kernels_of(op_name, op):
            _check(f"{name}::{op_name}", op, schemas[op_name], kernels[kernel])
    old = _libraries.pop(name, None)
    if old is not None:
        old._destroy()  # type: ignore[no-untyped-call]
    library = torch.library.Library(name, "FRAGMENT")
    _libraries[name] = library
    functions = {}
    for op_name, op in ops.items():
        qualified = f"{name}::{op_name}"
        library.define(op_name + op.schema)
        library.impl(op_name, _caller(op_name, op, schemas[op_name], kernels), "XPU")
        torch.library.register_fake(qualified, _fake(op, schemas[op_name]), lib=library)
        if op.backward is not None:
            torch.library.register_autograd(
                qualified, op.backward, setup_context=op.setup_context or _save, lib=library
            )
        elif schemas[op_name].returns and not schemas[op_name].is_mutable:
            # torch would warn only, and leave the gradients out.
            torch.library.register_autograd(qualified, _without_gradient(qualified), lib=library)
        functions[op_name] = getattr(getattr(torch.ops, name), op_name)
    return functions


def _schema(name: str, op: SyclOp) -> Any:
    """Return the schema of an op as torch reads it."""
    try:
        schema = torch._C.parse_schema(f"{name}{op.schema}")
    except RuntimeError as error:
        raise ValueError(
            f"load_inline: the schema of {name} must be like '(Tensor x, float a) -> Tensor', got"
            f" {op.schema!r}: {error}"
        ) from None
    for argument in schema.arguments:
        if str(argument.type) not in ("Tensor", "Optional[Tensor]", "float", "int", "bool"):
            raise ValueError(
                f"load_inline: arguments of {name} must be Tensor, Tensor?, float, int or bool, got"
                f" {argument.type} {argument.name}"
            )
    if not any(str(a.type) == "Tensor" for a in schema.arguments):
        raise ValueError(f"load_inline: {name} must take a Tensor, got {op.schema}")
    if any(str(r.type) != "Tensor" for r in schema.returns):
        raise ValueError(f"load_inline: results of {name} must be Tensor, got {op.schema}")
    return schema


def _check(name: str, op: SyclOp, schema: Any, kernel: SyclKernel) -> None:
    """Compare the schema of an op with the parameters of its kernel."""
    names = [a.name for a in schema.arguments]
    names += ["result"] * len(schema.returns)
    # How many sizes there are, only a call tells; there is at least one.
    sizes = 1 if op.size is None else max(1, min(3, len(kernel.parameters) - len(names)))
    kernel.check_count([*names, *["size"] * sizes], f"load_inline: {name}")
    for argument, parameter in zip(schema.arguments, kernel.parameters, strict=False):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if "Tensor" in str(argument.type) and "const*" not in parameter and not written:
            raise ValueError(
                f"load_inline: {name}: {argument.name} must be const in the kernel (got {parameter}) or a Tensor(a!)"
                " in the schema"
            )


def _outputs(op: SyclOp, schema: Any, arguments: Sequence[Any]) -> tuple[torch.Tensor, ...]:
    if op.outputs is not None:
        made = op.outputs(*arguments)
        return tuple(made) if isinstance(made, (tuple, list)) else (made,)
    first = _first(arguments)
    return tuple(
        torch.empty_like(first, memory_format=torch.contiguous_format) for _ in schema.returns
    )


def _first(arguments: Sequence[Any]) -> torch.Tensor:
    return next(a for a in arguments if isinstance(a, torch.Tensor))


def _results(tensors: tuple[torch.Tensor, ...]) -> Any:
    if not tensors:
        return None
    return tensors[0] if len(tensors) == 1 else tensors


def _fake(op: SyclOp, schema: Any) -> Callable[..., Any]:
    def fake(*arguments: Any) -> Any:
        return _results(_outputs(op, schema, arguments) if schema.returns else ())

    return fake


def _caller(
    name: str, op: SyclOp, schema: Any, kernels: Mapping[str, SyclKernel]
) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        # torch leaves out arguments that have their default.
        values = [
            *arguments,
            *(a.default_value for a in schema.arguments[len(arguments) :]),
        ]
        first = _first(values)
        chosen = op.kernel if op.kernel is not None else name
        if not isinstance(chosen, str):
            if first.dtype not in chosen:
                known = ", ".join(str(d) for d in chosen)
                raise TypeError(f"{name}: the first tensor must be {known}, got {first.dtype}")
            chosen = chosen[first.dtype]
        with torch.xpu.device(first.device):
            made = _outputs(op, schema, values) if schema.returns else ()
            size = (made[0] if made else first).numel() if op.size is None else op.size(*values)
            sizes = (size,) if isinstance(size, int) else tuple(size)
            kernels[chosen](*values, *made, *sizes, size=sizes, local=op.local)
        return _results(made)

    return call


def _without_gradient(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(f"{name}: the op has no gradient: give SyclOp a backward function")

    return backward


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*(i for i in inputs if isinstance(i, torch.Tensor)))
    ctx.numbers = [i for i in inputs if not isinstance(i, torch.Tensor)]

# SPDX-License-Identifier: Apache-2.0
"""Instructions of a program that are no ops of ipex: views, lookups and a little arithmetic.

Each is written down as an op is, by a reference in plain PyTorch; the native interpreter has its own
versions. They have no entry in ``torch.ops.ipex``: stock PyTorch has an op for each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from ipex_core.library.checks import check_dtype, check_tensor, dtype_name
from ipex_core.library.spec import FLOATS, check, schema_of
from ipex_core.ops.linear import activate
from ipex_core.program import tensors
from ipex_core.program.int8 import RESIDUAL, check_int8_conv, int8_conv
from ipex_core.program.integers import check_integer, gather, integer, take
from ipex_core.program.pointwise import POINTWISE, check_pointwise, pointwise

__all__ = ["BUILTINS", "POINTWISE", "Builtin"]


@dataclasses.dataclass(frozen=True, slots=True)
class Builtin:
    """One built-in instruction.

    Attributes:
        reference: The instruction in plain PyTorch.
        view: Whether the result may share the memory of an argument.
        shares: Which argument that is.
        check: Checks, when a program is built, what is known of the arguments then: registers stand for the rest.
        native: Whether the native interpreter has it. A program with one that it lacks runs by the references.
        schema: As in `OpSpec`: left out, what the annotations of the reference spell.
    """

    reference: Callable[..., Any]
    view: bool = False
    check: Callable[..., None] | None = None
    shares: int = 0
    native: bool = True
    schema: str = ""


def _check_ids(op: str, argument: str, ids: torch.Tensor, rows: int) -> None:
    check(ids.dtype in (torch.int32, torch.int64), op, argument, "be int32 or int64", ids.dtype)
    # On a device the kernel finds out: to look here would wait for it.
    if ids.numel() and ids.device.type == "cpu":
        low, high = (int(bound) for bound in torch.aminmax(ids))
        bad = low if low < 0 else high
        check(0 <= bad < rows, op, argument, f"be in [0, {rows})", bad)


def embedding(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the rows ``ids`` [...] of ``weight`` [V, H] as [..., H]; ids outside [0, V) are an error."""
    check(weight.dim() == 2, "embedding", "weight", "be 2-D", f"{weight.dim()}-D")
    _check_ids("embedding", "ids", ids, weight.shape[0])
    return torch.nn.functional.embedding(ids, weight)


def select_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows ``index`` [R] of ``x`` [N, ...] as [R, ...]; an index outside [0, N) is an error."""
    check(x.dim() >= 1, "select_rows", "x", "have at least 1 dimension(s)", f"{x.dim()}-D")
    check(index.dim() == 1, "select_rows", "index", "be 1-D", f"{index.dim()}-D")
    _check_ids("select_rows", "index", index, x.shape[0])
    return x.index_select(0, index)


def reshape(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return ``x`` in another shape: 0 keeps the size at that place, one -1 is inferred. A view where possible."""
    kept = all(size != 0 for size in sizes[x.dim() :])
    check(kept, "reshape", "sizes", f"have 0 only below {x.dim()} (the dimensions of x)", sizes)
    shape = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
    known = math.prod(size for size in shape if size != -1)
    positive = all(size >= 0 for size in shape if size != -1) and shape.count(-1) <= 1
    check(positive, "reshape", "sizes", "not be negative but for one -1", sizes)
    fits = (known > 0 and x.numel() % known == 0) if -1 in shape else known == x.numel()
    check(fits, "reshape", "sizes", f"give the shape of {x.numel()} elements", sizes)
    return x.reshape(shape)


def narrow(x: torch.Tensor, dim: int, start: int, length: int) -> torch.Tensor:
    """Return ``x[..., start : start + length, ...]`` along ``dim``, a view."""
    tensors.check_dim("narrow", "dim", dim, x.dim())
    size = x.shape[dim]
    fits = start >= 0 and length >= 0 and start + length <= size
    check(fits, "narrow", "start, length", f"lie in [0, {size}]", f"{start}, {length}")
    return x.narrow(dim, start, length)


def transpose(x: torch.Tensor, a: int, b: int) -> torch.Tensor:
    """Return ``x`` with the dimensions ``a`` and ``b`` swapped, a view."""
    for name, dim in (("a", a), ("b", b)):
        tensors.check_dim("transpose", name, dim, x.dim())
    return x.transpose(a, b)


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``x`` in ``dtype``; ``x`` itself if it has that dtype."""
    return x.to(dtype)


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a + b``, broadcast; float32, bfloat16, float16, int32 or int64, both of one dtype."""
    _check_pair("add", a, b)
    return a + b


def mul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a * b``, broadcast; float32, bfloat16, float16, int32 or int64, both of one dtype."""
    _check_pair("mul", a, b)
    return a * b


def add_scalar(a: torch.Tensor, b: float) -> torch.Tensor:
    """Return ``a + b`` for a number; ``a`` is float32, bfloat16 or float16."""
    check_tensor("add", "a", a, min_dim=0)
    return a + b


def mul_scalar(a: torch.Tensor, b: float) -> torch.Tensor:
    """Return ``a * b`` for a number; ``a`` is float32, bfloat16 or float16."""
    check_tensor("mul", "a", a, min_dim=0)
    return a * b


def _check_pair(op: str, a: torch.Tensor, b: torch.Tensor) -> None:
    known = a.dtype in (*FLOATS, torch.int32, torch.int64)
    check_dtype(op, "b", b, a, "a")
    check(known, op, "a", "have dtype float32, bfloat16, float16", dtype_name(a.dtype))
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    wanted = f"broadcast with a of shape {list(a.shape)}"
    check(all(m in (n, 1) or n == 1 for m, n in pairs), op, "b", wanted, list(b.shape))


def clamp(a: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Return ``a`` with elements below ``low`` or above ``high`` replaced by these; NaN stays."""
    check_tensor("clamp", "a", a, min_dim=0)
    check(low <= high, "clamp", "low", f"be at most high = {high}", low)
    return a.clamp(low, high)


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Return a new contiguous tensor of the shape and dtype of ``x``, with any values."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Return the hyperbolic tangent of each element."""
    return x.tanh()


def plain_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out_features: int,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str = "none",
    mul: torch.Tensor | None = None,
    residual2: torch.Tensor | None = None,
    gate: str = "none",
) -> torch.Tensor:
    """Return what ``ipex::linear`` gives for a weight that is not packed, on devices whose products read it as it lies.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        weight: ``[N, K]`` in the dtype of ``x``, or with a gate ``[2 * N, K]``: the rows of the gate, then the others.
        out_features: N.
        bias: One number for each row of the weight, or None.
        residual: ``[..., N]`` in the dtype of ``x``, or None.
        activation: As of ``ipex::linear``.
        mul: As ``residual``.
        residual2: As ``residual``.
        gate: As of ``ipex::linear``.

    Returns:
        ``[..., N]`` in the dtype of ``x``. The product is rounded before what follows it.
    """
    rows = out_features if gate == "none" else 2 * out_features
    if weight.shape != (rows, x.shape[-1]):
        wanted = f"have shape {[rows, x.shape[-1]]} (out_features and the last size of x)"
        check(False, "plain_linear", "weight", wanted, list(weight.shape))
    if bias is not None and bias.dtype != x.dtype:
        bias = bias.to(x.dtype)
    y = torch.nn.functional.linear(x, weight, bias)
    if gate == "silu":
        y = torch.ops.ipex.silu_and_mul(y)
    elif gate != "none":
        y = torch.ops.ipex.gelu_and_mul(y, "tanh" if gate == "gelu_tanh" else "none")
    else:
        y = activate(y, activation)
    if mul is not None:
        y = y * mul
    for one in (residual, residual2):
        if one is not None:
            y = y + one
    return y


def copy_(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Write ``src``, broadcast and converted, into ``dst``."""
    pairs = zip(reversed(dst.shape), reversed(src.shape), strict=False)
    fits = src.dim() <= dst.dim() and all(n in (m, 1) for m, n in pairs)
    wanted = f"have a shape that broadcasts to the shape of dst = {list(dst.shape)}"
    check(fits, "copy_", "src", wanted, list(src.shape))
    dst.copy_(src)


#: The built-ins by name. Those that end in ``_scalar`` are what ``add`` and ``mul`` become for a Python number.
BUILTINS: Mapping[str, Builtin] = MappingProxyType(
    {
        "embedding": Builtin(embedding),
        "select_rows": Builtin(select_rows),
        "reshape": Builtin(reshape, view=True),
        "narrow": Builtin(narrow, view=True),
        "transpose": Builtin(transpose, view=True),
        "cast": Builtin(cast, view=True),
        "add": Builtin(add),
        "add_scalar": Builtin(add_scalar),
        "mul": Builtin(mul),
        "mul_scalar": Builtin(mul_scalar),
        "tanh": Builtin(tanh),
        "plain_linear": Builtin(plain_linear, native=False),
        "clamp": Builtin(clamp),
        "empty_like": Builtin(empty_like),
        "copy_": Builtin(copy_, schema="(Tensor(a!) dst, Tensor src) -> ()"),
        "permute": Builtin(tensors.permute, True, tensors.check_permute),
        "expand": Builtin(tensors.expand, True),
        "unsqueeze": Builtin(tensors.unsqueeze, True),
        "squeeze": Builtin(tensors.squeeze, True),
        "slice": Builtin(tensors.slice, True, tensors.check_slice),
        "select": Builtin(tensors.select, True),
        "pointwise": Builtin(pointwise, check=check_pointwise),
        "contiguous": Builtin(tensors.contiguous, True),
        "channels_last": Builtin(tensors.channels_last, True),
        "cat": Builtin(tensors.cat, check=tensors.check_cat),
        "pad": Builtin(tensors.pad, check=tensors.check_pad),
        "max_pool2d": Builtin(tensors.max_pool2d, check=tensors.check_max_pool2d),
        "avg_pool2d": Builtin(tensors.avg_pool2d, check=tensors.check_avg_pool2d),
        "depthwise_convolution": Builtin(
            tensors.depthwise_convolution, check=tensors.check_depthwise_convolution
        ),
        "integer": Builtin(integer, check=check_integer),
        "take": Builtin(take),
        "gather": Builtin(gather),
        "int8_conv": Builtin(int8_conv, check=check_int8_conv),
        # Needs a residual and writes the result into it.
        "int8_conv_sum_": Builtin(
            *(int8_conv, True, check_int8_conv, RESIDUAL),
            schema=schema_of(int8_conv).replace("Tensor? residual", "Tensor(a!) residual"),
        ),
        "group_norm": Builtin(tensors.group_norm, check=tensors.check_group_norm),
        "upsample_bilinear2d": Builtin(
            tensors.upsample_bilinear2d,
            check=functools.partial(tensors.check_size, "upsample_bilinear2d"),
        ),
        "upsample_nearest2d": Builtin(
            tensors.upsample_nearest2d,
            check=functools.partial(tensors.check_size, "upsample_nearest2d"),
        ),
        "mean": Builtin(tensors.mean, check=functools.partial(tensors.check_dims, "mean")),
        "sum": Builtin(tensors.sum, check=functools.partial(tensors.check_dims, "sum")),
        "amax": Builtin(tensors.amax, check=functools.partial(tensors.check_dims, "amax")),
    }
)

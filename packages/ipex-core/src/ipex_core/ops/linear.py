# SPDX-License-Identifier: Apache-2.0
"""Dense linear layer on packed weights, what can follow a matrix product, the packing, and rows of a packed weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import (
    PRODUCT_TOLERANCE,
    acc,
    check_device,
    check_dtype,
    check_one_of,
    check_shape,
    check_tensor,
    dtype_name,
    randn,
    strided,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, BenchCase, Sample, check
from ipex_core.packing import dense
from ipex_core.packing.dense import PANEL, check_packed, deinterleave_gate_up, interleave_gate_up

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
GATES = ("none", "silu", "gelu", "gelu_tanh")


def activate(y: Tensor, activation: str) -> Tensor:
    """Apply one of `ACTIVATIONS`."""
    if activation == "relu":
        return functional.relu(y)
    if activation == "gelu":
        return functional.gelu(y)
    if activation == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    if activation == "silu":
        return functional.silu(y)
    return y


def weight_rows(out_features: int, gate: str = "none") -> int:
    """Return how many rows the weight has for ``out_features`` columns of the result."""
    return out_features if gate == "none" else -(-out_features // PANEL) * 2 * PANEL


def check_activation(op: str, activation: str, gate: str = "none") -> None:
    """Check the names; the first check of a kernel, because they say how many rows the weight has."""
    check_one_of(op, "activation", activation, ACTIVATIONS)
    check_one_of(op, "gate", gate, GATES)
    one = gate == "none" or activation == "none"
    check(one, op, "activation", "be none where there is a gate", activation)


def check_operands(
    a: Arguments, *, bias: bool = True, dtype: torch.dtype | None = None, of: str = "x"
) -> None:
    """Check the tensors; the result has the shape of ``x`` with ``out_features`` last.

    Their dtype is the dtype of ``x``, or ``dtype``: the dtype of the tensor that messages call ``of``. Without ``bias``
    the caller checks that.
    """
    like = a.x if dtype is None else a.x.new_empty((), dtype=dtype)
    if bias and a.bias is not None:
        n = weight_rows(a.out_features, a.gate)
        source = "out_features" if a.gate == "none" else "of the interleaved weight"
        check_device(a.op, "bias", a.bias, a.x)
        check_dtype(a.op, "bias", a.bias, like, of, or_float32=True)
        fits = a.bias.dim() == 1 and a.bias.shape[0] == n
        a.require(fits, "bias", f"be 1-D of size {source} = {n}", list(a.bias.shape))
    shape = [*a.x.shape[:-1], a.out_features]
    for name in ("mul", "residual", "residual2"):
        value = getattr(a, name)
        if value is None:
            continue
        check_device(a.op, name, value, a.x)
        check_dtype(a.op, name, value, like, of)
        check_shape(a.op, name, value, shape)


def apply_epilogue(
    y: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
) -> Tensor:
    """Return what follows the product ``y`` = x W^T, in the dtype of ``y``."""
    if bias is not None:
        y = y + bias.to(y.dtype)
    if gate == "none":
        y = activate(y, activation)
    else:
        first, up = deinterleave_gate_up(y, out_features, dim=-1)
        y = activate(first, gate) * up
    if mul is not None:
        y = y * acc(mul)
    if residual is not None:
        y = y + acc(residual)
    if residual2 is not None:
        y = y + acc(residual2)
    return y


# --- linear -----------------------------------------------------------------------------------------------------------


def stored_dtype(x: Tensor, packed_weight: Tensor) -> torch.dtype:
    """Return the dtype of a packed weight: the dtype of ``x`` unless the reference is run in float64."""
    if x.dtype != torch.float64:
        return x.dtype
    header = dense.read_header(packed_weight)
    assert header is not None
    return next(d for d, f in dense.FORMATS.items() if f == header[0])


def _linear(
    x: Tensor,
    packed_weight: Tensor,
    out_features: int,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
    gate: str = "none",
) -> Tensor:
    """Compute ``activation(x @ weight.T + bias) * mul + residual + residual2`` with a packed weight.

    With a gate, the rows of the weight alternate between rows of gate_proj and rows of up_proj, see
    `ipex_core.woq.interleave_gate_up`, and ``gate(x @ gate.T + bias_g) * (x @ up.T + bias_u)`` takes the place of the
    activation.
    Products are accumulated in float32 and the result is rounded once.

    Args:
        x: ``[..., K]``, float32, bfloat16 or float16.
        packed_weight: Result of `pack_linear_weight` for a weight in the dtype of ``x``: ``[N, K]``, or with a gate
            ``[2 * N', K]`` with N' = N rounded up to a multiple of 32.
        out_features: The number of output features, N.
        bias: One number for each row of the weight, in the dtype of ``x`` or float32, or None.
        residual: ``[..., N]`` in the dtype of ``x``, or None.
        activation: ``"none"``, ``"relu"``, ``"gelu"`` (erf), ``"gelu_tanh"`` or ``"silu"``.
        mul: ``[..., N]`` in the dtype of ``x``, or None.
        residual2: ``[..., N]`` in the dtype of ``x``, or None.
        gate: ``"none"``, ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; not together with an activation.

    Returns:
        A contiguous ``[..., N]`` tensor in the dtype of ``x``.
    """
    stored = stored_dtype(x, packed_weight)
    n = weight_rows(out_features, gate)
    dense.check_header("linear", "packed_weight", packed_weight, n, x.shape[-1], stored)
    weight = dense.unpack(packed_weight, n, x.shape[-1], stored)
    wide = acc(x)
    y = functional.linear(wide, weight.to(wide.dtype))
    y = apply_epilogue(y, out_features, bias, activation, mul, residual, residual2, gate)
    return y.to(x.dtype)


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    check_device(a.op, "packed_weight", a.packed_weight, a.x)
    a.require(a.out_features > 0, "out_features", "be positive")
    check_activation(a.op, a.activation, a.gate)
    n = weight_rows(a.out_features, a.gate)
    check_packed(a.op, "packed_weight", a.packed_weight, n, a.x.shape[-1], a.x.dtype)
    check_operands(a)


def _case(
    dtype: torch.dtype, m: int, k: int, n: int, seed: int = 0
) -> tuple[Tensor, Tensor, int, Tensor, Tensor]:
    x = randn(m, k, dtype=dtype, seed=seed)
    weight = randn(n, k, dtype=dtype, seed=seed + 1, scale=max(k, 1) ** -0.5)
    bias = randn(n, dtype=dtype, seed=seed + 2)
    residual = randn(m, n, dtype=dtype, seed=seed + 3)
    return x, dense.pack(weight), n, bias, residual


def gated(
    dtype: torch.dtype, m: int, k: int, n: int, gate: str, residual: Tensor | None = None
) -> Sample:
    """Return a sample with a gate."""
    parts = [randn(n, k, dtype=dtype, seed=seed, scale=k**-0.5) for seed in (11, 12)]
    bias = interleave_gate_up(randn(n, dtype=dtype, seed=13), randn(n, dtype=dtype, seed=14))
    packed = dense.pack(interleave_gate_up(*parts))
    args = (randn(m, k, dtype=dtype, seed=10), packed, n, bias, residual, "none", None, None, gate)
    return Sample(args, id=f"gate-{gate}-{m}x{k}x{n}")


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    sizes = (
        (1, 1, 1),
        (1, 64, 32),
        (1, 100, 50),
        (2, 33, 65),
        (3, 128, 96),
        (4, 17, 33),
        (5, 384, 128),
        (7, 31, 200),
        (13, 258, 64),
        (16, 64, 160),
        (32, 96, 48),
        (33, 512, 130),
        (70, 384, 384),
        (30, 2100, 40),
    )
    for m, k, n in sizes:
        x, packed, n, bias, _ = _case(dtype, m, k, n)
        yield Sample((x, packed, n, bias), id=f"{m}x{k}x{n}")
    x, packed, n, bias, residual = _case(dtype, 9, 80, 72, seed=5)
    yield Sample((x, packed, n), id="no_bias")
    yield Sample((x, packed, n, bias.float()), id="float32_bias")
    for activation in ACTIVATIONS:
        yield Sample((x, packed, n, bias, None, activation), id=activation)
        yield Sample((x, packed, n, bias, residual, activation), id=f"{activation}-residual")
    mul, residual2 = (randn(9, 72, dtype=dtype, seed=seed) for seed in (6, 7))
    yield Sample((x, packed, n, bias, None, "silu", mul), id="silu-mul")
    yield Sample(
        (x, packed, n, bias, residual, "gelu", strided(mul), residual2), id="gelu-mul-add-add"
    )
    yield Sample((x, packed, n, None, residual, "none", None, residual2), id="add-add")
    for gate in GATES[1:]:
        yield gated(dtype, 9, 80, 72, gate, residual)
    yield gated(dtype, 1, 64, 32, "silu")
    yield gated(dtype, 40, 70, 200, "silu")
    x3 = randn(2, 3, 80, dtype=dtype, seed=9)
    yield Sample((x3, packed, n, bias), id="3d")
    yield Sample((randn(80, dtype=dtype, seed=9), packed, n, bias), id="1d")
    yield Sample((strided(x), packed, n, bias, strided(residual)), id="noncontiguous")
    yield Sample((randn(9, 160, dtype=dtype)[:, 40:120], packed, n, bias), id="rows_strided")
    yield Sample((randn(0, 80, dtype=dtype), packed, n, bias), id="no_rows")
    special = x.clone()
    special[0, 3] = float("nan")
    special[1, 5] = float("inf")
    yield Sample((special, packed, n, bias, None, "silu"), id="special_values")


_SHAPES = (
    *((m, 4096, 4096) for m in (1, 2, 4, 8, 16, 32, 128)),
    (512, 4096, 4096),
    (2048, 2048, 2048),
    *((m, 384, 1536) for m in (1, 16, 128, 4096)),
    (128, 1536, 384),
)


def _bench() -> Iterator[BenchCase]:
    for m, k, n in _SHAPES:
        yield BenchCase(
            f"{m}x{k}x{n}",
            lambda dtype, m=m, k=k, n=n: _case(dtype, m, k, n)[:4],
            lambda dtype, m=m, k=k, n=n: (m * k + n * k + m * n) * dtype.itemsize,
            flops=2 * m * k * n,
            rotate=m <= 32,
        )


def stock_args(
    x: Tensor, packed_weight: Tensor, out_features: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the arguments of stock ``linear`` for the arguments of the op."""
    return x, dense.unpack(packed_weight, out_features, x.shape[-1], x.dtype), bias


register_op(
    reference=_linear,
    check=_check,
    fake=lambda a: a.x.new_empty(*a.x.shape[:-1], a.out_features),
    samples=_samples,
    stock=functional.linear,
    stock_args=stock_args,
    tolerance=PRODUCT_TOLERANCE,
    bench=_bench,
    summary="Linear layer on a packed weight with bias, activation and residual",
)


# --- packing of weights -----------------------------------------------------------------------------------------------


def _pack_linear_weight(weight: Tensor) -> Tensor:
    """Pack a linear weight for `linear`.

    Args:
        weight: ``[N, K]``, float32, bfloat16 or float16.

    Returns:
        A 1-D uint8 tensor; `unpack_linear_weight` gives the weight back exactly. The format, 64 bytes of header and
        panels of 32 output features, is the same at every ISA level.
    """
    return dense.pack(weight)


def _pack_check(a: Arguments) -> None:
    check_tensor(a.op, "weight", a.weight)
    fits = a.weight.dim() == 2 and 0 not in a.weight.shape
    a.require(fits, "weight", "be 2-D and not empty", list(a.weight.shape))


def _pack_fake(a: Arguments) -> Tensor:
    size = dense.packed_bytes(a.weight.shape[0], a.weight.shape[1], a.weight.dtype)
    return a.weight.new_empty(size, dtype=torch.uint8)


def _pack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n, k in ((1, 1), (32, 64), (33, 65), (50, 7), (200, 129)):
        yield Sample((randn(n, k, dtype=dtype, seed=61),), id=f"{n}x{k}")
    yield Sample((randn(40, 24, dtype=dtype, seed=62).t(),), id="transposed")
    special = randn(3, 5, dtype=dtype, seed=63)
    special[0, 0], special[1, 1], special[2, 2] = float("nan"), float("inf"), -0.0
    yield Sample((special,), id="special_values")


def _unpack_linear_weight(
    packed: Tensor, out_features: int, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the plain weight of a packed one, bit for bit.

    Args:
        packed: Result of `pack_linear_weight`.
        out_features: The number of output features, N.
        in_features: The number of input features, K.
        dtype: The dtype of the weight that was packed.

    Returns:
        A contiguous ``[N, K]`` tensor.
    """
    dense.check_header("unpack_linear_weight", "packed", packed, out_features, in_features, dtype)
    return dense.unpack(packed, out_features, in_features, dtype)


def _unpack_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.out_features > 0, "out_features", "be positive")
    a.require(a.in_features > 0, "in_features", "be positive")
    check_packed(a.op, "packed", a.packed, a.out_features, a.in_features, a.dtype)


def _unpack_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _pack_samples(dtype):
        weight = sample.args[0]
        yield Sample((dense.pack(weight), *weight.shape, dtype), id=sample.id)


register_op(
    reference=_pack_linear_weight,
    check=_pack_check,
    fake=_pack_fake,
    samples=_pack_samples,
    backward=None,
    lift=False,
    summary="Pack a linear weight for `linear`",
)
register_op(
    reference=_unpack_linear_weight,
    check=_unpack_check,
    fake=lambda a: a.packed.new_empty(a.out_features, a.in_features, dtype=a.dtype),
    samples=_unpack_samples,
    backward=None,
    lift=False,
    summary="Give back the weight of a packed one, bit for bit",
)


# --- rows of a packed weight ------------------------------------------------------------------------------------------


_OP = "packed_embedding"


def _embedding(
    packed: Tensor, ids: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> Tensor:
    """Return rows of a weight that is packed for `linear`, bit for bit.

    A language model whose head has the weight of its embedding needs that weight once: packed, as the head reads it.

    Args:
        packed: Result of `pack_linear_weight` for a weight ``[num_embeddings, embedding_dim]``.
        ids: int32 or int64 of any shape, each in ``[0, num_embeddings)``.
        num_embeddings: The number of rows of the weight.
        embedding_dim: The size of a row.
        dtype: The dtype of the weight that was packed: float32, bfloat16 or float16.

    Returns:
        ``[*ids.shape, embedding_dim]`` of this dtype, contiguous.

    Raises:
        RuntimeError: An argument does not fit, or there is no row for an id.
    """
    dense.check_header(_OP, "packed", packed, num_embeddings, embedding_dim, dtype)
    for row in ids.flatten().tolist():
        check(0 <= row < num_embeddings, _OP, "ids", f"hold rows in [0, {num_embeddings})", row)
    weight = dense.unpack(packed, num_embeddings, embedding_dim, dtype)
    return torch.nn.functional.embedding(ids, weight)


def _embedding_check(a: Arguments) -> None:
    a.require(a.dtype in FLOATS, "dtype", "be float32, bfloat16 or float16", dtype_name(a.dtype))
    a.require(a.num_embeddings > 0, "num_embeddings", "be positive")
    a.require(a.embedding_dim > 0, "embedding_dim", "be positive")
    check_packed(_OP, "packed", a.packed, a.num_embeddings, a.embedding_dim, a.dtype)
    check_device(_OP, "ids", a.ids, a.packed, "packed")
    check_tensor(_OP, "ids", a.ids, (torch.int32, torch.int64), min_dim=0)


def _ids(*shape: int, rows: int, dtype: torch.dtype = torch.int64) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randint(rows, shape, generator=generator).to(dtype)


def _embedding_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for rows, dim in ((1, 1), (32, 64), (33, 65), (50, 7), (200, 130)):
        packed = dense.pack(randn(rows, dim, dtype=dtype, seed=71))
        every = torch.arange(rows).flip(0)
        yield Sample((packed, every, rows, dim, dtype), id=f"{rows}x{dim}")
    more = (rows, dim, dtype)
    yield Sample((packed, _ids(2, 3, 5, rows=rows, dtype=torch.int32), *more), id="int32-3d")
    yield Sample((packed, _ids(9, 14, rows=rows)[::2, ::3], *more), id="strided_ids")
    yield Sample((packed, torch.full((9,), 3).expand(2, 9), *more), id="one_id_often")
    yield Sample((packed, torch.tensor(rows - 1), *more), id="0d")
    yield Sample((packed, _ids(3, 0, rows=rows), *more), id="no_ids")
    special = randn(3, 5, dtype=dtype, seed=63)
    special[0, 0], special[1, 1], special[2, 2] = float("nan"), float("inf"), -0.0
    args = (dense.pack(special), torch.tensor([2, 0, 1]), 3, 5, dtype)
    yield Sample(args, id="special_values")


def _embedding_bench() -> Iterator[BenchCase]:
    for tokens, rows, dim in ((1, 16384, 2048), (1024, 16384, 2048), (64, 2000, 512)):
        yield BenchCase(
            f"{tokens}of{rows}x{dim}",
            lambda dtype, t=tokens, n=rows, k=dim: (
                torch.ops.ipex.pack_linear_weight(randn(n, k, dtype=dtype)),
                _ids(t, rows=n),
                n,
                k,
                dtype,
            ),
            lambda dtype, n=tokens * dim: 2 * n * dtype.itemsize,
        )


def _stock_args(
    packed: Tensor, ids: Tensor, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    return ids, dense.unpack(packed, num_embeddings, embedding_dim, dtype)


register_op(
    name=_OP,
    reference=_embedding,
    check=_embedding_check,
    fake=lambda a: a.packed.new_empty(*a.ids.shape, a.embedding_dim, dtype=a.dtype),
    samples=_embedding_samples,
    stock=torch.nn.functional.embedding,
    stock_args=_stock_args,
    backward=None,
    lift=False,
    bench=_embedding_bench,
    summary="Rows of a weight that is packed for `linear`",
)

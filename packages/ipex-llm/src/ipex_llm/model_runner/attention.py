# SPDX-License-Identifier: Apache-2.0
"""Attention as a part of a program: with keys and values in the cache, with latents or rows, or to a picture.

In latent attention, what is cached is the latent, and the projections from it are absorbed. A score of a head is
``q . (U c) = (U^T q) . c`` with the latent ``c``, so queries are projected to the latent once and meet it as it is;
values are projected from the weighted sum of latents. All heads share one row of the cache, ``[latent | rotated key]``,
and attention has many query heads to one key and value head.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.program import Register
from ipex_llm.arch import (
    AttentionPlan,
    DifferencePlan,
    KeyBiasPlan,
    LatentPlan,
    LinearPlan,
    MixerPlan,
    NearPlan,
    NormPlan,
    PicturePlan,
)
from ipex_llm.arch.formulas import taps_of
from ipex_llm.arch.parts import SharedRowPlan
from ipex_llm.arch.reference import gates_of, picture_rows
from ipex_llm.kv_cache import Step
from ipex_llm.model_runner.dense import (
    Linear,
    UnsupportedPlan,
    WeightStore,
    _unpack,
    call_linear,
    check_packable,
)
from ipex_llm.model_runner.feed_forward import opened, pointwise, write_inner
from ipex_quant.weight_only.linear import WoqLinearModule

#: Elements behind a key with a bias: the bias and zeros, so that keys keep the alignment of their heads.
BIAS_WIDTH = 16


def write_attention(
    writer: Any,
    index: int,
    a: AttentionPlan,
    qkv: Register,
    key_bias: Linear | None = None,
    near: Linear | None = None,
) -> Register:
    """Write an attention.

    Args:
        writer: Writes the program.
        index: Of the layer.
        a: Its plan.
        qkv: Queries, keys and values side by side, and the gates of a gated attention.
        key_bias: Packed weight of the layer that makes biases of keys, or None.
        near: Of `pack_near`, or None.

    Returns:
        What the output projection reads.
    """
    b = writer.b
    heads, kv, d = a.heads, a.kv_heads, a.head_dim
    if a.source is not None:
        return _write_shared(writer, a, qkv)
    gates: Register | None = None
    if a.gated:
        width = (heads + 2 * kv) * d
        gates = b.call("narrow", qkv, 1, width, a.gates)
        qkv = b.call("narrow", qkv, 1, 0, width)
    numbers: Register | None = None
    if near is not None:
        size = 0 if a.near is None else heads * a.near.rows.shape[1]
        numbers = near_numbers(
            writer, a, near, b.call("narrow", qkv, 1, (heads + 2 * kv) * d, size)
        )
        rows = b.call("narrow", qkv, 1, heads * d, 2 * kv * d)
        rows = short_convolution(writer, index, 0, a.convs, rows)
        rows = b.call("reshape", rows, [0, 2 * kv, d])
        q = b.call("reshape", b.call("narrow", qkv, 1, 0, heads * d), [0, heads, d])
        k, v = (b.call("narrow", rows, 1, start, kv) for start in (0, kv))
    else:
        rows = b.call("reshape", qkv, [0, heads + (1 if a.keys_as_values else 2) * kv, d])
        q = b.call("narrow", rows, 1, 0, heads)
        k = b.call("narrow", rows, 1, heads, kv)
        v = k if a.keys_as_values else b.call("narrow", rows, 1, heads + kv, kv)
    if a.value_norm is not None:  # before keys are rotated in place
        v = writer.norm(a.value_norm, v)
    if not a.norm_after_rope:
        q = _head_norm(writer, a, a.query_norm, q, heads)
        k = _head_norm(writer, a, a.key_norm, k, kv)
    cache = writer.caches[index]
    rope = a.rope
    plain = not a.norm_after_rope and key_bias is None and a.difference is None
    fused = rope is not None and not writer.scaled and plain
    if rope is not None:
        cos, sin = writer.ropes[repr(rope)]
        if fused:
            b.call(
                "rotary_embedding_and_cache",
                *(q, k, v, cache[0], cache[1], sin, cos, writer.slots),
                *(rope.dim, rope.half, writer.positions),
                **writer.scales_of(index),
            )
        else:
            b.call("rotary_embedding", q, k, sin, cos, rope.dim, rope.half, writer.positions)
    if a.norm_after_rope:
        q = _head_norm(writer, a, a.query_norm, q, heads)
        k = _head_norm(writer, a, a.key_norm, k, kv)
    if a.key_bias is not None and key_bias is not None:
        q, k, v = _with_bias(writer, a, a.key_bias, key_bias, q, k, v)
    if a.difference is not None:
        half = kv // 2
        first, second = (b.call("narrow", v, 1, start, half) for start in (0, half))
        q, k = b.call("cat", [q, q], 1), b.call("cat", [k, k], 1)
        v = b.call("cat", [first, first, second, second], 1)
    if not fused:
        scales = writer.scales_of(index)
        b.call("reshape_and_cache", k, v, cache[0], cache[1], writer.slots, **scales)
    q = tempered(writer, a, q)
    if a.query_factors is not None:
        factors = b.constant(a.query_factors.unsqueeze(0))
        q = pointwise(b, [q, factors], [], [("mul", 0, 1)], writer.e.store.dtype)
    out = b.call("empty_like", q)
    attend(writer, index, a, out, q, numbers)
    if a.difference is not None:
        out = _difference(writer, a, a.difference, out)
    if a.value_dim is not None or key_bias is not None:
        out = b.call("narrow", out, 2, 0, a.value_width)
    return gated(writer, a, out, gates)


def pack_near(store: WeightStore, plan: NearPlan) -> Linear:
    """Pack the weight that makes numbers for the last keys of queries."""
    store.watch(plan.module, plan.weight)
    return store.plain(plan.rows.to(store.dtype).contiguous(), None)


def tempered(writer: Any, a: AttentionPlan, x: Register) -> Register:
    """Write rows ``[T, heads, width]`` times the factors of their positions, where the attention has some."""
    if a.temperature is None:
        return x
    wide = writer.b.call(
        "mul", writer.b.call("cast", x, torch.float32), writer.factors[a.temperature]
    )
    result: Register = writer.b.call("cast", wide, writer.e.store.dtype)
    return result


def near_numbers(writer: Any, a: AttentionPlan, weight: Linear, x: Register) -> Register:
    """Write the numbers for the last keys of queries, ``[T, heads, keys]``; `x` are the rows of all heads."""
    b, size = writer.b, a.near.rows.shape[1] if a.near else 0
    x = b.call("reshape", x, [0, a.heads, size])
    if a.near is not None and a.near.norm is not None:
        x = writer.norm(a.near.norm, x)
    y = writer.linear(weight, b.call("reshape", x, [-1, size]))
    return tempered(writer, a, b.call("reshape", y, [-1, a.heads, weight.features]))


def short_convolution(
    writer: Any,
    index: int,
    place: int,
    convs: tuple[nn.Module, ...],
    x: Register,
    scale: float = 1.0,
) -> Register:
    """Write rows with what short convolutions of a layer give added; `place`: of their history."""
    for conv in convs:
        writer.e.store.watch(conv, "weight")
    taps = writer.b.constant(taps_of(convs, scale))
    history = writer.state_caches[index][place]
    result: Register = writer.b.call(
        "causal_conv1d_varlen", x, history, taps, None, "none", *writer.texts
    )
    return result


def _difference(writer: Any, a: AttentionPlan, plan: DifferencePlan, x: Register) -> Register:
    """Write one half of the heads less a multiple of the other, of what heads give twice, ``[T, 2 * heads, width]``."""
    b, heads = writer.b, a.heads
    for name in plan.factors:
        writer.e.store.watch(plan.module, name)
    both = b.call("cat", [b.call("narrow", x, 1, start, heads) for start in (0, heads)], 2)
    halves = [b.call("narrow", both, 1, start, heads // 2) for start in (0, heads // 2)]
    less = [("mul", 1, 2), ("sub", 0, 3)]
    y = writer.norm(plan.norm, pointwise(b, halves, [plan.factor], less, writer.e.store.dtype))
    result: Register = b.call("mul", y, 1.0 - plan.start)
    return result


def _with_bias(
    writer: Any,
    a: AttentionPlan,
    plan: KeyBiasPlan,
    weight: Linear,
    q: Register,
    k: Register,
    v: Register,
) -> tuple[Register, Register, Register]:
    """Write queries, keys and values with elements behind them of which the first adds a bias to the scores of keys."""
    b = writer.b
    flat = b.call("reshape", v, [0, a.kv_heads * a.head_dim])
    steps = b.call("reshape", writer.linear(weight, flat), [0, a.kv_heads, 1])
    rate = getattr(plan.module, plan.rate).detach().float().view(1, -1, 1)
    writer.e.store.watch(plan.module, plan.rate)
    # exp(rate * softplus(x)) / scale: max(x, 0) + log(1 + exp(-|x|))
    chain = [("abs", 0), ("neg", 3), ("exp", 4), ("log1p", 5), ("relu", 0), ("add", 6, 7)]
    chain += [("mul", 8, 1), ("exp", 9), ("mul", 10, 2)]
    numbers = [steps, b.constant(rate)]
    bias = pointwise(b, numbers, [1.0 / a.scale], chain, torch.float32)
    return widened(writer, q, None), widened(writer, k, bias), widened(writer, v, bias)


def widened(writer: Any, x: Register, number: Register | None, factor: float = 1.0) -> Register:
    """Write rows ``[T, heads, width]`` with numbers ``[T, heads, 1]`` times a factor, or ones, and zeros behind."""
    b, first = writer.b, torch.zeros(1, 1, BIAS_WIDTH)
    first[..., 0] = factor
    steps = [("mul", 0, 1)]
    if number is None:
        number, steps = b.call("narrow", x, 2, 0, 1), [("eq", 0, 0), ("mul", 2, 1)]
    behind = pointwise(b, [number, b.constant(first)], [], steps, writer.e.store.dtype)
    result: Register = b.call("cat", [x, behind], 2)
    return result


def gated(writer: Any, a: AttentionPlan, x: Register, gates: Register | None) -> Register:
    """Write what heads attend to ``[T, heads, width]`` times the functions of gates, ``[T, heads * width]``."""
    b, heads = writer.b, a.heads
    if gates is not None and a.gate_bias is not None:
        module, name = a.gate_bias
        writer.e.store.watch(module, name)
        bias = getattr(module, name).detach().to(writer.e.store.dtype).view(heads, 1)
        gates = b.call("reshape", gates, [0, heads, a.gates // heads])
        gates = b.call("reshape", b.call("add", gates, b.constant(bias)), [0, a.gates])
    if gates is not None and a.gated == "heads":
        gates = b.call("reshape", gates, [0, heads, 1])
        x = opened(b, a.opening, gates, x, writer.e.store.dtype)
    result: Register = b.call("reshape", x, [0, heads * a.value_width])
    if gates is not None and a.gated == "features":
        result = opened(b, a.opening, gates, result, writer.e.store.dtype)
    return result


def _write_shared(writer: Any, a: AttentionPlan, queries: Register) -> Register:
    """Write an attention to the keys and values that a layer before has cached."""
    b, heads, rope = writer.b, a.heads, a.rope
    assert a.source is not None
    q = b.call("reshape", queries, [0, heads, a.head_dim])
    q = _head_norm(writer, a, a.query_norm, q, heads)
    if rope is not None:
        cos, sin = writer.ropes[repr(rope)]
        unused = b.call("narrow", b.call("empty_like", q), 1, 0, 1)  # where the keys would be
        b.call("rotary_embedding", q, unused, sin, cos, rope.dim, rope.half, writer.positions)
    out = b.call("empty_like", q)
    attend(writer, a.source, a, out, q)
    result: Register = b.call("reshape", out, [0, heads * a.head_dim])
    return result


def _head_norm(
    writer: Any, a: AttentionPlan, norm: NormPlan | None, x: Register, heads: int
) -> Register:
    if norm is None:
        return x
    if a.norm_over == "head":
        return writer.norm(norm, x)
    flat = writer.b.call("reshape", x, [0, heads * a.head_dim])
    result: Register = writer.b.call("reshape", writer.norm(norm, flat), [0, heads, a.head_dim])
    return result


def attend(
    writer: Any,
    index: int,
    a: AttentionPlan,
    out: Register,
    q: Register,
    slopes: Register | None = None,
) -> None:
    """Write the attention of queries ``[T, heads, width]`` to the cache of a layer, into ``out``."""
    b, cache = writer.b, writer.caches[index]
    if a.alibi_slopes is not None:
        slopes = b.constant(a.alibi_slopes.detach().float())
    more: dict[str, Any] = {"softcap": a.softcap, **writer.scales_of(index)}
    if a.sinks is not None:
        more["sinks"] = b.constant(a.sinks.detach().float())
    if writer.mode == "decode":
        b.call(
            "single_query_cached_kv_attention",
            *(out, q, cache[0], cache[1], None, a.scale, writer.tables, writer.lengths),
            *(writer.block_size, writer.max_context, slopes),
            window_size=-1 if a.window < 0 else a.window + 1,
            **more,
        )
        return
    b.call(
        "flash_attn_varlen_func",
        *(out, q, cache[0], cache[1], writer.starts, writer.key_starts),
        *(writer.max_query, writer.max_context, a.scale, True, writer.tables, slopes),
        window_left=a.window,
        **more,
    )


# --- latent attention -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    """Packed weights around the latent: uint8 ``[heads, bytes]``, see ``bmm``."""

    keys: Tensor  # of each head [rank + common, plain]: queries to latents, zeros behind for the common part
    values: Tensor  # of each head [value_dim, rank]
    query: Linear | None


def latent_of(attention: AttentionPlan | MixerPlan | None) -> LatentPlan | None:
    """Return the latent part of a plan, or None."""
    return attention.latent if isinstance(attention, AttentionPlan) else None


def check_latent(plan: AttentionPlan | MixerPlan | None) -> None:
    """Raise UnsupportedPlan if the projection from the latent has a bias."""
    latent = latent_of(plan)
    if latent is not None and getattr(latent.up, "bias", None) is not None:
        raise UnsupportedPlan("the projection from the latent has a bias")


@torch.no_grad()
def pack_latent(store: WeightStore, plan: AttentionPlan) -> Latent:
    """Pack the projections from the latent.

    Raises:
        UnsupportedPlan: They have a bias, or no plain weight.
    """
    latent = plan.latent
    assert latent is not None
    up: Any = latent.up
    check_latent(plan)
    plain = plan.head_dim - latent.common
    weight, quantized = whole_weight(store, up)
    heads = weight.view(plan.heads, plain + latent.value_dim, latent.rank)
    keys = heads.new_zeros(plan.heads, latent.rank + latent.common, plain)
    keys[:, : latent.rank] = heads[:, :plain].transpose(1, 2)
    packed = pack_blocks(keys), pack_blocks(heads[:, plain:])
    if not quantized and store.device.type != "cpu":
        store.watch(up, "weight")
    elif not quantized:
        part = _UpPart(*packed, latent.rank, latent.common, plain, latent.value_dim, store.dtype)
        store._replace(up, "weight", packed[0], part)
    query = None if latent.query is None else store.linear(latent.query)
    return Latent(*packed, query)


def whole_weight(store: WeightStore, module: Any, multiplied: bool = False) -> tuple[Tensor, bool]:
    """Return the weight of a linear layer that is cut into blocks, and whether it was quantized: blocks never are."""
    if isinstance(module, WoqLinearModule):
        weight = module.dequantize(store.dtype)
        module.packed()
        store.watch(module, "packed_weight", written=False)
        return weight, True
    check_packable([module], store.device.type, multiplied=multiplied)
    _unpack(module)
    return module._parameters["weight"].detach().to(store.dtype), False


def pack_blocks(weights: Tensor) -> Tensor:
    """Pack weights ``[B, out, in]`` for ``bmm``; a device reads them as they lie."""
    if weights.device.type != "cpu":
        return weights.contiguous().mT
    pack = torch.ops.ipex.pack_linear_weight
    return torch.stack([pack(one.contiguous()) for one in weights])


@dataclasses.dataclass(frozen=True, slots=True)
class _UpPart:
    """Gives the weight of the projection from the latent back."""

    keys: Tensor
    values: Tensor
    rank: int
    common: int
    plain: int
    value_dim: int
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        unpack = torch.ops.ipex.unpack_linear_weight
        size = self.rank + self.common
        keys = [unpack(one, size, self.plain, self.dtype)[: self.rank].t() for one in self.keys]
        values = [unpack(one, self.value_dim, self.rank, self.dtype) for one in self.values]
        both = [part for pair in zip(keys, values, strict=True) for part in pair]
        return torch.cat(both).contiguous()


def write_latent(
    writer: Any, index: int, a: AttentionPlan, rows: Register, weights: Latent
) -> Register:
    """Write a latent attention.

    Args:
        writer: Writes the program.
        index: Of the layer.
        a: Its plan.
        rows: What `a.qkv` gives.
        weights: Of `pack_latent`.

    Returns:
        What the output projection reads.
    """
    b, latent, rope = writer.b, a.latent, a.rope
    assert latent is not None
    width, plain = latent.rank + latent.common, a.head_dim - latent.common
    if latent.query is None:
        first = a.heads * a.head_dim
        query = b.call("narrow", rows, 1, 0, first)
    else:
        assert weights.query is not None
        first = _features(a)
        query = b.call("narrow", rows, 1, 0, first)
        low = query
        if latent.query_norm is not None:
            query = writer.norm(latent.query_norm, query)
        if latent.doubled:
            query = b.call("cat", [query, low], 1)
        query = writer.linear(weights.query, query)
    # The row of the cache is made where the projection has written it.
    row = b.call("narrow", rows, 1, first, width)
    gates = b.call("narrow", rows, 1, first + width, a.gates) if a.gates else None
    if latent.doubled:
        size = a.heads * a.head_dim
        gates = b.call("narrow", query, 1, size, a.heads * latent.value_dim)
        query = b.call("narrow", query, 1, 0, size)
    if latent.norm is not None:
        low = b.call("narrow", row, 1, 0, latent.rank)
        normed = writer.norm(latent.norm, low)
        if latent.factor != 1.0:
            normed = b.call("mul", normed, latent.factor)
        b.call("copy_", low, normed)
    if latent.common_norm is not None:
        common = b.call("narrow", row, 1, latent.rank, latent.common)
        b.call("copy_", common, writer.norm(latent.common_norm, common))
    row = b.call("reshape", row, [0, 1, width])
    heads = b.call("reshape", query, [0, a.heads, a.head_dim])
    turned = b.call("narrow", heads, 2, plain, latent.common)
    if rope is not None:
        cos, sin = writer.ropes[repr(rope)]
        key = b.call("narrow", row, 2, latent.rank, latent.common)
        b.call("rotary_embedding", turned, key, sin, cos, rope.dim, rope.half, writer.positions)
    cache = writer.caches[index]
    scales = writer.scales_of(index)
    b.call("reshape_and_cache", row, row, cache[0], cache[1], writer.slots, **scales)
    # Queries for latents, by heads; the place behind them is for the rotated part.
    unturned = b.call("transpose", b.call("narrow", heads, 2, 0, plain), 0, 1)
    absorbed = b.call("bmm", unturned, b.constant(weights.keys), None, 1.0, width)
    place = b.call("narrow", absorbed, 2, latent.rank, latent.common)
    b.call("copy_", place, b.call("transpose", turned, 0, 1))
    q = b.call("transpose", absorbed, 0, 1)
    plainly = a.window < 0 and a.sinks is None
    if writer.mode == "decode" and writer.own_cache and plainly:
        kv = b.call("reshape", cache[0], [0, -1, width])
        out = b.call(
            "mla_decode_attention",
            *(q, kv, writer.lengths, a.scale, latent.rank, writer.tables),
        )
    else:
        wide = b.call("empty_like", q)
        attend(writer, index, a, wide, q)
        out = b.call("narrow", wide, 2, 0, latent.rank)
    y = b.call(
        "bmm",
        b.call("transpose", out, 0, 1),
        b.constant(weights.values),
        None,
        1.0,
        latent.value_dim,
    )
    return gated(writer, a, b.call("transpose", y, 0, 1), gates)


def _features(a: AttentionPlan) -> int:
    """Return how many features the queries are made of."""
    module: Any = a.qkv.modules[0]
    return int(module.out_features)


# --- one row of a token that is key and value of all heads (DeepSeek V4) ----------------------------------------------
#
# The cache of a layer has several rows for a token: its key; with windows of tokens then the row of the window that
# ends with it, and its values and gates. They are read as blocks of one row; a table names what a query attends to.

#: Inputs of a program for windows of a kind, which `rows_of_step` gives; behind them is an integer.
ROWS = ("slots", "values", "gates", "empty", "ends", "starts", "tables", "counts")


def _joined(packed: Tensor, features: int, width: int, dtype: torch.dtype) -> Tensor:
    unpack = torch.ops.ipex.unpack_linear_weight
    return torch.cat([unpack(one, features, width, dtype) for one in packed])


@torch.no_grad()
def pack_shared(store: WeightStore, plan: SharedRowPlan) -> tuple[Linear, Tensor, int]:
    """Return packed the layer to queries, and of groups of heads ``[groups, bytes]`` and how many features each gives.

    Raises:
        UnsupportedPlan: They have no plain weight.
    """
    weight, quantized = whole_weight(store, plan.output, True)
    blocks = weight.unflatten(0, (plan.groups, -1))
    packed = pack_blocks(blocks)
    if not quantized:
        recover = functools.partial(_joined, packed, blocks.shape[1], blocks.shape[2], store.dtype)
        store._replace(plan.output, "weight", packed, recover)
    if plan.windows is not None:
        store.watch(plan.windows.module, plan.windows.bias)
    return store.linear(plan.query), packed, blocks.shape[1]


def rows_of_step(kind: tuple[int, int, int], step: Step, size: int) -> list[Any]:
    """Return the rows of a cache with blocks of so many tokens that new tokens read and write, as `ROWS`.

    These are slots of each token, but for the row of a window; of each window that ends slots of values and gates, what
    is added to gates, its own slot and first position; then which rows each token attends to, and how many it and any.
    """
    rate, rows, window = kind
    starts, lengths, tables = (one.long() for one in (step.starts, step.lengths, step.tables))
    text = torch.arange(len(lengths)).repeat_interleave(starts.diff())
    place = torch.arange(len(text)) + (lengths - starts[1:])[text]

    def slots(text: Tensor, place: Tensor, row: Tensor | int) -> Tensor:
        return ((tables[text, place // size] * rows + row) * size + place % size).flatten()

    texts, places = text[:, None], place[:, None]
    written = slots(texts, places, torch.tensor([0, *range(2, rows)]))
    ends, of = places[(place + 1) % rate == 0], texts[(place + 1) % rate == 0]
    every = torch.arange(rate * (rows // 2 - 1))
    read = ends - every.flip(0)
    values = slots(of, torch.where(read < 0, ends, read), 2 + every // rate)
    empty = torch.where(read < 0, -1e30, 0.0).unsqueeze(-1)
    near = places.clamp(max=window) + 1
    counts = near + (places + 1) // rate
    column = torch.arange(int(counts.max()))
    at = torch.where(column < near, places - column, (column - near + 1) * rate - 1)
    seen = slots(texts, at.clamp_min(0).minimum(places), (column >= near).long()).int()
    of_windows = values, values + (rows // 2 - 1) * size, empty, slots(of, ends, 1)
    attended = seen.view(len(text), -1), counts.flatten().int(), len(column)
    return [written, *of_windows, ends.flatten() + 1 - rate, *attended]


def write_shared(
    writer: Any, index: int, a: AttentionPlan, rows: Register, weights: tuple[Linear, Tensor, int]
) -> Register:
    """Write an attention for rows of `a.qkv` and weights of `pack_shared`; return what the output projection reads."""
    b, shared, size, rope = writer.b, a.shared, a.head_dim, a.rope
    assert shared and rope and a.query_norm and a.key_norm
    reshape: Any = functools.partial(b.call, "reshape")
    first = shared.query_norm.module.get_parameter("weight").numel()
    low = writer.norm(shared.query_norm, b.call("narrow", rows, 1, 0, first))
    q = writer.norm(a.query_norm, reshape(writer.linear(weights[0], low), [0, a.heads, size]))
    key = writer.norm(a.key_norm, b.call("narrow", rows, 1, first, size))

    def turn(x: Register, places: Register, other: Register | None = None, way: int = 0) -> None:
        cos, sin = writer.ropes[repr(a.ropes[way])]
        if other is None:
            other = b.call("narrow", b.call("empty_like", x), 1, 0, 1)
        ends = (b.call("narrow", one, 2, size - rope.dim, rope.dim) for one in (x, other))
        b.call("rotary_embedding", *ends, sin, cos, rope.dim, rope.half, places)

    turn(q, writer.positions, reshape(key, [0, 1, size]))
    out, cache = b.call("empty_like", q), writer.caches[index][0]
    if shared.windows is None:
        row, scales = reshape(key, [0, 1, size]), writer.scales_of(index)
        b.call("reshape_and_cache", row, row, cache, cache, writer.slots, **scales)
        attend(writer, index, a, out, q)
    else:
        slots, values, gates, empty, ends, starts, *seen = writer.windows[a.windows]
        bias, wide = shared.windows.biases(size), torch.float32
        flat = reshape(cache, [-1, 1, 1, size])
        both = b.call("narrow", rows, 1, first + size, 2 * len(bias) // shared.windows.rate * size)
        row = reshape(b.call("cat", [key, both], 1), [-1, 1, size])
        b.call("reshape_and_cache", row, row, flat, flat, slots)
        values, gates = (
            reshape(b.call("select_rows", reshape(cache, [-1, size]), one), [-1, *bias.shape])
            for one in (values, gates)
        )
        inputs = [gates, b.constant(bias.unsqueeze(0)), empty]
        gates = pointwise(b, inputs, [], [("add", 0, 1), ("add", 3, 2)], wide)
        inputs = [gates, b.call("amax", gates, [1], True)]
        gates = pointwise(b, inputs, [], [("sub", 0, 1), ("exp", 2)], wide)
        total = pointwise(b, [gates, values], [], [("mul", 0, 1)], wide)
        inputs = [b.call("sum", one, [1], False) for one in (total, gates)]
        row = pointwise(b, inputs, [], [("div", 0, 1)], writer.e.store.dtype)
        row = reshape(writer.norm(shared.windows.norm, row), [0, 1, size])
        turn(row, starts)
        b.call("reshape_and_cache", row, row, flat, flat, ends)
        sinks = None if a.sinks is None else b.constant(a.sinks.detach().float())
        given = out, q, flat, flat, None, a.scale, *seen[:2], 1, seen[2], None
        b.call("single_query_cached_kv_attention", *given, sinks=sinks)
    turn(out, writer.positions, way=1)
    y = b.call("transpose", reshape(out, [0, shared.groups, a.heads * size // shared.groups]), 0, 1)
    y = b.call("bmm", y, b.constant(weights[1]), None, 1.0, weights[2])
    result: Register = reshape(b.call("transpose", y, 0, 1), [0, shared.groups * weights[2]])
    return result


# --- layers that read a picture -------------------------------------------------------------------------------------
#
# Keys and values of the rows of a picture are made once; each step reads them. Rows of tokens stand without padding in
# a program, so queries are put in places ``[B, count]`` for attention, and what it gives is taken from there again.


@dataclasses.dataclass(frozen=True, slots=True)
class Picture:
    """Packed weights of a layer that reads a picture."""

    query: Linear
    key_value: Linear
    output: Linear
    mlp: tuple[Linear, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """What the tokens of a call see of pictures.

    Attributes:
        rows: Keys and values ``[B, kv_heads, S, head_dim]`` of each layer that reads a picture.
        mask: Added to scores, broadcastable to ``[B, 1, count, S]``.
        seen: ``[T, 1]``: 0 for tokens that see nothing, 1 for others.
        count: New places of each sequence.
        places: int64 ``[B * count]``: the row of the token at each place, any for padding.
        back: int64 ``[T]``: the place of each row.
    """

    rows: list[Tensor]
    mask: Tensor
    seen: Tensor
    count: int
    places: Tensor
    back: Tensor

    @property
    def inputs(self) -> list[Any]:
        """What a program gets of it."""
        return [*self.rows, self.mask, self.seen, self.places, self.back, self.count]


class LookInputs:
    """The same as inputs of a program."""

    def __init__(self, b: Any, layers: int) -> None:
        self.rows = [(b.input(f"seen key {i}"), b.input(f"seen value {i}")) for i in range(layers)]
        names = ("seen mask", "seen", "places", "back")
        self.mask, self.seen, self.places, self.back = map(b.input, names)
        self.count = b.input_int("count")


def linears_of(plan: PicturePlan) -> tuple[LinearPlan, LinearPlan, LinearPlan]:
    """Return the projections to queries, to keys and values, and behind attention."""
    return plan.query, plan.key_value, plan.output


def pack_picture(store: WeightStore, plan: PicturePlan, mlp: tuple[Linear, ...]) -> Picture:
    """Pack the weights of a layer that reads a picture.

    Raises:
        UnsupportedPlan: They are no plain or quantized matrices.
    """
    for name in plan.gates:
        store.watch(plan.module, name)
    query, key_value, output = map(store.linear, linears_of(plan))
    return Picture(query, key_value, output, mlp)


def keys_and_values(plan: PicturePlan, weights: Picture, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values ``[B, kv_heads, S, head_dim]`` of rows of pictures ``[B, S, width]``."""
    both = call_linear(weights.key_value, rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
    keys, values = picture_rows(plan, both)
    return keys.to(rows.dtype).transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()


def write_picture(
    writer: Any, number: int, plan: PicturePlan, weights: Picture, h: Register
) -> Register:
    """Write a layer that reads a picture.

    Args:
        writer: Writes the program.
        number: Of the layer among those that read a picture.
        plan: Its plan.
        weights: Of `pack_picture`.
        h: The stream.
    """
    b, look = writer.b, writer.look
    width = plan.heads * plan.head_dim
    q = writer.linear(weights.query, writer.norm(plan.norm, h))
    if plan.query_norm is not None:
        q = b.call("reshape", q, [0, plan.heads, plan.head_dim])
        q = b.call("reshape", writer.norm(plan.query_norm, q), [0, width])
    q = b.call("select_rows", q, look.places)
    q = b.call("reshape", q, [-1, look.count, plan.heads, plan.head_dim])
    q, (keys, values) = b.call("transpose", q, 1, 2), look.rows[number]
    if writer.mode == "decode":
        out = b.call("decode_attention", q, keys, values, None, look.mask, plan.scale)
    else:
        out = b.call("attention", q, keys, values, look.mask, plan.scale)
    out = b.call("reshape", b.call("transpose", out, 1, 2), [-1, width])
    first, second = gates_of(plan)
    y = writer.linear(weights.output, b.call("select_rows", out, look.back))
    h = b.call("add", h, b.call("mul", y, first))
    inner = write_inner(writer, plan.mlp, weights.mlp, writer.norm(plan.mlp_norm, h))
    y = b.call("mul", writer.linear(weights.mlp[-1], inner), look.seen)
    result: Register = b.call("add", h, b.call("mul", y, second))
    return result

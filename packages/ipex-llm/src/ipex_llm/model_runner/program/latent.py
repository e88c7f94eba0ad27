# SPDX-License-Identifier: Apache-2.0
"""Latent attention in programs: what is cached is the latent, and the projections from it are absorbed.

A score of a head is ``q . (U c) = (U^T q) . c`` with the latent ``c``, so queries are projected to the latent once and
meet it as it is; values are projected from the weighted sum of latents. All heads share one row of the cache,
``[latent | rotated key]``, and attention has many query heads and one key and value head.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ipex_core.program import Register
from ipex_llm.arch.types import AttentionPlan
from ipex_llm.model_runner.program.attention import attend
from ipex_llm.model_runner.weights import woq
from ipex_llm.model_runner.weights.dense import (
    Linear,
    UnsupportedPlan,
    WeightStore,
    _unpack,
    check_packable,
)

if TYPE_CHECKING:
    from ipex_llm.model_runner.program.writer import Writer

__all__ = ["Latent", "check_latent", "pack_latent", "write_latent"]

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Latent:
    """Packed weights around the latent: uint8 ``[heads, bytes]``, see ``bmm``."""

    keys: Tensor  # of each head [rank + rotated, plain]: queries to latents, zeros behind for the rotated part
    values: Tensor  # of each head [value_dim, rank]
    query: Linear | None


def check_latent(plan: AttentionPlan) -> None:
    """Raise UnsupportedPlan if the projection from the latent has a bias."""
    if plan.latent is not None and getattr(plan.latent.up, "bias", None) is not None:
        raise UnsupportedPlan("the projection from the latent has a bias")


@torch.no_grad()
def pack_latent(store: WeightStore, plan: AttentionPlan) -> Latent:
    """Pack the projections from the latent.

    Raises:
        UnsupportedPlan: They have a bias, or no plain weight.
    """
    latent, rope = plan.latent, plan.rope
    assert latent is not None and rope is not None
    up: Any = latent.up
    check_latent(plan)
    plain = plan.head_dim - rope.dim
    quantized = woq.is_quantized(up)
    if quantized:  # small; products of single heads have no quantized form
        weight = up.dequantize(store.dtype)
        store._own.append((up, "packed_weight", up._buffers["packed_weight"]))
    else:
        check_packable([up])
        _unpack(up)
        weight = up._parameters["weight"].detach().to(store.dtype)
    heads = weight.view(plan.heads, plain + latent.value_dim, latent.rank)
    keys = heads.new_zeros(plan.heads, latent.rank + rope.dim, plain)
    keys[:, : latent.rank] = heads[:, :plain].transpose(1, 2)
    packed = _pack(keys), _pack(heads[:, plain:])
    if not quantized:
        part = _UpPart(*packed, latent.rank, rope.dim, plain, latent.value_dim, store.dtype)
        store._replace(up, "weight", packed[0], part)
    query = None if latent.query is None else store.linear(latent.query)
    return Latent(*packed, query)


def _pack(weights: Tensor) -> Tensor:
    pack = torch.ops.ipex.pack_linear_weight
    return torch.stack([pack(one.contiguous()) for one in weights])


@dataclasses.dataclass(frozen=True, slots=True)
class _UpPart:
    """Gives the weight of the projection from the latent back."""

    keys: Tensor
    values: Tensor
    rank: int
    rotated: int
    plain: int
    value_dim: int
    dtype: torch.dtype

    def __call__(self) -> Tensor:
        unpack = torch.ops.ipex.unpack_linear_weight
        size = self.rank + self.rotated
        keys = [unpack(one, size, self.plain, self.dtype)[: self.rank].t() for one in self.keys]
        values = [unpack(one, self.value_dim, self.rank, self.dtype) for one in self.values]
        both = [part for pair in zip(keys, values, strict=True) for part in pair]
        return torch.cat(both).contiguous()


def write_latent(
    writer: Writer, index: int, a: AttentionPlan, rows: Register, weights: Latent
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
    assert latent is not None and rope is not None
    width, plain = latent.rank + rope.dim, a.head_dim - rope.dim
    if latent.query is None:
        first = a.heads * a.head_dim
        query = b.call("narrow", rows, 1, 0, first)
    else:
        assert weights.query is not None
        first = _features(a)
        query = b.call("narrow", rows, 1, 0, first)
        if latent.query_norm is not None:
            query = writer.norm(latent.query_norm, query)
        query = writer.linear(weights.query, query)
    # The row of the cache is made where the projection has written it.
    row = b.call("narrow", rows, 1, first, width)
    if latent.norm is not None:
        low = b.call("narrow", row, 1, 0, latent.rank)
        b.call("copy_", low, writer.norm(latent.norm, low))
    row = b.call("reshape", row, [0, 1, width])
    heads = b.call("reshape", query, [0, a.heads, a.head_dim])
    turned = b.call("narrow", heads, 2, plain, rope.dim)
    cos, sin = writer.ropes[repr(rope)]
    key = b.call("narrow", row, 2, latent.rank, rope.dim)
    b.call("rotary_embedding", turned, key, sin, cos, rope.dim, rope.half, writer.positions)
    cache = writer.caches[index]
    scales = writer.scales_of(index)
    b.call("reshape_and_cache", row, row, cache[0], cache[1], writer.slots, **scales)
    # Queries for latents, by heads; the place behind them is for the rotated part.
    unturned = b.call("transpose", b.call("narrow", heads, 2, 0, plain), 0, 1)
    absorbed = b.call("bmm", unturned, b.constant(weights.keys), None, 1.0, width)
    place = b.call("narrow", absorbed, 2, latent.rank, rope.dim)
    b.call("copy_", place, b.call("transpose", turned, 0, 1))
    q = b.call("transpose", absorbed, 0, 1)
    if writer.mode == "decode" and writer.own_cache:
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
    result: Register = b.call(
        "reshape", b.call("transpose", y, 0, 1), [0, a.heads * latent.value_dim]
    )
    return result


def _features(a: AttentionPlan) -> int:
    """Return how many features the queries are made of."""
    module: Any = a.qkv.modules[0]
    return int(module.out_features)

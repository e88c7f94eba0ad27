# SPDX-License-Identifier: Apache-2.0
"""The structure of a decoder that reads what an encoder gave: self attention, cross attention and mlp in each layer."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn

from ipex_llm.arch import AttentionPlan, LinearPlan, MlpPlan, NormPlan

__all__ = ["CrossPlan", "PairLayerPlan", "PairPlan", "PositionRows", "RelativeBias"]


@dataclasses.dataclass(frozen=True, slots=True)
class RelativeBias:
    """A number for each head and distance, added to the scores of a causal self attention (T5).

    Distances are put in buckets: one each for the smaller half, and wider ones up to `max_distance`.

    Source: Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", 2020.
    """

    module: nn.Module  # weight [buckets, heads]
    max_distance: int

    def buckets(self, count: int) -> Tensor:
        """Return the buckets of the distances 0, 1, ... of keys to the left, int64 ``[count]``."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        buckets = weight.shape[0]
        exact = buckets // 2
        distance = torch.arange(count)
        # float32, in the order of the source: the bounds of buckets depend on rounding.
        wide = torch.log(distance.float() / exact) / math.log(self.max_distance / exact)
        wide = exact + (wide * (buckets - exact)).clamp_min(0).to(torch.int64)
        return torch.where(distance < exact, distance, wide.clamp_max(buckets - 1))

    def values(self, count: int) -> Tensor:
        """Return the numbers of the distances 0, 1, ..., float32 ``[heads, count]``."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.detach()[self.buckets(count)].float().t().contiguous()


@dataclasses.dataclass(frozen=True, slots=True)
class CrossPlan:
    """Attention of a decoder's rows to the encoder's."""

    query: LinearPlan
    key_value: LinearPlan  # rows: all key heads, all value heads
    output: LinearPlan
    heads: int
    head_dim: int
    scale: float


@dataclasses.dataclass(frozen=True, slots=True)
class PairLayerPlan:
    """One decoder layer: three blocks, each added to the stream.

    With `PairPlan.norm_first` a block reads the norm of the stream; without, the norm of the sum is the stream.
    """

    module: nn.Module
    attention: AttentionPlan
    attention_norm: NormPlan
    cross: CrossPlan
    cross_norm: NormPlan
    mlp: MlpPlan
    mlp_norm: NormPlan
    bias: RelativeBias | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class PositionRows:
    """Rows that are added to the embeddings: parameter or buffer ``[positions, width]`` of a module."""

    module: nn.Module
    name: str
    offset: int  # row of position 0

    @property
    def rows(self) -> Tensor:
        """All rows."""
        value: Tensor = getattr(self.module, self.name)
        return value.detach()


@dataclasses.dataclass(frozen=True, slots=True)
class PairPlan:
    """The decoder of an encoder-decoder, from tokens to logits."""

    decoder: nn.Module
    embedding: nn.Module
    layers: tuple[PairLayerPlan, ...]
    norm_first: bool
    final_norm: NormPlan | None
    head: LinearPlan
    vocab_size: int
    #: Whether an attention mask hides rows of the encoder (Whisper's decoder sees all).
    masked: bool
    embedding_scale: float = 1.0
    embedding_norm: NormPlan | None = None
    positions: PositionRows | None = None
    logit_scale: float = 1.0
    logit_bias: tuple[nn.Module, str] | None = None  # a buffer [vocab] or [1, vocab]
    #: Calls that run the stock forward, since a program is not proven for them.
    stock_calls: frozenset[str] = frozenset()

    @property
    def max_positions(self) -> int | None:
        """The most tokens of the decoder, None without a limit."""
        return None if self.positions is None else len(self.positions.rows) - self.positions.offset

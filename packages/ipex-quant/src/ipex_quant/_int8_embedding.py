# SPDX-License-Identifier: Apache-2.0
"""Embedding bags on 8-bit rows: a quarter of the memory that is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ipex_core._portable import PORTABLE

__all__ = ["Int8EmbeddingBag", "why_not"]

Tensor = torch.Tensor

_LIBRARY = torch.library.Library("ipex_quant", "FRAGMENT")
_LIBRARY.define(
    "int8_embedding_bag(Tensor weight, Tensor indices, Tensor offsets, Tensor? per_sample_weights,"
    " bool include_last_offset) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
#: Scale and least number of a row, which follow its codes.
_TAIL = 8


def _run(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    op = torch.ops.quantized.embedding_bag_byte_rowwise_offsets
    y: Tensor = op(weight, indices, offsets, False, 0, False, weights, None, last)
    return y


def _fake(
    weight: Tensor, indices: Tensor, offsets: Tensor, weights: Tensor | None, last: bool
) -> Tensor:
    shape = (offsets.shape[0] - last, weight.shape[1] - _TAIL)
    return weight.new_empty(shape, dtype=torch.float32)


_LIBRARY.impl("int8_embedding_bag", _run, "CPU")
torch.library.register_fake("ipex_quant::int8_embedding_bag", _fake, lib=_LIBRARY)
PORTABLE[torch.ops.ipex_quant.int8_embedding_bag.default] = _run


def why_not(bag: nn.EmbeddingBag) -> str:
    """Return why an embedding bag stays float, or an empty string."""
    if bag.mode != "sum":
        return f"no INT8 form of mode {bag.mode!r}"
    if bag.padding_idx is not None:
        return "no INT8 form with padding_idx"
    return "it changes its weight (max_norm)" if bag.max_norm is not None else ""


class Int8EmbeddingBag(nn.Module):
    """Sums of rows of a table of 8-bit numbers; each row has its own scale and least number.

    Takes what `torch.nn.EmbeddingBag` takes, gives float32.

    Attributes:
        weight: uint8 ``[num_embeddings, embedding_dim + 8]``: codes, then scale and least number as float32.
    """

    weight: Tensor

    def __init__(self, weight: Tensor, include_last_offset: bool = False) -> None:
        super().__init__()
        if weight.dtype != torch.uint8:
            weight = torch.ops.quantized.embedding_bag_byte_prepack(weight.detach().float())
        self.include_last_offset = include_last_offset
        self.register_buffer("weight", weight)

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this module again."""
        about = {"include_last_offset": self.include_last_offset}
        return about, {"weight": self.weight}

    @classmethod
    def from_saved(
        cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Int8EmbeddingBag:
        """Return the module that `saved` described."""
        return cls(tensors["weight"].clone(), bool(about["include_last_offset"])).eval()

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum of each bag."""
        include_last = self.include_last_offset
        if input.dim() == 2:
            if offsets is not None:
                raise ValueError("EmbeddingBag: offsets must be None for 2-D input, got a tensor")
            rows, columns = input.shape
            offsets, include_last = torch.arange(rows + 1, device=input.device) * columns, True
            input = input.reshape(-1)
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.reshape(-1)
        if offsets is None:
            raise ValueError("EmbeddingBag: offsets must be given for 1-D input, got None")
        args = self.weight, input, offsets.to(input.dtype), per_sample_weights, include_last
        # An op in Python costs as much as a small bag; only compiled graphs need one, since stock has no shapes for it.
        if not torch.compiler.is_compiling():
            return _run(*args)
        y: Tensor = torch.ops.ipex_quant.int8_embedding_bag(*args)
        return y

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1] - _TAIL}, mode='sum'"

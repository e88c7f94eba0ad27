# SPDX-License-Identifier: Apache-2.0
"""Embedding bags on 8-bit rows: a quarter of the memory that is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ipex_core.nn.embedding import MergedEmbeddingBagWithCat
from ipex_core.ops.merged_embeddingbag import quantize_table
from ipex_quant.int8.modules import Int8Module
from ipex_quant.int8.ops import TAIL, embedding_bag
from ipex_quant.weight.tensor import ShowsFloatWeight

#: Modules that have a form with 8-bit rows.
TABLES = (nn.EmbeddingBag, MergedEmbeddingBagWithCat)


def why_not(bag: nn.EmbeddingBag | MergedEmbeddingBagWithCat) -> str:
    """Return why an embedding bag stays float, or an empty string."""
    if isinstance(bag, MergedEmbeddingBagWithCat):
        return "its tables are int8 already" if bag.dtype == torch.int8 else ""
    if bag.mode != "sum":
        return f"no INT8 form of mode {bag.mode!r}"
    if bag.padding_idx is not None:
        return "no INT8 form with padding_idx"
    return "it changes its weight (max_norm)" if bag.max_norm is not None else ""


class Int8EmbeddingBag(ShowsFloatWeight, Int8Module):
    """Sums of rows of a table of 8-bit numbers; each row has its own scale and least number.

    Takes what `torch.nn.EmbeddingBag` takes, gives float32.

    Attributes:
        weight: The float table ``[num_embeddings, embedding_dim]``. A state dict has uint8
            ``[num_embeddings, embedding_dim + 8]``: codes, then scale and least number as float32.
    """

    arguments: ClassVar = {"include_last_offset": bool}
    tensors = ("weight",)
    mode = "sum"

    def __init__(self, weight: Tensor, include_last_offset: bool = False) -> None:
        super().__init__()
        if weight.dtype != torch.uint8:
            weight = torch.ops.quantized.embedding_bag_byte_prepack(weight.detach().float())
        self.include_last_offset = include_last_offset
        self._buffers["weight"] = weight

    @classmethod
    def from_saved(cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
        """Return the module that `saved` described."""
        weight = tensors["weight"]
        if weight.dtype != torch.uint8 or weight.dim() != 2 or weight.shape[1] <= TAIL:
            what = f"uint8 [rows, {TAIL} + D]"
            raise ValueError(f"weight must be {what}, got {weight.dtype} {list(weight.shape)}")
        return super().from_saved(about, tensors)

    @property
    def num_embeddings(self) -> int:
        """Number of rows."""
        return self.weight_shape()[0]

    @property
    def embedding_dim(self) -> int:
        """Numbers in a row."""
        return self.weight_shape()[1]

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float table."""
        rows, width = self._codes().shape
        return torch.Size((rows, width - TAIL))

    def dequantize(self) -> Tensor:
        """Return the float table."""
        y: Tensor = torch.ops.quantized.embedding_bag_byte_unpack(self._codes())
        return y

    def _codes(self) -> Tensor:
        codes = self._buffers["weight"]
        assert codes is not None
        return codes

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
        args = self._codes(), input, offsets.to(input.dtype), per_sample_weights, include_last
        # An op in Python costs as much as a small bag; only compiled graphs need one, since stock has no shapes for it.
        if not torch.compiler.is_compiling():
            return embedding_bag(*args)
        y: Tensor = torch.ops.ipex_quant.int8_embedding_bag(*args)
        return y

    def extra_repr(self) -> str:
        """Return sizes."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode='sum'"


class Int8MergedEmbeddingBag(Int8Module):
    """The tables of a `MergedEmbeddingBagWithCat` as int8 numbers with a scale for each row.

    Attributes:
        pooling_mode: ``"sum"`` or ``"mean"``.
        include_last_offset: Whether the last offset is the end of the last bag.
    """

    arguments: ClassVar = {"count": int, "pooling_mode": str, "include_last_offset": bool}

    def __init__(
        self,
        tables: Sequence[tuple[Tensor, Tensor]],
        pooling_mode: str,
        include_last_offset: bool,
    ) -> None:
        super().__init__()
        self.pooling_mode, self.include_last_offset = pooling_mode, include_last_offset
        self.count = len(tables)
        for i, (numbers, scale) in enumerate(tables):
            self.register_buffer(f"weight_{i}", numbers)
            self.register_buffer(f"scale_{i}", scale)

    @classmethod
    def from_float(cls, bag: MergedEmbeddingBagWithCat) -> Int8MergedEmbeddingBag:
        """Return the int8 form of a float module."""
        tables = [quantize_table(weight) for weight in bag.weights]
        return cls(tables, bag.pooling_mode.name.lower(), bag.include_last_offset).eval()

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return what a file needs to make this module again."""
        return super().saved()[0], dict(self.named_buffers())

    @classmethod
    def from_saved(
        cls, about: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> Int8MergedEmbeddingBag:
        """Return the module that `saved` described."""
        tables = [
            (tensors[f"weight_{i}"].clone(), tensors[f"scale_{i}"].clone())
            for i in range(int(about["count"]))
        ]
        return cls(tables, str(about["pooling_mode"]), bool(about["include_last_offset"])).eval()

    def forward(
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """Return the dense features and the bags of all tables of each sample, ``[B, (T + 1) * D]``."""
        weights = [self.get_buffer(f"weight_{i}") for i in range(self.count)]
        scales = [self.get_buffer(f"scale_{i}").float() for i in range(self.count)]
        y: Tensor = torch.ops.ipex.merged_embeddingbag_int8_cat_forward(
            dense_feature,
            weights,
            scales,
            list(indices),
            list(offsets),
            self.pooling_mode,
            self.include_last_offset,
        )
        return y

    def extra_repr(self) -> str:
        """Return the number of tables."""
        return f"{self.count} tables, mode={self.pooling_mode!r}"

# SPDX-License-Identifier: Apache-2.0
"""Embedding tables for inference, side by side with dense features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ipex_core.nn.embedding.tables import MergedEmbeddingBag, run_op
from ipex_core.ops.embedding.merged_embeddingbag_int8 import quantize_table

__all__ = ["MergedEmbeddingBagWithCat"]

Tensor = torch.Tensor


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """Embedding bags side by side with dense features, for inference; the tables may be int8.

    Args:
        embedding_specs: The tables.

    Raises:
        AssertionError: The tables differ in row size, dtype, mode or ``include_last_offset``.
        ValueError: There is no table, or a mode is neither ``"sum"`` nor ``"mean"``.
    """

    def to_int8(self) -> None:
        """Round the tables to int8 with a scale for each row: a quarter of the memory of float32.

        The state dict has the int8 tables and the scales; call this before loading one.
        """
        if self.dtype == torch.int8:
            return
        for i, weight in enumerate(self.weights):
            numbers, scale = quantize_table(weight)
            self.weights[i] = nn.Parameter(numbers, requires_grad=False)
            self.register_buffer(f"scale_{i}", scale)
        self.dtype = torch.int8

    def _scales(self) -> list[Tensor]:
        # Who casts a model casts its buffers.
        return [self.get_buffer(f"scale_{i}").float() for i in range(self.n_tables)]

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """Return the dense features and the bags of all tables of each sample.

        Args:
            indices: As for `MergedEmbeddingBag`.
            offsets: As for `MergedEmbeddingBag`.
            dense_feature: ``[B, embedding_dim]`` in the dtype of the tables; with int8 tables any floating dtype.

        Returns:
            ``[B, (n_tables + 1) * embedding_dim]`` in the dtype of ``dense_feature``.

        Raises:
            NotImplementedError: Gradients are enabled.
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
        """
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "MergedEmbeddingBagWithCat: gradients must be disabled, got torch.is_grad_enabled() = True:"
                " call it under torch.no_grad()"
            )
        lookups = self._lookups(indices, offsets, None)
        rest = (lookups.indices, lookups.offsets)
        settings = (lookups.mode, lookups.include_last_offset)
        result: Tensor
        if self.dtype == torch.int8:
            result = torch.ops.ipex.merged_embeddingbag_int8_cat_forward(
                dense_feature, list(self.weights), self._scales(), *rest, *settings
            )
        else:
            result = run_op(
                "merged_embeddingbag_cat_forward",
                self.dtype,
                *(list(self.weights), *rest, dense_feature, *settings),
            )
        return result

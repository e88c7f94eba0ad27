# SPDX-License-Identifier: Apache-2.0
"""The encoder of `torch.nn.Transformer` on packed or reduced weights.

The stock layers hand their weights to one op, which knows no packed ones (each would be unpacked in each call) and
wants an input of their dtype. These run part by part, and compile for ``torch.jit.script``.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._jit_internal import is_scripting
from torch.nn import functional
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len

from ipex_core.module_swap.base import OptimizedModule, is_stand_in, record_call

__all__ = ["OptimizedTransformerEncoder", "OptimizedTransformerEncoderLayer"]

Tensor = torch.Tensor


class OptimizedTransformerEncoderLayer(OptimizedModule, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Run attention and feed-forward, each with its sum and norm."""
        if is_scripting():
            return self._parts(src, src_mask, src_key_padding_mask, is_causal)
        else:
            if is_stand_in(src):
                recorded: Tensor = record_call(self, src, src_mask, src_key_padding_mask, is_causal)
                return recorded
            if src.is_nested:
                return super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return self._parts(src, src_mask, src_key_padding_mask, is_causal)

    def _parts(
        self,
        src: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        padding = functional._canonical_mask(
            src_key_padding_mask,
            "src_key_padding_mask",
            functional._none_or_dtype(src_mask),
            "src_mask",
            src.dtype,
        )
        mask = functional._canonical_mask(src_mask, "src_mask", None, "", src.dtype, False)
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), mask, padding, is_causal)
            x = x + self._ff_block(self.norm2(x))
        else:
            x = self.norm1(x + self._sa_block(x, mask, padding, is_causal))
            x = self.norm2(x + self._ff_block(x))
        return x


class OptimizedTransformerEncoder(OptimizedModule, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`; where the stock one skips padding, its results are zero here, too."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run the layers one after the other."""
        if is_scripting():
            return self._layers(src, mask, src_key_padding_mask, is_causal, True)
        else:
            if is_stand_in(src):
                recorded: Tensor = record_call(self, src, mask, src_key_padding_mask, is_causal)
                return recorded
            if src.is_nested:
                return super().forward(src, mask, src_key_padding_mask, is_causal)
            skips = not (
                torch.is_grad_enabled()
                and (src.requires_grad or any(p.requires_grad for p in self.parameters()))
            ) and not (self.mask_check and torch.compiler.is_compiling())
            return self._layers(src, mask, src_key_padding_mask, is_causal, skips)

    def _layers(
        self,
        src: Tensor,
        mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool | None,
        skips: bool,
    ) -> Tensor:
        padding = functional._canonical_mask(
            src_key_padding_mask,
            "src_key_padding_mask",
            functional._none_or_dtype(mask),
            "mask",
            src.dtype,
        )
        mask = functional._canonical_mask(mask, "mask", None, "", src.dtype, False)
        length = _get_seq_len(src, self.layers[0].self_attn.batch_first)
        causal = _detect_is_causal_mask(mask, is_causal, length)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=mask, is_causal=causal, src_key_padding_mask=padding)
        if skips and self.use_nested_tensor and mask is None and padding is not None:
            real = padding.logical_not()
            if src.dim() == 3 and (
                not self.mask_check or torch._nested_tensor_from_mask_left_aligned(src, real)
            ):
                output = output.masked_fill(padding.to(torch.bool).unsqueeze(-1), 0.0)
        if self.norm is not None:
            output = self.norm(output)
        return output

# SPDX-License-Identifier: Apache-2.0
"""``attn_implementation="ipex"``: our attention op behind the attention interface of transformers."""

from __future__ import annotations

from typing import Any

import torch

import ipex_core  # noqa: F401  (registers the ops)

__all__ = ["ipex_attention", "register"]

Tensor = torch.Tensor
NAME = "ipex"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ipex_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers asks for it.

    Heads that share keys are not repeated, softcaps and sinks are part of the op. What the op does not cover goes to
    the function behind ``"sdpa"``: training, dropout, other devices and element types, values of another head size than
    keys, position biases and caches of continuous batching.

    Args:
        module: The attention module; its ``is_causal`` counts where the argument is None.
        query: ``[B, Hq, Sq, D]``, float32, bfloat16 or float16.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, D]``.
        attention_mask: ``[B, 1 or Hq, Sq, at least Sk]``, boolean (True takes part) or additive; or None.
        dropout: Probability of dropout.
        scaling: Factor on the scores; None: ``1 / sqrt(D)``.
        is_causal: Whether a query sees only keys before it, if there is no mask.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        s_aux: ``[Hq]``: a further score for each head, without a value.
        **kwargs: What else a model of transformers hands to its attention function.

    Returns:
        ``[B, Sq, Hq, D]``, and None for the weights.
    """
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    special = kwargs.get("position_bias") is not None or kwargs.get("cache") is not None
    covered = (
        not needs_gradient
        and not special
        and dropout == 0.0
        and query.device.type == "cpu"
        and query.dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype
        and key.shape[-1] == value.shape[-1]
    )
    if not covered:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if softcap is not None:
            kwargs["softcap"] = softcap
        if s_aux is not None:
            raise NotImplementedError(
                "attn_implementation='ipex': attention sinks must be used for inference on the CPU only; use 'eager'"
            )
        found: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
        return found
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    rows = query.shape[2]
    causal = bool(rows > 1 and attention_mask is None and causal)
    if causal and key.shape[2] > rows:
        # A prompt in an empty cache of fixed size: what is behind it is not there yet.
        key, value = key[:, :, :rows], value[:, :, :rows]
    if attention_mask is not None:
        attention_mask = attention_mask[..., : key.shape[2]]
        if attention_mask.dtype not in {torch.bool, torch.float32}:
            attention_mask = attention_mask.to(query.dtype)
    result = torch.ops.ipex.attention(
        query,
        key,
        value,
        attention_mask,
        0.0 if scaling is None else float(scaling),
        causal,
        None,
        -1,
        -1,
        0.0 if softcap is None else float(softcap),
        None if s_aux is None else s_aux.detach().to(query.dtype),
    )
    return result.transpose(1, 2).contiguous(), None


def register() -> None:
    """Register the function, and the mask of ``"sdpa"`` for it, with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ipex_attention)
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:  # before 4.53 models make their masks themselves
        return
    AttentionMaskInterface.register(NAME, sdpa_mask)

# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face models, through the public attention interface of transformers.

transformers looks its attention function up by a name in the configuration of the model. A function under the name
``"ipex"`` is registered the first time a model needs it; the pass writes that name into the configuration. Nothing of
transformers is patched, and nothing is registered before a model is optimized.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from ipex_core._optimize._passes import Context, Pass, register
from ipex_core._optimize._records import Log
from ipex_core.nn._call import call
from ipex_core.nn._leaf import has_kernel
from ipex_core.nn.functional import attention_supported

__all__ = ["HuggingFaceAttention", "register_interface"]

NAME = "ipex"
#: Arguments of the interface that change what is computed and that our op does not have.
_FOREIGN = ("position_bias", "cache", "softcap", "s_aux", "sliding_window_mask")


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention with the signature of the attention interface of transformers."""
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    causal = query.shape[2] > 1 and attention_mask is None and causal
    usable = not any(kwargs.get(name) is not None for name in _FOREIGN)
    usable = usable and not (causal and key.shape[2] != query.shape[2])
    if usable and attention_supported(query, key, value, attention_mask, dropout, bool(causal)):
        out = call(
            torch.ops.ipex.attention.default,
            query,
            key,
            value,
            attention_mask,
            scaling or 0.0,
            bool(causal),
        )
        return out.transpose(1, 2).contiguous(), None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result: tuple[torch.Tensor, None] = sdpa_attention_forward(
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
    return result


def register_interface() -> None:
    """Register the name ``"ipex"`` with transformers; doing it again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@register
class HuggingFaceAttention(Pass):
    """Run the attention of Hugging Face models in our op."""

    name = "attention"

    def applies(self, context: Context) -> bool:
        """Return whether the model comes from transformers and the level asks for kernels."""
        return context.options.level == "O1" and "transformers" in sys.modules

    def apply(self, context: Context) -> None:
        """Set the attention implementation in the configuration."""
        configs = [c for c in _configs(context.model) if c._attn_implementation_internal != NAME]
        if not configs:
            return
        reason = self._reason(context.model, configs)
        if reason is not None:
            context.log.add("", context.model, self.name, False, reason)
            return
        register_interface()
        for config in configs:
            config._attn_implementation_internal = NAME
        text = "attention interface 'ipex', which was 'sdpa'"
        context.log.undo[self.name] = "sdpa"
        context.log.add("", context.model, self.name, True, text, "ipex::attention")

    def _reason(self, model: nn.Module, configs: list[Any]) -> str | None:
        if not has_kernel("attention"):
            return "no kernel package implements attention"
        import transformers

        if not hasattr(transformers, "AttentionMaskInterface"):
            return "transformers before 4.53 makes masks only for attention that it knows"
        names = sorted({str(c._attn_implementation_internal) for c in configs})
        if names != ["sdpa"]:
            return f"the attention implementation is {', '.join(names)}, not sdpa"
        for module in model.modules():
            check = getattr(type(module), "_can_set_attn_implementation", None)
            if check is not None and not check():
                return f"{type(module).__name__} does not use the attention interface"
        return None

    def undo(self, model: nn.Module, log: Log) -> None:
        """Write the former name back."""
        former = log.undo.get(self.name)
        if former is not None:
            for config in _configs(model):
                if config._attn_implementation_internal == NAME:
                    config._attn_implementation_internal = former

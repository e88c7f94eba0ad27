# SPDX-License-Identifier: Apache-2.0
"""`BertModel` of transformers whose embeddings and encoder run in `ipex_core.models.fast_bert.blocks`.

The modules and their names stay; only the class of the `BertModel` object changes, to a subclass with another
``forward``. What that does not know (cross attention, attention maps, caches, changed layers) runs in the original.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ipex_core.models.fast_bert.blocks import LinearDropoutAddNorm, LinearGelu, SelfAttention
from ipex_core.models.fast_bert.tokens import MOST_GROUPS, Tokens, padded, unpadded
from ipex_core.module_swap.base import transformed
from ipex_core.module_swap.derive import restore_class, swap
from ipex_core.nn.training_linear import TrainingLinear
from ipex_core.optimization.passes.cast import cast_input
from ipex_core.optimization.training import widen_input

__all__ = ["bert_models", "speed_up", "unsupported"]

Tensor = torch.Tensor

#: Names of activations in configurations -> forms of the op `gelu`.
_GELU = {"gelu": "none", "gelu_new": "tanh", "gelu_fast": "tanh", "gelu_pytorch_tanh": "tanh"}
# Untyped in torch.
_attend: Any = SelfAttention.apply
_widen: Any = LinearGelu.apply
_finish: Any = LinearDropoutAddNorm.apply

#: Classes whose parameters may be read in place of a call.
_LINEARS = (nn.Linear, TrainingLinear)
#: Streams of random numbers of a layer: attention, and the two others.
_STREAMS = MOST_GROUPS + 2
#: Arguments that the fast path knows; any other that is given leads to the original.
_HARMLESS = ("output_attentions", "use_cache", "return_dict", "output_hidden_states")


def bert_models(model: nn.Module) -> list[tuple[str, Any]]:
    """Return the parts of a model that are a `BertModel` of transformers, with their paths."""
    return [(path, part) for path, part in model.named_modules() if _is_bert(part)]


def _is_bert(module: nn.Module) -> bool:
    return any(
        kind.__name__ == "BertModel" and kind.__module__.startswith("transformers.models.bert.")
        for kind in type(module).__mro__
    )


def unsupported(bert: Any) -> str | None:
    """Return why a `BertModel` has to stay as it is, or None."""
    config = bert.config
    if config.is_decoder or getattr(config, "add_cross_attention", False):
        return "it is a decoder"
    if getattr(config, "position_embedding_type", None) not in (None, "absolute"):
        return f"position_embedding_type is {config.position_embedding_type}"
    if config.hidden_act not in _GELU:
        return f"hidden_act is {config.hidden_act}, not one of {', '.join(_GELU)}"
    if not _plain(bert):
        return "layers were exchanged, or have hooks"
    return None


def _hooked(module: nn.Module) -> bool:
    # Some releases of transformers put this one on the words for reentrant checkpoints, which there are none of here.
    if any(
        getattr(hook, "__name__", "") != "make_inputs_require_grads"
        for hook in module._forward_hooks.values()
    ):
        return True
    if module._backward_hooks or module._backward_pre_hooks:
        return True
    return any(hook not in (cast_input, widen_input) for hook in module._forward_pre_hooks.values())


def _plain(bert: Any) -> bool:
    """Return whether all layers are what they were made as, so that reading their parameters is enough."""
    encoder, embeddings = bert.encoder, bert.embeddings
    tables = (
        embeddings.word_embeddings,
        embeddings.position_embeddings,
        embeddings.token_type_embeddings,
    )
    norms = [embeddings.LayerNorm]
    linears = []
    for layer in encoder.layer:
        attention = layer.attention
        linears += [attention.self.query, attention.self.key, attention.self.value]
        linears += [attention.output.dense, layer.intermediate.dense, layer.output.dense]
        norms += [attention.output.LayerNorm, layer.output.LayerNorm]
        blocks = (layer, attention, attention.self, attention.output, layer.intermediate)
        if any(map(_hooked, (*blocks, layer.output))):
            return False
    if any(type(m) not in _LINEARS or m.bias is None or _hooked(m) for m in linears):
        return False
    if any(type(m) is not nn.LayerNorm or m.bias is None or _hooked(m) for m in norms):
        return False
    if any(type(m) is not nn.Embedding or m.max_norm is not None or _hooked(m) for m in tables):
        return False
    return not (_hooked(encoder) or _hooked(embeddings))


def _p(dropout: nn.Module) -> float:
    return float(getattr(dropout, "p", 0.0)) if dropout.training else 0.0


def _dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype to compute in: the dtype of the weights, lowered by autocast."""
    if weight.dtype == torch.float32 and torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu")
    return weight.dtype


class FastBert(nn.Module):
    """Put in front of a `BertModel` class by `speed_up`."""

    _ipex_unpad: bool
    config: Any
    embeddings: Any
    encoder: Any
    pooler: Any

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Compute what the original computes, for plain encoding on blocks of our own."""
        graph = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        if graph or transformed():
            # What a batch needs depends on its values, so graphs are made of the original.
            named = (input_ids, attention_mask, token_type_ids, position_ids)
            return super().forward(*named, *args, **kwargs)
        wanted = []
        for name in ("output_hidden_states", "output_attentions"):
            value = kwargs.get(name)
            wanted.append(bool(getattr(self.config, name) if value is None else value))
        hidden_states, attentions = wanted
        known = (
            not any(a is not None for a in args)
            and all(v is None or k in _HARMLESS for k, v in kwargs.items())
            and not attentions
        )
        weight = self.encoder.layer[0].output.dense.weight if len(self.encoder.layer) else None
        if not (
            known
            and weight is not None
            and _fits(input_ids, attention_mask, token_type_ids, position_ids)
            and weight.device.type == "cpu"
            and _dtype(weight) in (torch.float32, torch.bfloat16)
            and _plain(self)
            and max(_probabilities(self)) < 1.0
        ):
            named = (input_ids, attention_mask, token_type_ids, position_ids)
            return super().forward(*named, *args, **kwargs)
        assert input_ids is not None
        shape = (input_ids.shape[0], input_ids.shape[1])
        make = unpadded if self._ipex_unpad else padded
        tokens = make(shape, attention_mask)
        dtype = _dtype(weight)
        with torch.autocast("cpu", enabled=False):
            rows = _encode(self, input_ids, token_type_ids, position_ids, tokens, dtype)
            states = [tokens.unpack(r) for r in (rows if hidden_states else rows[-1:])]
        pooled = self.pooler(states[-1]) if self.pooler is not None else None
        return _output(self.config, states, pooled, kwargs.get("return_dict"), hidden_states)


def _fits(
    ids: Tensor | None, mask: Tensor | None, types: Tensor | None, positions: Tensor | None
) -> bool:
    if ids is None or ids.dim() != 2 or ids.numel() == 0:
        return False
    if mask is not None and (mask.shape != ids.shape or mask.device != ids.device):
        return False
    if types is not None and types.shape != ids.shape:
        return False
    return positions is None or (positions.dim() == 2 and positions.shape[1] == ids.shape[1])


def _probabilities(bert: Any) -> list[float]:
    found = [_p(bert.embeddings.dropout)]
    for layer in bert.encoder.layer:
        blocks = (layer.attention.self, layer.attention.output, layer.output)
        found += [_p(block.dropout) for block in blocks]
    return found


def _encode(
    bert: Any,
    ids: Tensor,
    types: Tensor | None,
    positions: Tensor | None,
    tokens: Tokens,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the rows of the embeddings and of each layer."""
    drops = any(_probabilities(bert))
    seed = torch.randint(1 << 62, (1,)) if drops else torch.zeros(1, dtype=torch.int64)
    if not tokens.groups:  # every token is padding
        none = torch.zeros(0, bert.config.hidden_size, dtype=dtype)
        return [none] * (len(bert.encoder.layer) + 1)
    x = _embed(bert.embeddings, ids, types, positions, tokens, seed, dtype)
    rows = [x]
    for number, layer in enumerate(bert.encoder.layer):
        run = functools.partial(
            _layer, layer, tokens, seed, 1 + number * _STREAMS, bert.config, dtype
        )
        again = getattr(layer, "gradient_checkpointing", False) or getattr(
            bert.encoder, "gradient_checkpointing", False
        )
        if again and layer.training and torch.is_grad_enabled():
            from torch.utils.checkpoint import checkpoint

            x = checkpoint(run, x, use_reentrant=False)
        else:
            x = run(x)
        rows.append(x)
    return rows


def _embed(
    embeddings: Any,
    ids: Tensor,
    types: Tensor | None,
    positions: Tensor | None,
    tokens: Tokens,
    seed: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    batch, length = ids.shape
    if positions is None:
        positions = embeddings.position_ids[:, :length]
    rows = tokens.pack(ids)
    words = embeddings.word_embeddings
    x = functional.embedding(rows, words.weight, words.padding_idx).to(dtype)
    positions = tokens.pack(positions.expand(batch, length))
    rest = functional.embedding(positions, embeddings.position_embeddings.weight)
    kinds = embeddings.token_type_embeddings.weight
    rest = rest + (kinds[0] if types is None else functional.embedding(tokens.pack(types), kinds))
    norm = embeddings.LayerNorm
    x, _ = torch.ops.ipex.dropout_add_layer_norm(
        x, rest.to(dtype), norm.weight, norm.bias, 0.0, seed, 0, norm.eps
    )
    p = _p(embeddings.dropout)
    y: Tensor = torch.ops.ipex.dropout(x, p, seed, 0) if p else x
    return y


def _layer(
    layer: Any,
    tokens: Tokens,
    seed: Tensor,
    stream: int,
    config: Any,
    dtype: torch.dtype,
    x: Tensor,
) -> Tensor:
    attention = layer.attention
    own = attention.self
    projections = (own.query, own.key, own.value)
    weight = torch.cat([m.weight for m in projections]).to(dtype)
    bias = torch.cat([m.bias for m in projections]).to(dtype)
    heads = own.num_attention_heads
    context = _attend(x, weight, bias, tokens, heads, _p(own.dropout), seed, stream + 2)
    y = _end(attention.output, context, x, seed, stream, dtype)
    dense = layer.intermediate.dense
    wide = _widen(y, dense.weight.to(dtype), dense.bias.to(dtype), _GELU[config.hidden_act])
    return _end(layer.output, wide, y, seed, stream + 1, dtype)


def _end(
    block: Any, x: Tensor, residual: Tensor, seed: Tensor, stream: int, dtype: torch.dtype
) -> Tensor:
    dense, norm = block.dense, block.LayerNorm
    result: Tensor = _finish(
        x,
        dense.weight.to(dtype),
        dense.bias.to(dtype),
        residual,
        norm.weight,
        norm.bias,
        _p(block.dropout),
        seed,
        stream,
        norm.eps,
    )
    return result


def _output(
    config: Any, states: list[Tensor], pooled: Tensor | None, as_dict: bool | None, all_states: bool
) -> Any:
    from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

    if as_dict is None:
        as_dict = getattr(config, "return_dict", True)
    hidden = tuple(states) if all_states else None
    if not as_dict:
        return (states[-1], pooled, *((hidden,) if hidden else ()))
    return BaseModelOutputWithPoolingAndCrossAttentions(
        last_hidden_state=states[-1], pooler_output=pooled, hidden_states=hidden
    )


def speed_up(bert: Any, unpad: bool) -> None:
    """Let a `BertModel` run on blocks of our own, in place."""
    swap(bert, FastBert)
    bert.__dict__["_ipex_unpad"] = unpad
    bert.__dict__["_ipex_undo"] = _slow_down


def _slow_down(bert: Any) -> None:
    restore_class(bert)
    for name in ("_ipex_unpad", "_ipex_undo"):
        bert.__dict__.pop(name, None)

# SPDX-License-Identifier: Apache-2.0
"""BERT models whose layers run on rows without padding: `fast_bert`."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ipex_core.amp import warn_if_emulated
from ipex_core.errors import OpArgumentError
from ipex_core.module_swap.base import restore_class, swap, transformed
from ipex_core.module_swap.state_dict import record_of, update
from ipex_core.nn.training_linear import (
    Choice,
    TrainingLinear,
    choose,
    input_gradient,
    product,
    weight_gradient,
)
from ipex_core.optimization import ModelTypeError, copy_model, parse, restore
from ipex_core.optimization.passes.cast import cast_input
from ipex_core.optimization.records import log_of
from ipex_core.optimization.training import train, widen_input

#: A group holds sequences at least this share as long as its longest one.
_ALIKE = 0.75
#: Streams of random numbers that a block may use: one for each group.
MOST_GROUPS = 16


@dataclasses.dataclass
class Group:
    """Sequences that attention treats together, padded to the longest one.

    Attributes:
        count: Number of sequences.
        length: Tokens of each, padding included.
        rows: ``[count * length]`` int64: the row of each token; padding has any row. None: all rows, in order.
        padding: int64 places of padding in ``rows``, or None.
        mask: float32 ``[count, 1, 1, length]``, added to scores, or None.
    """

    count: int
    length: int
    rows: Tensor | None = None
    padding: Tensor | None = None
    mask: Tensor | None = None

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of the group, ``[count * length, C]``."""
        return x if self.rows is None else x.index_select(0, self.rows)

    def take_gradient(self, x: Tensor) -> Tensor:
        """Return the rows of the group; padding rows are zero."""
        taken = self.take(x)
        return taken if self.padding is None else taken.index_fill_(0, self.padding, 0.0)


@dataclasses.dataclass
class Tokens:
    """How the rows belong to a batch.

    Attributes:
        shape: Batch and length of the padded input.
        groups: The sequences.
        index: int64: place of each row in the padded batch, ``batch * length + position``. None: there is a row for
            each place.
        inverse: int64: place of each row in the rows of all groups behind each other. None: the same order.
    """

    shape: tuple[int, int]
    groups: list[Group]
    index: Tensor | None = None
    inverse: Tensor | None = None

    def gather(self, outputs: list[Tensor]) -> Tensor:
        """Return one row for each token from what groups computed."""
        if self.inverse is None:
            return outputs[0]
        return torch.cat(outputs).index_select(0, self.inverse)

    def pack(self, x: Tensor) -> Tensor:
        """Return the rows of ``[batch, length, ...]``."""
        rows = x.reshape(-1, *x.shape[2:])
        return rows if self.index is None else rows.index_select(0, self.index)

    def unpack(self, rows: Tensor) -> Tensor:
        """Return ``[batch, length, C]``, zero where there was padding."""
        batch, length = self.shape
        if self.index is not None:
            full = rows.new_zeros(batch * length, rows.shape[-1])
            rows = full.index_copy(0, self.index, rows)
        return rows.view(batch, length, rows.shape[-1])


def padded(shape: tuple[int, int], mask: Tensor | None) -> Tokens:
    """Keep padding; ``mask`` is ``[batch, length]``, 0 for tokens that are not attended to."""
    added = None
    if mask is not None and not bool(mask.all()):
        lowest = torch.finfo(torch.float32).min
        added = torch.zeros(mask.shape).masked_fill_(mask == 0, lowest)[:, None, None]
    return Tokens(shape, [Group(*shape, mask=added)])


def unpadded(shape: tuple[int, int], mask: Tensor | None) -> Tokens:
    """Leave out the tokens whose mask is 0."""
    if mask is None or bool(mask.all()):
        return padded(shape, None)
    present = mask != 0
    index = present.reshape(-1).nonzero().squeeze(1)
    lengths = present.sum(1)
    starts = lengths.cumsum(0) - lengths
    groups = []
    inverse = torch.empty_like(index)
    begin = 0
    for members in _alike(lengths.tolist()):
        chosen = torch.tensor(members)
        longest = int(lengths[chosen].max())
        place = torch.arange(longest)
        inside = place < lengths[chosen, None]  # [count, longest]
        rows = torch.where(inside, starts[chosen, None] + place, 0).reshape(-1)
        missing = (~inside).reshape(-1).nonzero().squeeze(1)
        group = Group(len(members), longest, rows)
        if missing.numel():
            group.padding = missing
            lowest = torch.finfo(torch.float32).min
            group.mask = torch.zeros(inside.shape).masked_fill_(~inside, lowest)[:, None, None]
        kept = inside.reshape(-1).nonzero().squeeze(1)
        inverse[rows[kept]] = kept + begin
        begin += rows.numel()
        groups.append(group)
    return Tokens(shape, groups, index, inverse)


def _alike(lengths: list[int]) -> list[list[int]]:
    """Return the numbers of the sequences that are not empty, in groups of similar lengths."""
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and (lengths[i] >= _ALIKE * lengths[groups[-1][0]] or len(groups) == MOST_GROUPS):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


# --- blocks -----------------------------------------------------------------------------------------------------------


_ops = torch.ops.ipex


def _gradients(
    ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, first: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the input and the weight of a linear layer, arguments ``first`` and the next."""
    choice = _choice(x, weight)
    need_x, need_weight = ctx.needs_input_grad[first : first + 2]
    dx = input_gradient(grad, weight, choice.input) if need_x else None
    dweight = weight_gradient(grad, x, choice.weight) if need_weight else None
    return dx, dweight


def _choice(x: Tensor, weight: Tensor) -> Choice:
    return choose(weight.dtype, x.shape[0], *weight.shape)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return product(x, weight, bias, _choice(x, weight).forward)


class LinearGelu(torch.autograd.Function):
    """``gelu(x weight^T + bias)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
        h = _linear(x, weight, bias)
        ctx.save_for_backward(x, weight, h)
        ctx.approximate = approximate
        y: Tensor = _ops.gelu(h, approximate)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, h = ctx.saved_tensors
        dh, dbias = _ops.gelu_backward(grad, h, ctx.approximate)
        return *_gradients(ctx, dh, x, weight, 0), dbias.to(weight.dtype), None


class LinearDropoutAddNorm(torch.autograd.Function):
    """``layer_norm(dropout(x weight^T + bias) + residual)``."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor,
        gamma: Tensor,
        beta: Tensor,
        p: float,
        seed: Tensor,
        stream: int,
        eps: float,
    ) -> Tensor:
        h = _linear(x, weight, bias)
        y, total = _ops.dropout_add_layer_norm(h, residual, gamma, beta, p, seed, stream, eps)
        ctx.save_for_backward(x, weight, total, gamma, seed)
        ctx.rest = p, stream, eps
        result: Tensor = y
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, total, gamma, seed = ctx.saved_tensors
        p, stream, eps = ctx.rest
        dresidual, dh, columns = _ops.dropout_add_layer_norm_backward(
            grad, total, gamma, p, seed, stream, eps
        )
        dgamma, dbeta, dbias = columns.unbind()
        return (
            *_gradients(ctx, dh, x, weight, 0),
            dbias.to(weight.dtype),
            dresidual,
            dgamma.to(gamma.dtype),
            dbeta.to(gamma.dtype),
            *(None,) * 4,
        )


class SelfAttention(torch.autograd.Function):
    """Self-attention, with the projections of query, key and value, without the output projection."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        tokens: Tokens,
        heads: int,
        p: float,
        seed: Tensor,
        stream: int,
    ) -> Tensor:
        hidden = weight.shape[0] // 3
        size = hidden // heads
        scale = size**-0.5
        qkv = _linear(x, weight, bias)
        outputs, kept = [], []
        for number, group in enumerate(tokens.groups):
            count, length = group.count, group.length
            part = group.take(qkv).view(count, length, 3, heads, size)
            parts = part.permute(2, 0, 3, 1, 4).reshape(3, count * heads, length, size)
            query, key, value = parts
            scores = torch.bmm(query, key.transpose(1, 2)).view(count, heads, length, length)
            probs = _ops.softmax(scores, group.mask, scale)
            dropped = _ops.dropout(probs, p, seed, stream + number) if p else probs
            out = torch.bmm(dropped.view(-1, length, length), value)
            out = out.view(count, heads, length, size).transpose(1, 2)
            outputs.append(out.reshape(count * length, hidden))
            kept += [parts, probs]
        ctx.save_for_backward(x, weight, seed, *kept)
        ctx.rest = tokens, heads, p, stream
        return tokens.gather(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, seed, *kept = ctx.saved_tensors
        tokens, heads, p, stream = ctx.rest
        hidden = weight.shape[0] // 3
        size = hidden // heads
        gradients = []
        for number, group in enumerate(tokens.groups):
            count, length = group.count, group.length
            parts, probs = kept[2 * number : 2 * number + 2]
            query, key, value = parts
            dout = group.take_gradient(grad).view(count, length, heads, size).transpose(1, 2)
            dout = dout.reshape(count * heads, length, size)
            ddropped = torch.bmm(dout, value.transpose(1, 2)).view(probs.shape)
            dscores, dropped = _ops.softmax_dropout_backward(
                ddropped, probs, size**-0.5, p, seed, stream + number
            )
            dscores = dscores.view(-1, length, length)
            dparts = torch.empty_like(parts)
            torch.bmm(dscores, key, out=dparts[0])
            torch.bmm(dscores.transpose(1, 2), query, out=dparts[1])
            torch.bmm(dropped.view(-1, length, length).transpose(1, 2), dout, out=dparts[2])
            dpart = dparts.view(3, count, heads, length, size).permute(1, 3, 0, 2, 4)
            gradients.append(dpart.reshape(count * length, 3 * hidden))
        dqkv = tokens.gather(gradients)
        dbias = dqkv.sum(0) if ctx.needs_input_grad[2] else None
        return *_gradients(ctx, dqkv, x, weight, 0), dbias, *(None,) * 5


# --- model ------------------------------------------------------------------------------------------------------------


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
        make = unpadded if record_of(self).undo.unpad else padded
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
    update(bert, undo=_SlowDown(unpad))


@dataclasses.dataclass
class _SlowDown:
    """Undoes `speed_up`; called by `ipex.restore`.

    Attributes:
        unpad: Whether the blocks run on rows without padding.
    """

    unpad: bool

    def __call__(self, bert: Any) -> None:
        restore_class(bert)
        update(bert, undo=None)


# --- fast_bert --------------------------------------------------------------------------------------------------------


def fast_bert(
    model: Any,
    dtype: torch.dtype = torch.float,
    optimizer: torch.optim.Optimizer | None = None,
    unpad: bool = False,
) -> Any:
    """Make a BERT model faster in training and inference.

    Embeddings, self-attention, dropout, residual additions, norms and GELU run in fused kernels with gradients of
    their own. The model keeps its class, modules and names. The ``state_dict`` of model and optimizer is as before, in
    float32. `ipex.explain` tells what was done and `ipex.restore` undoes it.

    Call it after weights are loaded, instead of `ipex.optimize`, and before DistributedDataParallel.

    Args:
        model: A ``BertModel`` of transformers or a module that holds one; a copy is changed.
        dtype: ``torch.float32``, or ``torch.bfloat16`` to have weights in 16 bits and the rest of their float32
            values beside, as `ipex.optimize` does in training.
        optimizer: Optimizer of the model; the returned one belongs to the returned model.
        unpad: Leave out tokens whose ``attention_mask`` is 0. ``last_hidden_state`` is zero there.

    Returns:
        The model, or ``(model, optimizer)`` if an optimizer was given. A model without BERT comes back as it is, with
        a warning.

    Raises:
        TypeError: An argument has the wrong type (for the model it is an AttributeError too).
        ValueError: Another dtype.

    Example:
        >>> model, optimizer = fast_bert(model, dtype=torch.bfloat16, optimizer=optimizer)  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"fast_bert: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise OpArgumentError(
            f"fast_bert: dtype must be torch.float32 or torch.bfloat16, got {dtype!r}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"fast_bert: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if not isinstance(unpad, bool):
        raise TypeError(f"fast_bert: unpad must be True or False, got {unpad!r}")
    found = bert_models(model)
    reasons = {path: unsupported(part) for path, part in found}
    if all(reason is not None for reason in reasons.values()):
        why = "; ".join(f"{path or 'the model'}: {reason}" for path, reason in reasons.items())
        warnings.warn(
            f"fast_bert: the model stays as it is: {why or 'no part of it is a BertModel of transformers'}",
            stacklevel=2,
        )
        return model if optimizer is None else (model, optimizer)
    model, optimizer = copy_model((model, optimizer))
    if log_of(model) is not None:
        restore(model)
    if dtype == torch.bfloat16:
        warn_if_emulated(dtype, "fast_bert(dtype=torch.bfloat16)")
    train(model, optimizer, parse("O1", dtype, {}, channels_last=False))
    log = log_of(model)
    assert log is not None
    for path, part in bert_models(model):
        reason = reasons[path]
        if reason is None:
            speed_up(part, unpad)
            reason = "embeddings and encoder in fused blocks" + (", without padding" * unpad)
            log.add(path, part, "fast_bert", True, reason, "ipex::dropout_add_layer_norm")
        else:
            log.add(path, part, "fast_bert", False, f"stays: {reason}")
    return model if optimizer is None else (model, optimizer)

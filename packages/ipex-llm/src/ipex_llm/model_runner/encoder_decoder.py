# SPDX-License-Identifier: Apache-2.0
"""The decoder of an encoder-decoder as programs: one for a step, and one for the keys and values of the encoder's rows.

A step takes Q tokens of each of R sequences, 1 as a rule, and writes their keys and values to a cache
``[R, heads, capacity, head_dim]`` that all sequences fill in step. Cross attention reads ``[G, heads, S, head_dim]``,
which the second program has made once; R is a multiple of G. The R / G sequences of one row of the encoder (beams) and
their tokens become a group of queries of each head, so the cache is read once for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import FLOATS
from ipex_core.program import Program, ProgramBuilder, Register
from ipex_llm.arch import MlpPlan, NormPlan
from ipex_llm.arch.encoder_decoder import PairLayerPlan, PairPlan
from ipex_llm.model_runner.dense import (
    Linear,
    Owners,
    PlannedWeight,
    Surroundings,
    UnsupportedPlan,
    WeightStore,
)
from ipex_llm.model_runner.feed_forward import GATES, check_mlp, write_inner
from ipex_llm.model_runner.forms import check_forms

__all__ = ["PairRunner", "unsupported_pair"]


@dataclasses.dataclass
class _Weights:
    qkv: Linear
    output: Linear
    query: Linear
    key_value: Linear
    cross_output: Linear
    mlp: tuple[Linear, ...]


class PairRunner:
    """Programs of the decoder of an encoder-decoder.

    Args:
        plan: Structure of the decoder.
        dtype: dtype of rows and weights.
        shared: Owners of parameters that several modules have; see `WeightStore`.

    Raises:
        UnsupportedPlan: The plan has a part that no op computes.
    """

    def __init__(
        self, plan: PairPlan, dtype: torch.dtype, shared: Mapping[int, Owners] | None = None
    ) -> None:
        if dtype not in FLOATS:
            raise UnsupportedPlan(f"weights of {dtype}")
        self.plan, self.dtype = plan, dtype
        self.store = WeightStore(dtype, shared)
        attention = plan.layers[0].attention
        self.heads, self.head_dim = attention.heads, attention.head_dim
        #: Tables of distances, which layers may share.
        self.biases = list(dict.fromkeys(one.bias for one in plan.layers if one.bias is not None))
        self._strips: list[Tensor] = []
        self._programs: dict[tuple[bool, bool], Program] = {}
        try:
            for layer in plan.layers:
                _check(layer, plan)
            self.layers = [self._pack(layer) for layer in plan.layers]
            self.head = self.store.linear(plan.head)
            self._program(masked=False, alone=True)  # what cannot be written raises here
            self._cross = self._write_cross()
            self.surroundings = Surroundings(plan.decoder, itself=True)
            self.store.watch_buffers(plan.decoder)
            for bias in self.biases:
                self.store.watch(bias.module, "weight")
        except BaseException:
            self.store.undo()
            raise

    def _pack(self, layer: PairLayerPlan) -> _Weights:
        linear = self.store.linear
        return _Weights(
            linear(layer.attention.qkv),
            linear(layer.attention.output),
            linear(layer.cross.query),
            linear(layer.cross.key_value),
            linear(layer.cross.output),
            self._mlp(layer.mlp),
        )

    def _mlp(self, mlp: MlpPlan) -> tuple[Linear, ...]:
        store = self.store
        down = store.linear(mlp.down)
        if mlp.gate is None:
            return store.linear(mlp.up), down
        if mlp.activation in GATES:
            return store.linear(mlp.gate, mlp.up), down
        return store.linear(mlp.gate), store.linear(mlp.up), down

    def norm(self, plan: NormPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of a norm."""
        return self.store.norm(plan)

    def fresh(self) -> bool:
        """Return whether the model's parameters are still those that were packed."""
        return self.store.fresh()

    # -------------------------------------------------------------------------------------------------------- programs

    def _program(self, masked: bool, alone: bool) -> Program:
        """Return the program of a step.

        Args:
            masked: Whether rows of the encoder are hidden.
            alone: Whether each sequence has one token, and rows of the encoder of its own.
        """
        key = (masked, alone)
        if key not in self._programs:
            self._programs[key] = _Step(self, masked, alone).write()
        return self._programs[key]

    def _write_cross(self) -> Program:
        b = ProgramBuilder()
        rows, count = b.input("rows"), b.input_int("count")
        outputs = []
        for layer, weights in zip(self.plan.layers, self.layers, strict=True):
            both = _linear(b, weights.key_value, rows)
            a = layer.cross
            both = b.call("reshape", both, [count, -1, 2 * a.heads, a.head_dim])
            for start in (0, a.heads):
                # Each head's keys side by side: a step reads all of them.
                part = b.call("transpose", b.call("narrow", both, 2, start, a.heads), 1, 2)
                outputs.append(b.call("contiguous", part))
        return b.build(outputs)

    # --------------------------------------------------------------------------------------------------------- running

    def cross(self, rows: Tensor) -> list[Tensor]:
        """Return keys and values of the rows of an encoder.

        Args:
            rows: ``[G, S, width]``.

        Returns:
            Layer by layer keys and values, ``[G, heads, S, head_dim]`` each.
        """
        flat = rows.to(self.dtype).reshape(-1, rows.shape[-1])
        return list(self._cross.run(flat, rows.shape[0]))

    def embed(self, tokens: Tensor, past: int) -> Tensor:
        """Return the rows ``[R * Q, width]`` that the first layer reads, before a norm, for tokens ``[R, Q]``."""
        plan = self.plan
        weight: Any = plan.embedding._parameters["weight"]
        if isinstance(weight, PlannedWeight) and weight.whole:
            h = weight.look_up(tokens)
        else:
            h = torch.nn.functional.embedding(tokens, weight.detach())
        if h.dtype is not self.dtype:
            h = h.to(self.dtype)
        if plan.embedding_scale != 1.0:
            h = h * plan.embedding_scale
        if plan.positions is not None:
            start = plan.positions.offset + past
            h = h + plan.positions.rows[start : start + tokens.shape[1]].to(self.dtype)
        return h.reshape(-1, h.shape[-1])

    def _bias_rows(self, past: int, count: int) -> list[Tensor]:
        """Return what is added to scores of tokens after ``past`` others, ``[1, heads, count, past + count]`` each."""
        if not self.biases:
            return []
        total = past + count
        if not self._strips or self._strips[0].shape[1] < total:
            size = max(256, 2 * total)
            self._strips = [bias.values(size).flip(1).contiguous() for bias in self.biases]
        size = self._strips[0].shape[1]
        if count == 1:
            return [
                strip[:, size - total :].unflatten(0, (1, -1)).unsqueeze(2)
                for strip in self._strips
            ]
        far = torch.arange(past, total).unsqueeze(1) - torch.arange(total)
        places = size - 1 - far.clamp_min(0)
        return [strip[:, places].unsqueeze(0) for strip in self._strips]

    def run(
        self,
        tokens: Tensor,
        past: int,
        cache: list[Tensor],
        cross: list[Tensor],
        mask: Tensor | None,
    ) -> Tensor:
        """Run the next tokens of each sequence; their keys and values are written to the cache.

        Args:
            tokens: int64 ``[R, Q]``.
            past: How many tokens of each sequence are in the cache.
            cache: Layer by layer keys and values, ``[R, heads, capacity, head_dim]`` each; capacity >= past + Q.
            cross: Of `cross`, for G rows of the encoder; R must be a multiple of G.
            mask: bool ``[G, 1, 1, S]``, which rows of the encoder are seen; None: all.

        Returns:
            Logits ``[R, Q, vocab]``.
        """
        count = tokens.shape[1]
        groups = cross[0].shape[0]
        alone = count == 1 and groups == tokens.shape[0]
        program = self._program(mask is not None, alone)
        inputs: list[Any] = [self.embed(tokens, past), *cache, *cross]
        inputs += self._bias_rows(past, count)
        if mask is not None:
            inputs.append(mask)
        inputs += [past, count, past + count, groups]
        (logits,) = program.run(*inputs)
        return logits.view(*tokens.shape, -1)


def _check(layer: PairLayerPlan, plan: PairPlan) -> None:
    """Raise UnsupportedPlan if no op computes a part of a layer."""
    check_mlp(layer.mlp)
    first = plan.layers[0]
    for name, one, other in (
        ("self attention", layer.attention, first.attention),
        ("cross attention", layer.cross, first.cross),
    ):
        if (one.heads, one.head_dim) != (other.heads, other.head_dim):
            raise UnsupportedPlan(f"heads of {name} differ between layers")


def unsupported_pair(plan: PairPlan, form: Callable[[nn.Module], object]) -> str | None:
    """Return why no program can be written for a plan, before any weight is packed; None if nothing is known.

    Args:
        plan: The plan.
        form: Returns how the weight of a linear layer will be quantized, None for floats.
    """
    try:
        for layer in plan.layers:
            _check(layer, plan)
            mlp = layer.mlp
            gated = mlp.gate is not None and mlp.activation in GATES
            ups = (mlp.up,) if mlp.gate is None else (mlp.gate, mlp.up)
            for linear in (layer.attention.qkv, layer.cross.key_value, mlp.down):
                check_forms((linear,), False, form)
            for group in (ups,) if gated else ((one,) for one in ups):
                check_forms(group, gated, form)
            for linear in (layer.attention.output, layer.cross.query, layer.cross.output):
                check_forms((linear,), False, form)
        check_forms((plan.head,), False, form)
    except UnsupportedPlan as error:
        return str(error)
    return None


def _linear(b: ProgramBuilder, weight: Linear, x: Register, **post: Any) -> Register:
    bias = None if weight.bias is None else b.constant(weight.bias)
    w = b.constant(weight.weight)
    result: Register = b.call(weight.op, x, w, weight.features, bias, **post, **weight.options)
    return result


class _Step:
    """Writes the program of a step."""

    def __init__(self, runner: PairRunner, masked: bool, alone: bool) -> None:
        self.runner, self.plan, self.alone = runner, runner.plan, alone
        self.b = b = ProgramBuilder()
        layers = range(len(self.plan.layers))
        self.hidden = b.input("hidden")
        self.cache = [(b.input(f"key {i}"), b.input(f"value {i}")) for i in layers]
        self.seen = [(b.input(f"cross key {i}"), b.input(f"cross value {i}")) for i in layers]
        self.biases = {one: b.input(f"bias {i}") for i, one in enumerate(runner.biases)}
        self.mask = b.input("mask") if masked else None
        self.past, self.count = b.input_int("past"), b.input_int("count")
        self.total, self.groups = b.input_int("total"), b.input_int("groups")

    def linear(self, weight: Linear, x: Register, **post: Any) -> Register:
        """Write a linear layer."""
        return _linear(self.b, weight, x, **post)

    def norm(self, plan: NormPlan | None, x: Register) -> Register:
        """Write a norm; None: return ``x``."""
        if plan is None:
            return x
        b, (weight, bias) = self.b, self.runner.norm(plan)
        own = None if weight is None else b.constant(weight)
        result: Register
        if plan.kind == "rms":
            result = b.call("rms_norm", x, own, plan.eps, plan.offset)
        else:
            if plan.offset and weight is not None:
                own = b.constant((weight.float() + plan.offset).to(weight.dtype))
            shift = None if bias is None else b.constant(bias)
            result = b.call("layer_norm", x, own, shift, plan.eps)
        return result

    def write(self) -> Program:
        """Return the program."""
        b, plan = self.b, self.plan
        h = self.norm(plan.embedding_norm, self.hidden)
        for index, layer in enumerate(plan.layers):
            w = self.runner.layers[index]
            h = self._block(
                layer.attention_norm, w.output, h, lambda x, i=index: self._attention(i, x)
            )
            h = self._block(
                layer.cross_norm, w.cross_output, h, lambda x, i=index: self._crossing(i, x)
            )
            h = self._block(
                layer.mlp_norm,
                w.mlp[-1],
                h,
                lambda x, one=layer, w=w: write_inner(self, one.mlp, w.mlp, x),  # type: ignore[arg-type]
            )
        h = self.norm(plan.final_norm, h)
        if plan.logit_scale != 1.0:
            h = b.call("mul", h, plan.logit_scale)
        y = self.linear(self.runner.head, h)
        if plan.logit_bias is not None:
            module, name = plan.logit_bias
            bias: Tensor = getattr(module, name)
            y = b.call("add", y, b.constant(bias.detach().reshape(1, -1).to(self.runner.dtype)))
        return b.build([y])

    def _block(self, norm: NormPlan, last: Linear, h: Register, inner: Any) -> Register:
        if self.plan.norm_first:
            return self.linear(last, inner(self.norm(norm, h)), residual=h)
        return self.norm(norm, self.linear(last, inner(h), residual=h))

    def _attention(self, index: int, x: Register) -> Register:
        b, layer = self.b, self.plan.layers[index]
        a, (keys, values) = layer.attention, self.cache[index]
        qkv = self.linear(self.runner.layers[index].qkv, x)
        rows = b.call("reshape", qkv, [-1, self.count, 3 * a.heads, a.head_dim])
        q, k, v = (
            b.call("transpose", b.call("narrow", rows, 2, i * a.heads, a.heads), 1, 2)
            for i in range(3)
        )
        for cache, new in ((keys, k), (values, v)):
            b.call("copy_", b.call("narrow", cache, 2, self.past, self.count), new)
        out = b.call(
            "decode_attention",
            q,
            b.call("narrow", keys, 2, 0, self.total),
            b.call("narrow", values, 2, 0, self.total),
            None,
            None if layer.bias is None else self.biases[layer.bias],
            a.scale,
        )
        back = b.call("transpose", out, 1, 2)
        result: Register = b.call("reshape", back, [-1, a.heads * a.head_dim])
        return result

    def _crossing(self, index: int, x: Register) -> Register:
        b, a = self.b, self.plan.layers[index].cross
        keys, values = self.seen[index]
        q = self.linear(self.runner.layers[index].query, x)
        if self.alone:
            q = b.call("reshape", q, [0, a.heads, 1, a.head_dim])
        else:
            # Queries of one row of the encoder, by heads.
            q = b.call("reshape", q, [self.groups, -1, a.heads, a.head_dim])
            q = b.call("contiguous", b.call("transpose", q, 1, 2))
            q = b.call("reshape", q, [0, -1, 1, a.head_dim])
        out = b.call("decode_attention", q, keys, values, None, self.mask, a.scale)
        if self.alone:
            result: Register = b.call("reshape", out, [0, a.heads * a.head_dim])
            return result
        out = b.call("reshape", out, [0, a.heads, -1, a.head_dim])
        out = b.call("contiguous", b.call("transpose", out, 1, 2))
        result = b.call("reshape", out, [-1, a.heads * a.head_dim])
        return result

# SPDX-License-Identifier: Apache-2.0
"""Writes one program: inputs, norms, residual stream, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ipex_core.program import Program, ProgramBuilder, Register
from ipex_llm.arch.types import AttentionPlan, LayerPlan, MlpPlan, NormPlan
from ipex_llm.model_runner.program.attention import write_attention
from ipex_llm.model_runner.program.latent import write_latent
from ipex_llm.model_runner.program.mlp import write_experts, write_inner
from ipex_llm.model_runner.weights.dense import Linear, UnsupportedPlan

if TYPE_CHECKING:
    from ipex_llm.model_runner.program.emitter import Emitter, LayerWeights

__all__ = ["Mode", "Writer"]

Mode = Literal["decode", "prefill"]


class Writer:
    """Writes one program."""

    def __init__(
        self,
        emitter: Emitter,
        mode: Mode,
        logits: bool,
        cache_dtype: torch.dtype | None,
        states: bool = False,
        cache_scales: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        self.e = emitter
        self.plan = emitter.plan
        self.mode = mode
        self.logits = logits
        self.states: list[Register] | None = [] if states else None
        self.b = b = ProgramBuilder()
        self.scaled = cache_dtype == torch.int8 and cache_scales is None  # by rows
        self.cache_scales = cache_scales
        self.own_cache = cache_dtype in (None, emitter.store.dtype)
        self.hidden = b.input("hidden")
        self.positions = b.input("positions")
        self.slots = b.input("slots")
        self.tables = b.input("tables")
        if mode == "decode":
            self.lengths = b.input("lengths")
        else:
            self.starts, self.key_starts = b.input("query_starts"), b.input("key_starts")
        self.rows = b.input("rows") if logits else None
        self.ropes = {
            k: (b.input(f"cos {i}"), b.input(f"sin {i}")) for i, k in enumerate(emitter.ropes)
        }
        self.factors = {t: b.input(f"query factors {t}") for t in emitter.temperatures}
        parts = ("key", "value", "key_scales", "value_scales")[: 4 if self.scaled else 2]
        self.caches = [
            tuple(b.input(f"{part} {i}") for part in parts) for i in range(len(self.plan.layers))
        ]
        self.block_size = b.input_int("block_size")
        self.max_context = b.input_int("max_context")
        if mode == "prefill":
            self.max_query = b.input_int("max_query")

    def scales_of(self, index: int) -> dict[str, Any]:
        """Return the arguments of ops on the cache of a layer that say what its numbers stand for."""
        if self.scaled:
            cache = self.caches[index]
            return {"key_scales": cache[2], "value_scales": cache[3]}
        if self.cache_scales is None:
            return {}
        return dict(zip(("k_scale", "v_scale"), self.cache_scales[index], strict=True))

    def write(self) -> Program:
        b, plan, e = self.b, self.plan, self.e
        h: Register = self.hidden
        if plan.embedding_norm is not None:
            h = self.norm(plan.embedding_norm, h)
        pending: Register | None = None  # what the last block adds to the stream
        for index, layer in enumerate(plan.layers):
            h, pending = self.layer(index, layer, e.layers[index], h, pending)
        if self.logits:
            if pending is not None:
                h = b.call("add", h, pending)
            h = b.call("select_rows", h, self.rows)
            pending = None
        h = self._normed(plan.final_norm, h, pending)[0]
        if e.after is not None:
            h = self.linear(e.after, h)
        if not self.logits:
            return b.build([h, *(self.states or ())])
        if e.head is None:
            raise UnsupportedPlan("there is no head")
        parallel = plan.parallel
        if parallel is None:
            y = self.linear(e.head, h)
        else:
            y = self.linear(e.head, parallel.emit_head_input(b, h))
            y = parallel.emit_head_output(b, y)
        if plan.logit_scale != 1.0:
            y = b.call("mul", y, plan.logit_scale)
        if plan.logit_softcap > 0:
            y = b.call("tanh", b.call("mul", y, 1.0 / plan.logit_softcap))
            y = b.call("mul", y, plan.logit_softcap)
        return b.build([y])

    # ----------------------------------------------------------------------------------------------------- small parts

    def linear(self, weight: Linear, x: Register, **post: Any) -> Register:
        bias = None if weight.bias is None else self.b.constant(weight.bias)
        w = self.b.constant(weight.weight)
        result: Register = self.b.call(
            weight.op, x, w, weight.features, bias, **post, **weight.options
        )
        return result

    def norm(self, plan: NormPlan, x: Register) -> Register:
        b = self.b
        weight, bias = self._norm_constants(plan)
        stored = self.e.norm(plan)[0]
        by_head = stored is not None and stored.dim() == 2  # one norm for each head
        own, shift = (None, None) if by_head else (weight, bias)
        result: Register
        if plan.kind == "rms":
            result = b.call("rms_norm", x, own, plan.eps, 0.0 if by_head else plan.offset)
        else:
            result = b.call("layer_norm", x, own, shift, plan.eps)
        if by_head:
            result = b.call("mul", result, weight)
            result = result if bias is None else b.call("add", result, bias)
        return result

    def _norm_constants(self, plan: NormPlan) -> tuple[Register | None, Register | None]:
        weight, bias = self.e.norm(plan)
        separate = plan.kind == "layer" or (weight is not None and weight.dim() == 2)
        if separate and plan.offset and weight is not None:
            weight = (weight.float() + plan.offset).to(weight.dtype)
        constant = self.b.constant
        return (
            None if weight is None else constant(weight),
            None if bias is None else constant(bias),
        )

    def _normed(
        self, plan: NormPlan | None, h: Register, pending: Register | None
    ) -> tuple[Register, Register]:
        """Return the norm of ``h + pending`` and the sum."""
        if plan is None:
            total = h if pending is None else self.b.call("add", h, pending)
            return total, total
        if pending is None:
            return self.norm(plan, h), h
        weight, bias = self._norm_constants(plan)
        if plan.kind == "rms":
            normed, total = self.b.call("add_rms_norm", pending, h, weight, plan.eps, plan.offset)
        else:
            normed, total = self.b.call("add_layer_norm", pending, h, weight, bias, plan.eps)
        return normed, total

    # ------------------------------------------------------------------------------------------------------- the layer

    def layer(
        self, index: int, layer: LayerPlan, w: LayerWeights, h: Register, pending: Register | None
    ) -> tuple[Register, Register | None]:
        """Write one layer; return the stream and what is still to be added to it."""
        x, h = self._normed(layer.input_norm, h, pending)
        if self.states is not None:
            self.states.append(h)
        if layer.residual_after_norm:
            h = x
        attended = self.attention(index, layer.attention, w, x)
        if layer.parallel:
            y = x if layer.mlp_norm is None else self.norm(layer.mlp_norm, h)
            added, rest = self._block(layer, w.output, attended, layer.post_attention_norm, h)
            h = added if rest is None else self.b.call("add", added, rest)
            return self.mlp(layer, w, y, h)
        h, rest = self._block(layer, w.output, attended, layer.post_attention_norm, h)
        y, h = self._normed(layer.mlp_norm, h, rest)
        if layer.residual_after_norm:
            h = y
        return self.mlp(layer, w, y, h)

    def _block(
        self,
        layer: LayerPlan,
        last: Linear,
        x: Register,
        norm: NormPlan | None,
        h: Register,
        **post: Any,
    ) -> tuple[Register, Register | None]:
        """Write a block's last linear layer: added to the stream by it, or pending."""
        if norm is None and layer.residual_scale == 1.0 and self.plan.parallel is None:
            return self.linear(last, x, residual=h, **post), None
        y = self._sum(self.linear(last, x, **post))
        return h, self._scaled(layer, norm, y)

    def _sum(self, y: Register) -> Register:
        """Write the sum over the ranks that have parts of ``y``."""
        parallel = self.plan.parallel
        return y if parallel is None else parallel.emit_all_reduce(self.b, y)

    def _scaled(self, layer: LayerPlan, norm: NormPlan | None, y: Register) -> Register:
        if norm is not None:
            y = self.norm(norm, y)
        if layer.residual_scale != 1.0:
            y = self.b.call("mul", y, layer.residual_scale)
        return y

    def attention(self, index: int, a: AttentionPlan, w: LayerWeights, x: Register) -> Register:
        """Write an attention but for its output projection."""
        qkv = self.linear(w.qkv, x)
        if a.clip_qkv is not None:
            qkv = self.b.call("clamp", qkv, -a.clip_qkv, a.clip_qkv)
        if w.latent is not None:
            return write_latent(self, index, a, qkv, w.latent)
        return write_attention(self, index, a, qkv)

    def mlp(
        self, layer: LayerPlan, w: LayerWeights, x: Register, h: Register
    ) -> tuple[Register, Register | None]:
        mlp = layer.mlp
        norm = layer.post_mlp_norm
        if isinstance(mlp, MlpPlan):
            inner = write_inner(self, mlp, w.mlp, x)
            return self._block(layer, w.mlp[-1], inner, norm, h)
        y = self._sum(write_experts(self, mlp, w, x))
        if norm is None and layer.residual_scale == 1.0 and mlp.shared is None:
            return h, y
        return h, self._scaled(layer, norm, y)

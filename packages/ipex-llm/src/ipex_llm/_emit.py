# SPDX-License-Identifier: Apache-2.0
"""From a plan to programs: the whole decoder stack as one list of op calls.

Two programs run a decoder. Both take the tokens of all sequences back to back as rows ``[T, H]``, without padding, and
write keys and values to a paged cache:

- *decode*: one token of each sequence; attention is ``single_query_cached_kv_attention``.
- *prefill*: any number of tokens of each sequence, behind any history; attention is ``flash_attn_varlen_func``.

Each returns either the rows after the last norm or the logits of chosen rows.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch

from ipex_core._memory import return_free_memory
from ipex_core.nn._packed import PackedWeight
from ipex_core.program import Program, ProgramBuilder, Register
from ipex_llm._emit_latent import Latent, pack_latent, write_latent
from ipex_llm._experts import Experts, pack_experts
from ipex_llm._plan import (
    AttentionPlan,
    DecoderPlan,
    ExpertsPlan,
    LayerPlan,
    LinearPlan,
    MlpPlan,
    NormPlan,
)
from ipex_llm._weights import Linear, UnsupportedPlan, WeightStore

__all__ = ["Emitter", "Mode", "rope_key"]

Tensor = torch.Tensor
Mode = Literal["decode", "prefill"]

#: Activations that ``linear`` applies to its result, and those it takes for a gate.
_EPILOGUES = ("none", "relu", "gelu", "gelu_tanh", "silu")
_GATES = ("silu", "gelu", "gelu_tanh")
_EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


def rope_key(attention: AttentionPlan) -> str | None:
    """Return a name that attentions with the same rotation share, or None without rotation."""
    return None if attention.rope is None else repr(attention.rope)


@dataclasses.dataclass
class _Layer:
    """Packed weights of one layer."""

    qkv: Linear
    output: Linear
    mlp: tuple[Linear, ...] = ()
    experts: Experts | None = None
    router: Linear | None = None
    shared_gate: Linear | None = None
    latent: Latent | None = None


class Emitter:
    """Packs the weights of a plan and writes its programs.

    Args:
        plan: The structure.
        store: Where packed weights are kept.
        progress: Called with the number of layers packed so far.

    Raises:
        UnsupportedPlan: The plan has a part that no op computes.
    """

    def __init__(self, plan: DecoderPlan, store: WeightStore) -> None:
        self.plan = plan
        self.store = store
        self.ropes = list(dict.fromkeys(k for p in plan.layers if (k := rope_key(p.attention))))
        temperatures = (p.attention.temperature for p in plan.layers)
        self.temperatures = list(dict.fromkeys(t for t in temperatures if t is not None))
        for layer in plan.layers:  # before anything is packed
            _check(layer)
        self.before = self._linear(plan.embedding_projection)
        self._layers = [self._pack(layer) for layer in plan.layers]
        self._after = self._linear(plan.output_projection)
        self._head = self._linear(plan.head)
        self._norms: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def _linear(self, plan: LinearPlan | None) -> Linear | None:
        return None if plan is None else self.store.linear(plan)

    def _pack(self, layer: LayerPlan) -> _Layer:
        store, mlp = self.store, layer.mlp
        packed = _Layer(store.linear(layer.attention.qkv), store.linear(layer.attention.output))
        if layer.attention.latent is not None:
            packed.latent = pack_latent(store, layer.attention)
        if isinstance(mlp, ExpertsPlan):
            packed.router = _router(mlp, store.dtype)
            packed.experts = pack_experts(store, mlp)
            if mlp.shared is not None:
                packed.mlp = self._mlp(mlp.shared)
            if mlp.shared_gate is not None:
                packed.shared_gate = store.linear(LinearPlan((mlp.shared_gate,)))
        else:
            packed.mlp = self._mlp(mlp)
        return_free_memory()
        return packed

    def _mlp(self, mlp: MlpPlan) -> tuple[Linear, ...]:
        store = self.store
        down = store.linear(mlp.down)
        if mlp.fused:
            if mlp.activation in _GATES:
                return store.fused_gate(mlp.up), down
            return store.linear(mlp.up), down
        if mlp.gate is None:
            return store.linear(mlp.up), down
        if mlp.activation in _GATES:
            return store.linear(mlp.gate, mlp.up), down
        return store.linear(mlp.gate), store.linear(mlp.up), down

    # -------------------------------------------------------------------------------------------------------- programs

    def program(self, mode: Mode, logits: bool, cache_dtype: torch.dtype | None = None) -> Program:
        """Write a program.

        Its inputs are ``hidden`` [T, H] (embeddings of the tokens), ``positions`` [T], ``slots`` [T], ``tables``
        [B, M]; then ``lengths`` [B] (decode) or ``query_starts`` and ``key_starts`` [B + 1] (prefill); ``rows`` [R]
        with ``logits``; cosines and sines of each rotation; the factors on queries [T, 1, 1] of each temperature; the
        tensors of the cache layer by layer; and the integers
        ``block_size``, ``max_context`` and (prefill) ``max_query``.

        Args:
            mode: See the module.
            logits: Return logits of ``rows`` instead of all rows after the last norm.
            cache_dtype: dtype of the cache if it is not that of the rows.
        """
        return _Writer(self, mode, logits, cache_dtype).write()

    def norm(self, plan: NormPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of a norm."""
        key = id(plan.module)
        if key not in self._norms:
            self._norms[key] = (
                self.store.constant(plan.module, "weight", plan.weight),
                self.store.constant(plan.module, "bias", plan.bias),
            )
        return self._norms[key]


class _Writer:
    """Writes one program."""

    def __init__(
        self, emitter: Emitter, mode: Mode, logits: bool, cache_dtype: torch.dtype | None
    ) -> None:
        self.e = emitter
        self.plan = emitter.plan
        self.mode = mode
        self.logits = logits
        self.b = b = ProgramBuilder()
        self.scaled = cache_dtype == torch.int8
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

    def write(self) -> Program:
        b, plan, e = self.b, self.plan, self.e
        h: Register = self.hidden
        if plan.embedding_norm is not None:
            h = self.norm(plan.embedding_norm, h)
        pending: Register | None = None  # what the last block adds to the stream
        for index, layer in enumerate(plan.layers):
            h, pending = self.layer(index, layer, e._layers[index], h, pending)
        if self.logits:
            if pending is not None:
                h = b.call("add", h, pending)
            h = b.call("select_rows", h, self.rows)
            pending = None
        h = self._normed(plan.final_norm, h, pending)[0]
        if e._after is not None:
            h = self.linear(e._after, h)
        if not self.logits:
            return b.build([h])
        if e._head is None:
            raise UnsupportedPlan("there is no head")
        parallel = plan.parallel
        if parallel is None:
            y = self.linear(e._head, h)
        else:
            y = self.linear(e._head, parallel.emit_head_input(b, h))
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
        self, index: int, layer: LayerPlan, w: _Layer, h: Register, pending: Register | None
    ) -> tuple[Register, Register | None]:
        """Write one layer; return the stream and what is still to be added to it."""
        x, h = self._normed(layer.input_norm, h, pending)
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

    def attention(self, index: int, a: AttentionPlan, w: _Layer, x: Register) -> Register:
        b = self.b
        qkv = self.linear(w.qkv, x)
        if a.clip_qkv is not None:
            qkv = b.call("clamp", qkv, -a.clip_qkv, a.clip_qkv)
        if w.latent is not None:
            return write_latent(self, index, a, qkv, w.latent)
        heads, kv, d = a.heads, a.kv_heads, a.head_dim
        rows = b.call("reshape", qkv, [0, heads + 2 * kv, d])
        q = b.call("narrow", rows, 1, 0, heads)
        k = b.call("narrow", rows, 1, heads, kv)
        v = b.call("narrow", rows, 1, heads + kv, kv)
        if not a.norm_after_rope:
            q, k = self._head_norm(a, a.query_norm, q, heads), self._head_norm(a, a.key_norm, k, kv)
        cache = self.caches[index]
        rope = a.rope
        fused = rope is not None and not self.scaled and not a.norm_after_rope
        if rope is not None:
            cos, sin = self.ropes[repr(rope)]
            if fused:
                b.call(
                    "rotary_embedding_and_cache",
                    *(q, k, v, cache[0], cache[1], sin, cos, self.slots),
                    *(rope.dim, rope.half, self.positions),
                )
            else:
                b.call("rotary_embedding", q, k, sin, cos, rope.dim, rope.half, self.positions)
        if a.norm_after_rope:
            q, k = self._head_norm(a, a.query_norm, q, heads), self._head_norm(a, a.key_norm, k, kv)
        if not fused:
            scales = {} if not self.scaled else {"key_scales": cache[2], "value_scales": cache[3]}
            b.call("reshape_and_cache", k, v, cache[0], cache[1], self.slots, **scales)
        if a.temperature is not None:
            wide = b.call("mul", b.call("cast", q, torch.float32), self.factors[a.temperature])
            q = b.call("cast", wide, self.e.store.dtype)
        out = b.call("empty_like", q)
        self._attend(a, out, q, cache)
        result: Register = b.call("reshape", out, [0, heads * d])
        return result

    def _head_norm(
        self, a: AttentionPlan, norm: NormPlan | None, x: Register, heads: int
    ) -> Register:
        if norm is None:
            return x
        if a.norm_over == "head":
            return self.norm(norm, x)
        flat = self.b.call("reshape", x, [0, heads * a.head_dim])
        result: Register = self.b.call("reshape", self.norm(norm, flat), [0, heads, a.head_dim])
        return result

    def _attend(
        self, a: AttentionPlan, out: Register, q: Register, cache: tuple[Register, ...]
    ) -> None:
        b = self.b
        slopes = None if a.alibi_slopes is None else b.constant(a.alibi_slopes.detach().float())
        more: dict[str, Any] = {"softcap": a.softcap}
        if a.sinks is not None:
            more["sinks"] = b.constant(a.sinks.detach().float())
        if self.scaled:
            more["key_scales"], more["value_scales"] = cache[2], cache[3]
        if self.mode == "decode":
            b.call(
                "single_query_cached_kv_attention",
                *(out, q, cache[0], cache[1], None, a.scale, self.tables, self.lengths),
                *(self.block_size, self.max_context, slopes),
                window_size=-1 if a.window < 0 else a.window + 1,
                **more,
            )
            return
        b.call(
            "flash_attn_varlen_func",
            *(out, q, cache[0], cache[1], self.starts, self.key_starts),
            *(self.max_query, self.max_context, a.scale, True, self.tables, slopes),
            window_left=a.window,
            **more,
        )

    def mlp(
        self, layer: LayerPlan, w: _Layer, x: Register, h: Register
    ) -> tuple[Register, Register | None]:
        mlp = layer.mlp
        norm = layer.post_mlp_norm
        if isinstance(mlp, MlpPlan):
            inner = self._inner(mlp, w.mlp, x)
            return self._block(layer, w.mlp[-1], inner, norm, h)
        y = self._sum(self._experts(mlp, w, x))
        if norm is None and layer.residual_scale == 1.0 and mlp.shared is None:
            return h, y
        return h, self._scaled(layer, norm, y)

    def _inner(self, mlp: MlpPlan, weights: tuple[Linear, ...], x: Register) -> Register:
        """Write everything before the down projection."""
        b, act = self.b, mlp.activation
        if mlp.gate is None and not mlp.fused:
            if act in _EPILOGUES:
                return self.linear(weights[0], x, activation=act)
            if act == "relu2":
                positive = self.linear(weights[0], x, activation="relu")
                squared: Register = b.call("mul", positive, positive)
                return squared
            return self._activation(act, self.linear(weights[0], x))
        if act in _GATES:
            return self.linear(weights[0], x, gate=act)
        if mlp.fused:
            both = self.linear(weights[0], x)
            size = weights[0].features // 2
            gate = b.call("narrow", both, 1, 0, size)
            result: Register = b.call(
                "mul", self._activation(act, gate), b.call("narrow", both, 1, size, size)
            )
            return result
        if act in _EPILOGUES:
            gate = self.linear(weights[0], x, activation=act)
        else:
            gate = self._activation(act, self.linear(weights[0], x))
        return self.linear(weights[1], x, mul=gate)

    def _activation(self, name: str, x: Register) -> Register:
        b = self.b
        result: Register
        if name == "gelu_quick":
            result = b.call("gelu_quick", x)
        elif name == "gelu":
            result = b.call("gelu", x)
        elif name == "gelu_tanh":
            result = b.call("gelu", x, "tanh")
        elif name in ("relu", "relu2"):
            raise UnsupportedPlan(f"activation {name!r} on a fused pair")
        else:
            raise UnsupportedPlan(f"activation {name!r}")
        return result

    def _experts(self, mlp: ExpertsPlan, w: _Layer, x: Register) -> Register:
        b = self.b
        assert w.router is not None and w.experts is not None
        correction, plain = mlp.correction_bias, x
        weights, ids = b.call(
            "moe_routing",
            self.linear(w.router, x),
            mlp.top_k,
            mlp.renormalize,
            mlp.scoring,
            mlp.groups,
            mlp.top_groups,
            None if correction is None else b.constant(correction.detach().float()),
            mlp.routed_scale,
        )
        if mlp.scale_input:
            x, weights = self._scaled_input(x, weights)
        e = w.experts
        y: Register = b.call(
            "fused_experts",
            *(x, b.constant(e.w13), b.constant(e.w2), weights, ids, mlp.intermediate_size),
            mlp.activation,
            None if e.w13_bias is None else b.constant(e.w13_bias),
            None if e.w2_bias is None else b.constant(e.w2_bias),
            swiglu_alpha=mlp.swiglu_alpha,
            swiglu_limit=mlp.swiglu_limit,
            lowp_mode=e.lowp,
        )
        if mlp.shared is None:
            return y
        inner = self._inner(mlp.shared, w.mlp, plain)
        if w.shared_gate is None:
            return self.linear(w.mlp[-1], inner, residual=y)
        # The sigmoid of one number per row is the routing to a single expert.
        factor, _ = b.call("moe_routing", self.linear(w.shared_gate, x), 1, False, "sigmoid")
        own = b.call("mul", self.linear(w.mlp[-1], inner), self._like(factor))
        result: Register = b.call("add", own, y)
        return result

    def _scaled_input(self, x: Register, weights: Register) -> tuple[Register, Register]:
        """Multiply rows with the weight of their only expert; return them and a weight of one for each."""
        ones, _ = self.b.call("moe_routing", weights, 1, True)
        return self.b.call("mul", x, self._like(weights)), ones

    def _like(self, x: Register) -> Register:
        dtype = self.e.store.dtype
        if dtype == torch.float32:
            return x
        result: Register = self.b.call("cast", x, dtype)
        return result


def _router(mlp: ExpertsPlan, dtype: torch.dtype) -> Linear:
    weight: Any = mlp.router._parameters.get("weight")
    if isinstance(weight, PackedWeight):  # a linear layer, which ipex_core.optimize has packed
        weight = weight.plain()
    elif weight is None:
        weight = mlp.router_weight
    weight = weight.detach().to(dtype).contiguous()
    bias = None if mlp.router_bias is None else mlp.router_bias.detach()
    packed = torch.ops.ipex.pack_linear_weight(weight)
    return Linear("linear", packed, weight.shape[0], bias)


def _check(layer: LayerPlan) -> None:
    """Raise if no op computes a part of a layer."""
    mlp: MlpPlan | ExpertsPlan | None = layer.mlp
    if isinstance(mlp, ExpertsPlan):
        if mlp.scale_input and mlp.top_k != 1:
            raise UnsupportedPlan("the weights of several experts multiply their input")
        if mlp.activation not in _EXPERT_ACTIVATIONS:
            raise UnsupportedPlan(f"activation {mlp.activation!r} of experts")
        mlp = mlp.shared
    if mlp is not None:
        known = (*_EPILOGUES, "gelu_quick", *(("relu2",) if mlp.gate is None else ()))
        if mlp.fused and mlp.activation not in (*_GATES, "gelu_quick"):
            raise UnsupportedPlan(f"activation {mlp.activation!r} of a fused pair")
        if mlp.activation not in known:
            raise UnsupportedPlan(f"activation {mlp.activation!r}")

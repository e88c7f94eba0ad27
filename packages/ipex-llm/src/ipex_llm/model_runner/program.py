# SPDX-License-Identifier: Apache-2.0
"""From a plan to programs: the whole decoder stack as one list of op calls.

Two programs run a decoder. Both take the tokens of all sequences back to back as rows ``[T, H]``, without padding, and
write keys and values to a paged cache:

- *decode*: one token of each sequence; attention is ``single_query_cached_kv_attention``.
- *prefill*: any number of tokens of each sequence, behind any history; attention is ``flash_attn_varlen_func``.

Each returns either the rows after the last norm or the logits of chosen rows. `Emitter` packs the weights of a plan in
the forms in which programs call them. `Writer` writes one program: inputs, norms, residual stream, head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ipex_core.packing.parameter import PackedWeight
from ipex_core.program import Program, ProgramBuilder, Register
from ipex_core.util import return_free_memory
from ipex_llm.arch import (
    AttentionPlan,
    DecoderPlan,
    DeltaPlan,
    ExpertsPlan,
    LayerPlan,
    LinearPlan,
    MixerPlan,
    MlpPlan,
    NormPlan,
    SelectivePlan,
    SidePlan,
    StreamEndsPlan,
    TokenBlockPlan,
    gated_norms,
)
from ipex_llm.arch.formulas import inner_linears, projections
from ipex_llm.model_runner.attention import (
    ROWS,
    Latent,
    LookInputs,
    Picture,
    latent_of,
    pack_latent,
    pack_near,
    pack_picture,
    pack_shared,
    short_convolution,
    write_attention,
    write_latent,
    write_picture,
    write_shared,
)
from ipex_llm.model_runner.dense import (
    Linear,
    UnsupportedPlan,
    WeightStore,
)
from ipex_llm.model_runner.experts import Experts, pack_experts
from ipex_llm.model_runner.feed_forward import (
    GATES,
    activated,
    opened,
    pointwise,
    routing,
    together,
    with_added,
    write_experts,
    write_inner,
)
from ipex_llm.model_runner.forms import check_layer
from ipex_llm.model_runner.lora import LoraSites, PackedLinear, write_linear
from ipex_llm.model_runner.mixer import Mixer, pack_mixer, state_parts, write_mixer
from ipex_llm.model_runner.streams import (
    close_streams,
    open_streams,
    pack_connection,
    pack_streams,
    write_low_rank,
    write_streams,
)


@dataclasses.dataclass
class LayerWeights:
    """Packed weights of one layer."""

    qkv: Linear | None = None
    output: Linear | None = None
    mlp: tuple[Linear, ...] = ()
    experts: Experts | None = None
    router: Linear | None = None
    shared_gate: Linear | None = None
    entry: Linear | None = None
    exit: Linear | None = None
    latent: Latent | None = None
    shared: tuple[Linear, Tensor, int] | None = None
    mixer: Mixer | None = None
    beside: LayerWeights | None = None
    #: Of the attention and the mlp at the side, and what is behind them.
    side: LayerWeights | None = None
    last: Linear | None = None
    token_block: tuple[Linear, Linear] | None = None
    low: tuple[Linear, Linear] | None = None
    streams: tuple[Any, ...] | None = None
    ngrams: tuple[Linear, Linear] | None = None
    picture: Picture | None = None
    shortcut: LayerWeights | None = None
    key_bias: Linear | None = None
    near: Linear | None = None
    apart: tuple[Linear, Linear] | None = None
    heads: LayerWeights | None = None


class Emitter:
    """Packs the weights of a plan and writes its programs.

    Args:
        plan: The structure.
        store: Where packed weights are kept.

    Raises:
        UnsupportedPlan: The plan has a part that no op computes.
    """

    def __init__(self, plan: DecoderPlan, store: WeightStore) -> None:
        self.plan = plan
        self.store = store
        self.ropes = list(dict.fromkeys(repr(one) for a in plan.attentions for one in a.ropes))
        self.windows = list(dict.fromkeys(a.windows for a in plan.attentions if a.windows))
        temperatures = (a.temperature for a in plan.attentions)
        self.temperatures = list(dict.fromkeys(t for t in temperatures if t is not None))
        for layer in plan.layers:  # before anything is packed
            check_layer(layer)
        self.before = self._linear(plan.embedding_projection)
        made: dict[Any, LayerWeights] = {}
        self.layers = []
        for layer in plan.layers:
            if plan.repeated and layer.module in made:  # it runs again
                packed = dataclasses.replace(made[layer.module])
                if layer.streams is not None:
                    packed.streams = pack_streams(store, layer.streams)
            else:
                packed = made[layer.module] = self._pack(layer)
            self.layers.append(packed)
        rows = plan.token_rows
        self.token_rows = None if rows is None else store.linear(rows.projection)
        ends = plan.streams
        self.first: tuple[Linear, ...] = ()
        self.last: tuple[Any, ...] = ()
        if isinstance(ends, StreamEndsPlan):
            self.first, self.last = (
                tuple(map(store.linear, one)) for one in (ends.first, ends.last)
            )
        elif ends is not None:
            self.last = (pack_connection(store, ends),)
        self.after = self._linear(plan.output_projection)
        block = plan.head_block
        self.head_block = None if block is None else store.linear(block.linear)
        self.head = self._linear(plan.head)
        #: Gates of norms, by the id of the module.
        self.gates = {
            id(n.module): tuple(map(store.linear, n.gate or ())) for n in gated_norms(plan)
        }
        owners = [layer.module for layer in plan.layers if layer.rates is not None]
        if plan.head is not None and plan.head.multiplied:
            owners += plan.head.modules
        for module in {part for owner in owners for part in owner.modules()}:
            for name, value in module._parameters.items():
                # Factors of the plan were computed from it.
                if value is not None and value.dim() == 1:
                    store.watch(module, name)

    def _linear(self, plan: LinearPlan | None) -> Linear | None:
        return None if plan is None else self.store.linear(plan)

    def _pack(self, layer: LayerPlan) -> LayerWeights:
        store, mlp = self.store, layer.mlp
        attention = layer.attention
        packed = LayerWeights()
        if attention is not None:
            own = projections(attention)
            packed.qkv, packed.output = (store.linear(p) if p.modules else None for p in own)
        if attention is None:
            pass
        elif not isinstance(attention, AttentionPlan):
            packed.mixer = pack_mixer(store, attention)
        elif attention.latent is not None:
            packed.latent = pack_latent(store, attention)
        elif attention.shared is not None:
            packed.shared = pack_shared(store, attention.shared)
        elif attention.experts is not None:
            packed.heads = LayerWeights()
            self._pack_experts(packed.heads, attention.experts)
        elif attention.near is not None:
            packed.near = pack_near(store, attention.near)
            if attention.apart is not None:
                own = attention.apart.key, attention.apart.value
                packed.apart = store.linear(own[0]), store.linear(own[1])
        elif attention.key_bias is not None:
            packed.key_bias = store.linear(attention.key_bias.linear)
        if layer.beside is not None:
            first, last = map(store.linear, projections(layer.beside))
            packed.beside = LayerWeights(first, last, mixer=pack_mixer(store, layer.beside))
        if layer.side is not None:
            first, last = map(store.linear, projections(layer.side.attention))
            packed.side = LayerWeights(first, last, self._mlp(layer.side.mlp))
            packed.last = store.linear(layer.side.output)
        if isinstance(mlp, ExpertsPlan):
            self._pack_experts(packed, mlp)
        elif mlp is not None:
            packed.mlp = self._mlp(mlp)
        if layer.token_block is not None:
            block = layer.token_block
            packed.token_block = store.linear(block.gate), store.linear(block.output)
        if layer.low is not None:
            packed.low = store.linear(layer.low.first), store.linear(layer.low.second)
        if layer.streams is not None:
            packed.streams = pack_streams(store, layer.streams)
        if layer.ngrams is not None:
            store.watch(layer.ngrams.conv, "weight")
            packed.ngrams = store.linear(layer.ngrams.key), store.linear(layer.ngrams.value)
        if layer.picture is not None:
            packed.picture = pack_picture(store, layer.picture, self._mlp(layer.picture.mlp))
        if layer.shortcut is not None:
            packed.shortcut = LayerWeights()
            self._pack_experts(packed.shortcut, layer.shortcut)
        return_free_memory()
        return packed

    def _pack_experts(self, packed: LayerWeights, mlp: ExpertsPlan) -> None:
        store = self.store
        packed.router = _router(store, mlp)
        if mlp.gain is not None:
            store.watch(*mlp.gain)
        packed.experts = pack_experts(store, mlp)
        packed.entry, packed.exit = self._linear(mlp.entry), self._linear(mlp.exit)
        if mlp.shared is not None:
            packed.mlp = self._mlp(mlp.shared)
        if mlp.shared_gate is not None:
            packed.shared_gate = store.linear(LinearPlan((mlp.shared_gate,)))

    def _mlp(self, mlp: MlpPlan) -> tuple[Linear, ...]:
        store = self.store
        down = store.linear(mlp.down)
        if mlp.learned is not None:
            for name in ("alpha_p", "alpha_n"):
                store.watch(mlp.learned, name)
        if mlp.low is not None:
            return store.linear(mlp.up), *map(store.linear, mlp.low), down
        if mlp.fused:
            if mlp.activation in GATES:
                return store.fused_gate(mlp.up), down
            return store.linear(mlp.up), down
        if mlp.gate is None:
            return store.linear(mlp.up), down
        if together(mlp):
            return store.linear(mlp.gate, mlp.up), down
        return store.linear(mlp.gate), store.linear(mlp.up), down

    # -------------------------------------------------------------------------------------------------------- programs

    def program(
        self,
        mode: Mode,
        logits: bool,
        cache_dtype: torch.dtype | None = None,
        states: bool = False,
        cache_scales: Sequence[tuple[float, float]] | None = None,
        lora: LoraSites | None = None,
        look: bool = False,
    ) -> Program:
        """Write a program.

        Its inputs are ``hidden`` [T, H] (embeddings of the tokens), with `DecoderPlan.token_rows` or layers that
        read n-grams the rows of the tokens in their tables, with `DecoderPlan.tables` the experts of the tokens, with
        windows of tokens what `rows_of_step` gives, ``positions`` [T], ``slots`` [T], ``tables``
        [B, M]; then ``lengths`` [B] (decode) or ``query_starts`` and ``key_starts`` [B + 1] (prefill); ``rows`` [R]
        with ``logits``; cosines and sines of each rotation; the factors on queries [T, 1, 1] of each temperature; the
        tensors of the cache layer by layer; the integers
        ``block_size``, ``max_context`` and (prefill) ``max_query``; and with ``lora`` the number of the adapter of each
        row, ``adapters`` [T], -1 for none; with ``look`` what `LookInputs` names.

        Args:
            mode: See `ipex_llm.model_runner.program`.
            logits: Return logits of ``rows`` instead of all rows after the last norm.
            cache_dtype: dtype of the cache if it differs from the dtype of the rows.
            states: Return what each layer read as well (not with ``logits``).
            cache_scales: Scales of keys and values of each layer of a cache of 8-bit numbers. Without them an int8
                cache has tensors with a scale for each row.
            lora: What adapters add to linear layers, None for a program without them.
            look: Write the layers that read a picture, too.
        """
        return Writer(self, mode, logits, cache_dtype, states, cache_scales, lora, look).write()

    def linears(self) -> Iterator[PackedLinear]:
        """Yield the packed weights of the layers, but for routers and experts."""
        for norm in gated_norms(self.plan):
            for one, part in zip(self.gates[id(norm.module)], norm.gate or (), strict=True):
                yield PackedLinear(one, (part,), False)
        for layer, packed in zip(self.plan.layers, self.layers, strict=True):
            own, block, latent = layer.attention, layer.token_block, latent_of(layer.attention)
            found: list[tuple[Any, Any]] = []
            for weights, mixing in ((packed, own), (packed.beside, layer.beside)):
                if weights is not None and mixing is not None:
                    found += zip((weights.qkv, weights.output), projections(mixing), strict=True)
            if packed.apart is not None:
                assert isinstance(own, AttentionPlan) and own.apart is not None
                found += zip(packed.apart, (own.apart.key, own.apart.value), strict=True)
            if packed.mixer is not None and packed.mixer.parts:
                found += zip(packed.mixer.parts, inner_linears(own), strict=True)
            if packed.mixer is not None and isinstance(own, DeltaPlan):
                found += zip(packed.mixer.up or (), own.up or (), strict=True)
            if packed.mixer is not None and isinstance(own, SelectivePlan):
                found.append((packed.mixer.middle, own.middle))
            if block is not None:
                found += zip(packed.token_block or (), (block.gate, block.output), strict=True)
            if packed.latent is not None and latent is not None:
                found.append((packed.latent.query, latent.query))
            if packed.shared is not None:
                found += zip(packed.shared[:1], inner_linears(own), strict=True)
            mlp = layer.mlp.shared if isinstance(layer.mlp, ExpertsPlan) else layer.mlp
            if isinstance(layer.mlp, ExpertsPlan):
                found += [(packed.entry, layer.mlp.entry), (packed.exit, layer.mlp.exit)]
            yield from (PackedLinear(one, (part,), False) for one, part in found if one)
            if mlp is None:
                continue
            yield PackedLinear(packed.mlp[-1], (mlp.down,), False)
            gated = mlp.activation in GATES
            if mlp.gate is not None and together(mlp):
                yield PackedLinear(packed.mlp[0], (mlp.gate, mlp.up), True)
            elif mlp.gate is not None:
                yield PackedLinear(packed.mlp[0], (mlp.gate,), False)
                yield PackedLinear(packed.mlp[1], (mlp.up,), False)
            else:
                yield PackedLinear(packed.mlp[0], (mlp.up,), mlp.fused and gated)

    def norm(self, plan: NormPlan) -> tuple[Tensor | None, Tensor | None]:
        """Return weight and bias of a norm."""
        return self.store.norm(plan)


def _router(store: WeightStore, mlp: ExpertsPlan) -> Linear:
    for name in ("weight", "bias"):
        store.watch(mlp.router, name)
    weight: Any = mlp.router._parameters.get("weight")
    if isinstance(weight, PackedWeight):  # a linear layer, which ipex_core.optimize has packed
        weight = weight.plain()
    elif weight is None:
        weight = mlp.router_weight
    weight = weight.detach()
    if mlp.norms is not None:
        store.watch(mlp.norms.module, "scale")
        weight = weight.float() * mlp.norms.factors.to(weight.device)
    bias = None if mlp.router_bias is None else mlp.router_bias.detach()
    return store.plain(weight.to(store.dtype).contiguous(), bias)


# --- one program ----------------------------------------------------------------------------------------------------

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
        lora: LoraSites | None = None,
        look: bool = False,
    ) -> None:
        self.e = emitter
        self.lora = lora
        self.plan = emitter.plan
        self.mode = mode
        self.logits = logits
        self.states: list[Register] | None = [] if states else None
        self.b = b = ProgramBuilder()
        self.scaled = cache_dtype == torch.int8 and cache_scales is None  # by rows
        self.cache_scales = cache_scales
        self.own_cache = cache_dtype in (None, emitter.store.dtype)
        self.hidden = b.input("hidden")
        rows_of_tokens = self.plan.token_rows is not None or self.plan.ngrams
        self.tokens = b.input("rows of tokens") if rows_of_tokens else None
        #: The experts of tokens, and what windows of tokens read and write.
        self.chosen = {id(t): b.input(f"experts {i}") for i, t in self.plan.tables.items()}
        self.windows = {
            kind: (*(b.input(f"{n} {i}") for n in ROWS), b.input_int(f"most rows {i}"))
            for i, kind in enumerate(emitter.windows)
        }
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
        self.caches: list[tuple[Register, ...]] = []
        self.state_caches: list[tuple[Register, ...]] = []
        for i, layer in enumerate(self.plan.layers):
            attention, mixer = layer.attention, layer.beside
            rows = () if layer.cached is None else parts
            if attention is not None and not isinstance(attention, AttentionPlan):
                mixer = attention
            states_of = () if mixer is None else state_parts(mixer)
            if layer.convs:
                states_of = "history", "history behind attention", "history behind mlp"
                if layer.cached is not None and layer.cached.apart and layer.cached.apart.moving:
                    states_of = *states_of, "last keys and values"
            states_of += () if layer.ngrams is None else ("history of streams", "last tokens")
            own = tuple(b.input(f"{part} {i}") for part in rows)
            if isinstance(attention, AttentionPlan) and attention.source is not None:
                own = self.caches[attention.source]
            self.caches.append(own)
            self.state_caches.append(tuple(b.input(f"{part} {i}") for part in states_of))
        #: Where texts begin in the rows, how long they are, and their rows in layers with a state.
        self.texts: tuple[Register, ...] = ()
        if self.plan.has_states:
            self.texts = tuple(
                b.input(f"{part} of texts") for part in ("starts", "lengths", "rows")
            )
        self.block_size = b.input_int("block_size")
        self.max_context = b.input_int("max_context")
        if mode == "prefill":
            self.max_query = b.input_int("max_query")
        if lora is not None:
            self.adapters = b.input("adapters")
        self.left: Register | None = None  # what experts of a layer before give, not added yet
        self.start: Register | None = None  # where loops of layers began
        self.loop: list[Register] = []  # the same of streams,
        self.before: list[Register] = []  # and what messages are made of
        self.look = LookInputs(b, len(self.plan.pictures)) if look else None

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
        self.embedded = h
        self.parts = self._token_rows(h)
        pending: Register | None = None  # what the last block adds to the stream
        streams = [] if plan.streams is None else open_streams(self, h, e.first)
        pictures = 0
        for index, layer in enumerate(plan.layers):
            if plan.streams is None:
                w = e.layers[index]
                h, pending = self.layer(index, layer, w, h, pending)
                if self.look is not None and layer.picture is not None and w.picture is not None:
                    h, pending = h if pending is None else b.call("add", h, pending), None
                    h = write_picture(self, pictures, layer.picture, w.picture, h)
                    pictures += 1
            else:
                streams = write_streams(self, index, layer, e.layers[index], streams)
        if plan.streams is not None:
            if self.logits:
                streams = [b.call("select_rows", one, self.rows) for one in streams]
            h = close_streams(self, streams, e.last)
        elif self.logits:
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
        if plan.head_block is not None:
            assert e.head_block is not None
            h = activated(self, plan.head_block.activation, e.head_block, h)
            h = self.norm(plan.head_block.norm, h)
        parallel = plan.parallel
        if parallel is None:
            y = self.linear(e.head, h)
        else:
            y = self.linear(e.head, parallel.emit_head_input(b, h))
            y = parallel.emit_head_output(b, y)
        if plan.dropped:
            y = b.call("narrow", y, 1, 0, plan.vocab_size)
        if plan.logit_scale != 1.0:
            y = b.call("mul", y, plan.logit_scale)
        if plan.logit_softcap > 0:
            y = b.call("tanh", b.call("mul", y, 1.0 / plan.logit_softcap))
            y = b.call("mul", y, plan.logit_softcap)
        return b.build([y])

    def _token_rows(self, h: Register) -> Register | None:
        """Write what tokens bring for each layer, side by side."""
        plan, b = self.plan.token_rows, self.b
        if plan is None:
            return None
        assert self.e.token_rows is not None and self.tokens is not None
        rows = self.linear(self.e.token_rows, h)
        rows = b.call("reshape", rows, [0, len(self.plan.layers), plan.width])
        rows = b.call("reshape", self.norm(plan.norm, rows), [0, -1])
        result: Register = b.call("mul", b.call("add", rows, self.tokens), plan.scale)
        return result

    def token_block(
        self, index: int, block: TokenBlockPlan, w: LayerWeights, h: Register
    ) -> Register:
        """Write the block that brings in a layer's part of what tokens bring; return what it adds to the stream."""
        rows = self.plan.token_rows
        assert rows is not None and w.token_block is not None and self.parts is not None
        gate = activated(self, block.activation, w.token_block[0], h)
        part = self.b.call("narrow", self.parts, 1, index * rows.width, rows.width)
        y = self.linear(w.token_block[1], self.b.call("mul", gate, part))
        return self.norm(block.norm, y)

    # ----------------------------------------------------------------------------------------------------- small parts

    def linear(self, weight: Linear, x: Register, **post: Any) -> Register:
        if weight.factors is not None:  # callers keep what comes behind the factors apart
            assert not post
            return self._multiplied(self._linear(weight, x), weight.factors)
        return self._linear(weight, x, **post)

    def _multiplied(self, y: Register, factors: Tensor) -> Register:
        """Multiply rows in float32."""
        b, dtype = self.b, self.e.store.dtype
        result: Register
        if bool((factors == factors[0]).all()):
            result = b.call("mul", y, float(factors[0]))
        elif dtype == torch.float32:
            result = b.call("mul", y, b.constant(factors))
        else:
            wide = b.call("mul", b.call("cast", y, torch.float32), b.constant(factors))
            result = b.call("cast", wide, dtype)
        return result

    def _linear(self, weight: Linear, x: Register, **post: Any) -> Register:
        site = None if self.lora is None else self.lora.site(weight)
        if site is not None:
            return write_linear(self, weight, site, x, **post)
        bias = None if weight.bias is None else self.b.constant(weight.bias)
        w = self.b.constant(weight.weight)
        result: Register = self.b.call(
            weight.op, x, w, weight.features, bias, **post, **weight.options
        )
        return result

    def norm(self, plan: NormPlan, x: Register) -> Register:
        b = self.b
        if plan.kind == "clip":
            return self._clipped(plan, x)
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
        if bias is not None and (by_head or plan.kind == "rms"):
            result = b.call("add", result, bias)
        return self._opened(plan, result)

    def _clipped(self, plan: NormPlan, x: Register) -> Register:
        """Write rows that are made shorter where they are too long."""
        scale = self.e.store.constant(plan.module, "scale", plan.weight)
        rows = [x] if scale is None else [x, self.b.constant(scale)]
        many = len(rows)
        steps: list[tuple[Any, ...]] = [("mul", 0, many - 1)] if many > 1 else []
        own = many + len(steps) - 1
        squares = pointwise(self.b, rows, [], [*steps, ("mul", own, own)], torch.float32)
        size = self.b.call("sum", squares, [2], True)
        steps = [("sqrt", many), ("add", many + 4, many + 1), ("div", many + 2, many + 5)]
        steps += [("minimum", many + 6, many + 3), ("mul", 0, many + 7)]
        steps += [("mul", many + 8, 1)] if many > 1 else []
        numbers = [1e-6, plan.eps, 1.0]
        return pointwise(self.b, [*rows, size], numbers, steps, self.e.store.dtype)

    def _opened(self, plan: NormPlan, y: Register) -> Register:
        """Write what a norm gives times its factor and its gate."""
        if plan.factor != 1.0:
            y = self.b.call("mul", y, plan.factor)
        if plan.gate is None:
            return y
        first, second = self.e.gates[id(plan.module)]
        gate = self.linear(second, activated(self, "silu", first, y))
        return opened(self.b, "sigmoid", gate, y, self.e.store.dtype)

    def _norm_constants(self, plan: NormPlan) -> tuple[Register | None, Register | None]:
        weight, bias = self.e.norm(plan)
        separate = plan.kind == "layer" or (weight is not None and weight.dim() == 2)
        if separate and plan.offset and weight is not None:
            weight = (weight.float() + plan.offset).to(weight.dtype)
        first, last = (None if one is None else self.b.constant(one) for one in (weight, bias))
        return first, last

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
            normed = normed if bias is None else self.b.call("add", normed, bias)
        else:
            normed, total = self.b.call("add_layer_norm", pending, h, weight, bias, plan.eps)
        return self._opened(plan, normed), total

    # ------------------------------------------------------------------------------------------------------- the layer

    def layer(
        self, index: int, layer: LayerPlan, w: LayerWeights, h: Register, pending: Register | None
    ) -> tuple[Register, Register | None]:
        """Write one layer; return the stream and what is still to be added to it."""
        attention = layer.attention
        first = layer.mlp_norm if attention is None else layer.input_norm
        if layer.restart is not None:
            h, pending = self._normed(layer.restart, h, pending)[0], None
            self.start = h if self.start is None else self.start
            h = self.b.call("add", h, self.start)
        if layer.side is None:
            x, h = self._normed(first, h, pending)
        else:
            h = h if pending is None else self.b.call("add", h, pending)
            x, _ = self._normed(first, self._side(index, layer.side, w, h), None)
        if self.states is not None:
            self.states.append(h)
        if attention is None:
            return self.mlp(layer, w, x, h)
        if layer.residual_after_norm:
            h = self._kept(x, layer.residual_factors[0])
        h = self._gained(layer, 0, h)
        self.index = index
        attended = self.attention(index, attention, w, x)
        if layer.beside is not None:
            h = self._beside(index, layer.beside, w.beside, x, h)
        if layer.parallel:
            y = x if layer.mlp_norm is None else self.norm(layer.mlp_norm, h)
            added, rest = self._block(layer, w.output, attended, layer.post_attention_norm, h)
            h = added if rest is None else self.b.call("add", added, rest)
            return self.mlp(layer, w, y, h)
        h, rest = self._block(layer, w.output, attended, layer.post_attention_norm, h)
        if layer.rates is not None:
            h = y = self._normed(layer.mlp_norm, self._moved(layer.rates[0], x, rest), None)[0]
            return self._moved(layer.rates[1], h, self.mlp(layer, w, y, h)[1]), None
        if layer.mlp is None and layer.stream_scale != 1.0:
            total = h if rest is None else self.b.call("add", h, rest)
            return self.b.call("mul", total, layer.stream_scale), None
        if layer.mlp is None:
            return h, rest
        if layer.low is not None:
            h, rest = write_low_rank(self, layer.low, w.low, x, h, rest), None
        y, h = self._normed(layer.mlp_norm, h, rest)
        if layer.residual_after_norm:
            h = self._kept(y, layer.residual_factors[1])
        h = self._gained(layer, 1, h)
        left, self.left = self.left, None
        if layer.shortcut is not None:
            self.left = write_experts(self, layer.shortcut, w.shortcut, y, h)
        h, rest = self.mlp(layer, w, y, h)
        h = h if left is None else self.b.call("add", h, left)
        if layer.stream_scale == 1.0 and layer.token_block is None:
            return h, rest
        total = h if rest is None else self.b.call("add", h, rest)
        if layer.token_block is not None:
            more = self.token_block(index, layer.token_block, w, total)
            total = self.b.call("add", total, more)
        if layer.stream_scale != 1.0:
            total = self.b.call("mul", total, layer.stream_scale)
        return total, None

    def _gained(self, layer: LayerPlan, block: int, h: Register) -> Register:
        """Write the residual of a block times a parameter, where the layer does so."""
        if layer.gains is None:
            return h
        module, name = layer.module, layer.gains[block]
        gain: Any = self.e.store.constant(module, name, getattr(module, name))
        result: Register = self.b.call("mul", h, self.b.constant(gain))
        return result

    def _moved(self, rate: Tensor, x: Register, y: Register | None) -> Register:
        """Write what is a share of the way from `x` to `y`."""
        steps = [("sub", 1, 0), ("mul", 2, 3), ("add", 0, 4)]
        assert y is not None
        rows = [x, y, self.b.constant(rate.unsqueeze(0))]
        return pointwise(self.b, rows, [], steps, self.e.store.dtype)

    def _kept(self, x: Register, factor: float) -> Register:
        """Write what is left of the residual."""
        result: Register = x if factor == 1.0 else self.b.call("mul", x, factor)
        return result

    def _block(
        self,
        layer: LayerPlan,
        last: Linear | None,
        x: Register,
        norm: NormPlan | None,
        h: Register,
        behind: int = 0,
        **post: Any,
    ) -> tuple[Register, Register | None]:
        """Write a block's last linear layer: added to the stream by it, or pending."""
        if last is None:
            return h, self._scaled(layer, norm, x)
        alone = norm is None and layer.residual_scale == 1.0 and last.factors is None
        alone = alone and not layer.convs
        # Products of a device add nothing on their way out: there the norm that follows is the cheaper place.
        if alone and self.plan.parallel is None and self.e.store.device.type == "cpu":
            return self.linear(last, x, residual=h, **post), None
        y = self._sum(self.linear(last, x, **post))
        return h, self._scaled(layer, norm, self._convolved(layer, behind, y))

    def _convolved(self, layer: LayerPlan, block: int, y: Register) -> Register:
        """Write what a block gives with a short convolution of it added, where the layer has one."""
        if not layer.convs:
            return y
        convs = layer.convs[block : block + 1]
        return short_convolution(self, self.index, block + 1, convs, y)

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

    def _side(self, index: int, plan: SidePlan, w: LayerWeights, h: Register) -> Register:
        """Write an attention and an mlp at the side; return the stream with what they give."""
        assert w.side is not None and w.side.qkv and w.side.output and w.last is not None
        x = self.norm(plan.norm, self.b.call("cat", [h, self.embedded], 1))
        attended = write_attention(self, index, plan.attention, self.linear(w.side.qkv, x))
        x = self.norm(plan.mlp_norm, self.linear(w.side.output, attended))
        inner = write_inner(self, plan.mlp, w.side.mlp, x)
        return self.linear(w.last, self.linear(w.side.mlp[-1], inner), residual=h)

    def _beside(
        self, index: int, plan: MixerPlan, w: LayerWeights | None, x: Register, h: Register
    ) -> Register:
        """Write a block beside attention and add what it gives to the stream."""
        assert w is not None and w.mixer is not None and w.qkv is not None and w.output is not None
        inner = write_mixer(self, index, plan, w.mixer, self.linear(w.qkv, x))
        result: Register
        if w.output.factors is None:
            result = self.linear(w.output, inner, residual=h)
        else:
            result = self.b.call("add", h, self.linear(w.output, inner))
        return result

    def attention(
        self, index: int, a: AttentionPlan | MixerPlan, w: LayerWeights, x: Register
    ) -> Register:
        """Write an attention, or a block with a state, but for its output projection if it is a linear layer."""
        qkv = x if w.qkv is None else self.linear(w.qkv, x)
        if not isinstance(a, AttentionPlan):
            assert w.mixer is not None
            return write_mixer(self, index, a, w.mixer, qkv)
        if a.experts is not None:
            return self._head_experts(index, a, a.experts, w.heads, x, qkv)
        if a.clip_qkv is not None:
            qkv = self.b.call("clamp", qkv, -a.clip_qkv, a.clip_qkv)
        if w.latent is not None:
            return write_latent(self, index, a, qkv, w.latent)
        if w.shared is not None:
            return write_shared(self, index, a, qkv, w.shared)
        y = write_attention(self, index, a, qkv, w.key_bias, w.near)
        return y if a.output_norm is None else self.norm(a.output_norm, y)

    def _head_experts(
        self,
        index: int,
        a: AttentionPlan,
        plan: ExpertsPlan,
        w: LayerWeights | None,
        x: Register,
        kv: Register,
    ) -> Register:
        """Write an attention whose queries come from experts, with what they make of what these attend to."""
        assert w is not None and w.router is not None and w.experts is not None
        b, e, width, count = self.b, w.experts, a.kv_heads * a.head_dim, plan.top_k
        weights, ids = routing(self, plan, w.router, x)
        queries = b.call("expert_linear", x, b.constant(e.w13), ids, width, lowp_mode=e.lowp)
        # In the program the queries of a key head lie side by side, for experts the queries of one expert.
        queries = b.call("reshape", queries, [0, count, a.kv_heads, a.head_dim])
        queries = b.call("reshape", b.call("transpose", queries, 1, 2), [0, count * width])
        attended = write_attention(self, index, a, b.call("cat", [queries, kv], 1))
        attended = b.call("reshape", attended, [0, a.kv_heads, count, a.head_dim])
        attended = b.call("reshape", b.call("transpose", attended, 1, 2), [0, count, width])
        size = self.plan.hidden_size
        y = b.call("expert_linear", attended, b.constant(e.w2), ids, size, weights, e.lowp)
        return with_added(self, plan, y)

    def mlp_alone(
        self, mlp: MlpPlan | ExpertsPlan, w: LayerWeights, x: Register, h: Register
    ) -> Register:
        """Write what a block behind attention gives."""
        if isinstance(mlp, MlpPlan):
            return self.linear(w.mlp[-1], write_inner(self, mlp, w.mlp, x))
        return write_experts(self, mlp, w, x, h)

    def mlp(
        self, layer: LayerPlan, w: LayerWeights, x: Register, h: Register
    ) -> tuple[Register, Register | None]:
        mlp = layer.mlp
        assert mlp is not None
        norm = layer.post_mlp_norm
        if isinstance(mlp, MlpPlan):
            inner = write_inner(self, mlp, w.mlp, x)
            return self._block(layer, w.mlp[-1], inner, norm, h, 1)
        y = self._convolved(layer, 1, self._sum(write_experts(self, mlp, w, x, h)))
        if norm is None and layer.residual_scale == 1.0 and mlp.shared is None:
            return h, y
        return h, self._scaled(layer, norm, y)

# SPDX-License-Identifier: Apache-2.0
"""Runs a decoder: one call per step for the whole stack."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ipex_core.library.spec import FLOATS
from ipex_core.nn.rope import rope_frequencies
from ipex_core.ops.kv_cache import QUANTIZED
from ipex_core.program import Program
from ipex_llm.arch import AttentionPlan, DecoderPlan, LayerPlan, RopePlan, ScanPlan
from ipex_llm.arch.formulas import ngram_rows, position_rows, taps_of
from ipex_llm.arch.reference import query_factors, rows_of_table
from ipex_llm.kv_cache import (
    CacheShape,
    LayerShape,
    PagedCache,
    StateShape,
    Step,
    cache_dtype,
    state_bytes,
)
from ipex_llm.model_runner.attention import BIAS_WIDTH, Look, keys_and_values, rows_of_step
from ipex_llm.model_runner.dense import (
    DeviceStore,
    Owners,
    PlannedWeight,
    Surroundings,
    UnsupportedPlan,
    WeightStore,
    call_linear,
    device_of,
)
from ipex_llm.model_runner.lora import Adapter, LoraSites, PackedLinear
from ipex_llm.model_runner.mixer import state_shape
from ipex_llm.model_runner.program import Emitter, Mode
from ipex_quant.kv_cache import KVCacheScales

__all__ = ["Rope", "Runner"]

#: Kinds of rotation whose angles depend on the length of the sequence.
_BY_LENGTH = ("dynamic", "longrope")
#: Positions that tables of rotations have at the start, at most; they grow with the texts.
_ROWS = 1 << 16


class Cache(Protocol):
    """What a program must know of a cache; see `PagedCache`."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tensors(self) -> list[Tensor]: ...

    @property
    def block_size(self) -> int: ...


class Runner:
    """A decoder as programs over a paged cache.

    Args:
        plan: Structure of the decoder.
        dtype: dtype of rows and weights.
        shared: Owners of parameters that several modules have; see `WeightStore`.
        ropes: Tables of rotations that other runners have too, by their text; gets what is new here.
        kv_scales: Scales of the keys and values of each layer in caches of 8-bit numbers. None: int8 rows have their
            own, 8-bit floats have none.

    Attributes:
        plan: As given.
        dtype: As given.
        device: Where the weights are and programs run. Elsewhere than on the CPU the instructions of a program are ops
            of the device, started one by one.
        vocab_size: Width of the logits.
    """

    def __init__(
        self,
        plan: DecoderPlan,
        dtype: torch.dtype,
        shared: Mapping[int, Owners] | None = None,
        ropes: dict[str, Rope] | None = None,
        kv_scales: KVCacheScales | None = None,
    ) -> None:
        if dtype not in FLOATS:
            raise UnsupportedPlan(f"weights of {dtype}")
        self.plan = plan
        self.kv_scales = kv_scales
        self.dtype = dtype
        self.vocab_size = plan.vocab_size
        self.device = device_of(plan)
        self.store = (
            WeightStore(dtype, shared)
            if self.device.type == "cpu"
            else DeviceStore(dtype, self.device, shared)
        )
        try:
            self.emitter = Emitter(plan, self.store)
            #: Programs by (mode, with logits, cache dtype, with the states of all layers, with layers that read
            #: a picture), without adapters and with.
            self._programs: dict[tuple[Any, ...], Program] = {}
            self._lora_programs: dict[tuple[Any, ...], Program] = {}
            self._lora: LoraSites | None = None
            self._program(
                "decode", plan.head is not None, None
            )  # what cannot be written raises here
        except BaseException:
            self.store.undo()
            raise
        #: The first token of a text has limited steps, also alone; those behind it do not.
        self._limited = any(
            isinstance(block, ScanPlan) and block.limits is not None
            for layer in plan.layers
            for block in (layer.attention, layer.beside)
        )
        self.shapes = tuple(_shape(layer, dtype) for layer in plan.layers)
        plans = {repr(one): one for a in plan.attentions for one in a.ropes}
        ropes = {} if ropes is None else ropes
        for key in self.emitter.ropes:
            if key not in ropes:
                ropes[key] = Rope(plans[key], plan.max_positions, self.device)
        self._ropes = [ropes[key] for key in self.emitter.ropes]
        self.store.watch_buffers(plan.decoder, not any(rope.by_length for rope in self._ropes))
        self.surroundings = Surroundings(plan.decoder)
        self._lock = threading.Lock()

    def _program(
        self,
        mode: Mode,
        logits: bool,
        cache: torch.dtype | None,
        states: bool = False,
        lora: LoraSites | None = None,
        look: bool = False,
    ) -> Program:
        key = (mode, logits, cache, states, look)
        programs = self._programs if lora is None else self._lora_programs
        program = programs.get(key)
        if program is None:
            program = self.emitter.program(*key[:4], self._scales(cache), lora, look)
            if self.device.type != "cpu":
                program = program.on(self.device)
            programs[key] = program
        return program

    # -------------------------------------------------------------------------------------------------------- adapters

    def linears(self) -> list[PackedLinear]:
        """Return the packed weights that adapters may add to."""
        return list(self.emitter.linears())

    def set_adapters(self, adapters: Sequence[Adapter | None]) -> None:
        """Let rows of `forward` have these adapters, by their number; None for a number that is free."""
        found = any(adapter is not None for adapter in adapters)
        self._lora_programs = {}
        self._lora = LoraSites(self.emitter.linears(), adapters, self.dtype) if found else None

    def _scales(self, dtype: torch.dtype | None) -> tuple[tuple[float, float], ...] | None:
        """Return the scales of the layers of a cache, if it has them."""
        if self.kv_scales is None or dtype not in QUANTIZED:
            return None
        return self.kv_scales.of(dtype)

    @property
    def length_switch(self) -> int | None:
        """Length above which all tokens of a sequence get other angles (LongRoPE); None: at no length."""
        return min((r.original for r in self._ropes if r.plan.kind == "longrope"), default=None)

    def fresh(self) -> bool:
        """Return whether the model's parameters are still those that were packed."""
        return self.store.fresh()

    # ---------------------------------------------------------------------------------------------------------- caches

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype | None = None,
        num_states: int = 0,
    ) -> PagedCache:
        """Return a cache; per layer keys and values ``[num_blocks, kv_heads, block_size, head_dim]``.

        Args:
            num_blocks: Number of blocks.
            block_size: Rows of a block.
            dtype: The model's own (None), ``torch.int8``, ``torch.float8_e5m2`` or ``torch.float8_e4m3fn``.
            num_states: Sequences that layers with a state have room for.

        Raises:
            ValueError: An argument is out of range.
        """
        own = self._cache_dtype(dtype)
        return PagedCache(
            *(self.shapes, num_blocks, block_size, own, self._scales(own), num_states),
            device=self.device,
        )

    def cache_bytes(
        self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None
    ) -> int:
        """Return the memory that the blocks of such a cache take."""
        own = self._cache_dtype(dtype)
        scaled = self.kv_scales is not None
        return PagedCache.bytes(self.shapes, num_blocks, block_size, own, scaled)

    def _cache_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        own = cache_dtype(dtype, self.dtype)
        if own != self.dtype and self.emitter.windows:
            raise ValueError(f"PagedCache: dtype must be None with rows of windows, got {dtype}")
        return own

    def state_bytes(self, num_states: int) -> int:
        """Return the memory that the states of so many sequences take."""
        return num_states * state_bytes(self.shapes)

    # --------------------------------------------------------------------------------------------------------- running

    def forward(
        self,
        cache: PagedCache,
        tokens: Tensor,
        positions: Tensor,
        slot_mapping: Tensor,
        block_tables: Tensor,
        query_starts: Tensor,
        context_lens: Tensor,
        rows: Tensor | None = None,
        length: int | None = None,
        states: bool = False,
        adapters: Tensor | None = None,
        state_rows: Tensor | None = None,
    ) -> Tensor:
        """Run new tokens of some sequences and return logits.

        Args:
            cache: Of `new_cache`; keys and values of the tokens are written to it.
            tokens: int64 ``[T]``, the tokens of all sequences back to back, without padding.
            positions: int64 ``[T]``, their positions.
            slot_mapping: int64 ``[T]``, ``block * block_size + row`` of each; negative: not stored.
            block_tables: int32 ``[B, max_blocks]``.
            query_starts: int32 ``[B + 1]``, offsets of the sequences in ``tokens``.
            context_lens: int32 ``[B]``, history and new tokens of each sequence.
            rows: int64 ``[R]``, the tokens that get logits; None: the last one of each sequence.
            length: Length of the sequences that angles of rotation may depend on; None: of the longest one.
            states: Return what the head reads instead, for all tokens.
            adapters: int64 ``[T]``, numbers of `set_adapters`, -1 for rows without; None: no row has one.
            state_rows: int32 ``[B]``, the rows of layers with a state; None for a model that has none. A sequence
                whose tokens are all new begins with an empty state.

        Returns:
            Logits ``[R, vocab_size]``, or states ``[T, H]``, in the dtype of the model, on the CPU as the arguments.

        Raises:
            RuntimeError: A token, position, slot or block is out of range.
        """
        count, batch = tokens.shape[0], context_lens.shape[0]
        singles = count == batch
        longest = int(context_lens.max()) if batch else 0
        most = 1 if singles else int((query_starts[1:] - query_starts[:-1]).max())
        step = Step(
            *(slot_mapping, block_tables, query_starts, context_lens, longest, most, singles),
            state_rows,
        )
        hidden = self.embed(tokens, positions)
        return self.run(
            *(cache, hidden, positions, step, rows),
            tokens=tokens,
            logits=not states,
            length=length,
            adapters=adapters,
        ).cpu()

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the rows ``[T, H]`` that the first layer reads, and behind them what tokens bring for each layer."""
        plan = self.plan
        tokens = tokens.to(self.device)
        weight: Any = plan.embedding._parameters["weight"]
        if isinstance(weight, PlannedWeight) and weight.whole:
            h = weight.look_up(tokens)
        else:
            h = torch.nn.functional.embedding(tokens, weight.detach())
        if h.dtype is not self.dtype:
            h = h.to(self.dtype)
        if plan.embedding_scale != 1.0:
            h = h * torch.tensor(plan.embedding_scale, dtype=self.dtype)
        h = self.place(h, positions)
        rows = plan.token_rows
        if rows is None:
            return h
        table: Any = rows.table._parameters["weight"]
        own = torch.nn.functional.embedding(rows_of_table(tokens, table), table.detach())
        own = own.to(self.dtype)
        return torch.cat([h, own * torch.tensor(rows.table_scale, dtype=self.dtype)], dim=1)

    def pictures(self, rows: Tensor) -> list[Tensor]:
        """Return keys and values of pictures for each layer that reads them, ``[B, kv_heads, S, head_dim]`` each.

        Args:
            rows: ``[B, S, width]``.
        """
        rows = rows.to(self.dtype)
        found: list[Tensor] = []
        for layer, weights in zip(self.plan.layers, self.emitter.layers, strict=True):
            if layer.picture is not None:
                assert weights.picture is not None
                found += keys_and_values(layer.picture, weights.picture, rows)
        return found

    def place(self, h: Tensor, positions: Tensor) -> Tensor:
        """Project token embeddings and add position embeddings, where the model does."""
        before = self.emitter.before
        if before is not None:
            h = call_linear(before, h)
        module = self.plan.position_embedding
        if module is None:
            return h
        at = positions + self.plan.position_offset if self.plan.position_offset else positions
        at = at.to(self.device)
        return h + torch.nn.functional.embedding(at, position_rows(module)).to(self.dtype)

    def run(
        self,
        cache: Cache,
        hidden: Tensor,
        positions: Tensor,
        step: Step,
        rows: Tensor | None = None,
        *,
        tokens: Tensor | None = None,
        logits: bool = False,
        states: list[Tensor] | None = None,
        length: int | None = None,
        adapters: Tensor | None = None,
        look: Look | None = None,
    ) -> Tensor:
        """Run rows ``[T, H]`` through the stack; see `forward`.

        Positions and the step are on the CPU, the rows, what sees pictures and the result on the device.

        Args:
            tokens: What the rows were made of. Layers that read n-grams or choose experts by tokens need them.
            states: Gets what each layer reads, ``[T, H]``, and at last the result. Not with ``logits``.
            look: What the tokens see of pictures; None: layers that read them are left out.

        Returns:
            Logits of ``rows`` (None: the last of each sequence), or without ``logits`` all rows after the last norm.
        """
        singles = step.singles and not (self._limited and bool((step.lengths == 1).any()))
        mode: Mode = "decode" if singles else "prefill"
        own = None if cache.dtype == self.dtype else cache.dtype
        lora = None if adapters is None else self._lora
        program = self._program(mode, logits, own, states is not None, lora, look is not None)
        inputs: list[Any] = [hidden]
        width = self.plan.hidden_size
        if self.plan.token_rows is not None:
            inputs = [hidden[:, :width].contiguous(), hidden[:, width:].contiguous()]
        elif self.plan.ngrams:
            assert isinstance(cache, PagedCache) and tokens is not None
            inputs.append(self._ngrams(cache, tokens, step))
        for table in self.plan.tables.values():
            assert tokens is not None
            inputs.append(table[tokens].int())
        for kind in self.emitter.windows:
            inputs += rows_of_step(kind, step, cache.block_size)
        place = len(inputs)
        inputs += [positions, step.slots, step.tables]
        if singles:
            inputs.append(step.lengths)
        else:
            key_starts = torch.zeros(step.lengths.shape[0] + 1, dtype=torch.int32)
            torch.cumsum(step.lengths, 0, dtype=torch.int32, out=key_starts[1:])
            inputs += [step.starts, key_starts]
        if logits:
            inputs.append(step.starts[1:].long() - 1 if rows is None else rows)
        at = positions
        for rope in self._ropes:
            cos, sin, at = rope.tables(positions, step.longest, length)
            inputs += [cos, sin]
        if self._ropes:
            inputs[place] = at
        for temperature in self.emitter.temperatures:
            inputs.append(query_factors(positions, temperature).view(-1, 1, 1))
        inputs += cache.tensors
        if self.plan.has_states:
            inputs += [step.starts, step.lengths, step.states]
        inputs += [cache.block_size, step.longest]
        if not singles:
            inputs.append(step.most)
        if lora is not None:
            inputs.append(adapters)
        if look is not None:
            inputs += look.inputs
        if self.device.type != "cpu":
            inputs = self._placed(inputs)
        result, *between = program.run(*inputs)
        if states is not None:
            states += [*between, result]
        return result

    def _ngrams(self, cache: PagedCache, tokens: Tensor, step: Step) -> Tensor:
        """Return the rows of n-grams of tokens for all layers that read them, side by side; keep the last tokens."""
        assert step.states is not None
        tokens, starts, at = tokens.cpu(), step.starts.long(), step.states.long().to(self.device)
        counts, sequences = starts.diff(), torch.arange(len(step.lengths))
        fresh = (step.lengths == counts).unsqueeze(1)
        found = []
        for index, plan in self.plan.ngrams.items():
            # The tokens of each sequence behind those before them.
            context, kept = plan.context, cache.states_of(index)[-1]
            each = torch.arange(context)
            begin = starts + torch.arange(len(starts)) * context
            places = torch.arange(len(tokens)) + context * (1 + sequences.repeat_interleave(counts))
            every = tokens.new_empty(len(tokens) + len(sequences) * context)
            every[begin[:-1, None] + each] = torch.where(fresh, plan.empty, kept[at].to(tokens))
            every[places] = tokens
            kept[at] = every[begin[1:, None] - context + each].to(kept)
            windows = every[places[:, None] + torch.arange(-context, 1)]
            found.append(ngram_rows(plan, windows.to(self.device)).to(self.dtype))
        return torch.cat(found, dim=1).contiguous()

    def _placed(self, inputs: list[Any]) -> list[Any]:
        """Return the inputs of a program with its tensors on the device."""
        # Writes to tensors of inference mode are not counted, so that each layer would read their numbers back.
        with torch.inference_mode(False), torch.no_grad():
            return [one.to(self.device) if isinstance(one, Tensor) else one for one in inputs]


def _shape(layer: LayerPlan, dtype: torch.dtype) -> CacheShape:
    plan, rows = layer.attention, layer.cached
    mixer = layer.beside if isinstance(plan, AttentionPlan) else plan
    if rows is not None and layer.convs and isinstance(plan, AttentionPlan):
        taps, width = taps_of(plan.convs).shape
        others = tuple(taps_of((one,)).shape[1] for one in layer.convs)
        if plan.apart is not None and plan.apart.moving:
            others = *others, (taps - 1) * width
        return _rows_shape(rows), StateShape((taps - 1, width), None, dtype, others=others)
    state = None if mixer is None else state_shape(mixer, dtype)
    if layer.ngrams is not None:
        assert state is not None
        steps, channels = layer.ngrams.taps.shape
        streams = steps - 1, channels, layer.ngrams.context
        state = dataclasses.replace(state, portable=False, streams=streams)
    if rows is None:
        return state
    return _rows_shape(rows) if state is None else (_rows_shape(rows), state)


def _rows_shape(plan: AttentionPlan) -> LayerShape:
    latent = plan.latent
    if plan.key_bias is not None or plan.apart is not None:
        width = plan.head_dim + BIAS_WIDTH
        return LayerShape(plan.kv_heads, width, values=plan.head_dim, biased=True)
    if plan.difference is not None:
        return LayerShape(2 * plan.kv_heads, plan.head_dim, twice=True)
    if plan.shared is not None:
        rows = plan.windows[1] if plan.windows else 1
        return LayerShape(rows, plan.head_dim, plan.head_dim, whole=True)
    if latent is None:
        return LayerShape(plan.kv_heads, plan.head_dim, values=plan.value_dim)
    return LayerShape(1, latent.rank + latent.common, latent.rank)


class Rope:
    """Cosines and sines of one rotation, for as many positions as were asked for."""

    def __init__(self, plan: RopePlan, positions: int, device: torch.device | str = "cpu") -> None:
        self.plan = plan
        self.device = device
        self.by_length = plan.kind in _BY_LENGTH
        scaling = plan.scaling or {}
        original: Any = scaling.get("original_max_position_embeddings")
        self.original = int(original or plan.max_position_embeddings)
        #: Tables by what the frequencies depend on.
        self._made: dict[int, tuple[Tensor, Tensor]] = {}
        # A context of millions, or any number of a config.json, must not take gigabytes for a short text.
        self._start = min(positions, _ROWS)

    def tables(
        self, positions: Tensor, longest: int, length: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return tables and the rows of them that belong to ``positions``.

        Args:
            positions: int64 ``[T]``.
            longest: Length of the longest sequence.
            length: The length that frequencies are chosen by; None: the longest one.
        """
        needed = longest
        if positions.numel():
            needed = max(needed, int(positions.max()) + 1)
        length = needed if length is None else length
        key = self._length_key(length)
        found = self._made.get(key)
        if found is None or needed > found[0].shape[0]:
            if self.plan.kind == "dynamic":
                self._made.clear()
            doubled = 0 if found is None else 2 * found[0].shape[0]
            size = max(needed, 0 if self.by_length else self._start, doubled)
            found = self._made[key] = self._make(size, length if self.by_length else size)
        return *found, positions

    def _length_key(self, length: int) -> int:
        """Return what of the length the frequencies depend on."""
        if not self.by_length:
            return 0
        if self.plan.kind == "longrope":
            return int(length > self.original)
        return max(length, self.plan.max_position_embeddings)

    def _make(self, size: int, length: int) -> tuple[Tensor, Tensor]:
        plan = self.plan
        frequencies, factor = rope_frequencies(
            plan.kind,
            plan.dim,
            plan.base,
            plan.scaling,
            positions=length,
            max_position_embeddings=plan.max_position_embeddings,
        )
        angles = torch.arange(size, dtype=torch.float64).unsqueeze(1) * frequencies
        factor *= plan.factor
        tables = angles.cos() * factor, angles.sin() * (factor * plan.turn)
        # Of tables made in inference mode a device could not know that they are the same in each layer.
        with torch.inference_mode(False):
            return tables[0].float().to(self.device), tables[1].float().to(self.device)

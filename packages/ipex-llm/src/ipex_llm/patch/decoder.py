# SPDX-License-Identifier: Apache-2.0
"""The forward of a decoder that runs as programs.

The class of the decoder is exchanged for a subclass whose ``forward`` runs the programs. What they cannot do - outputs
of each layer, training, foreign caches - goes to the forward of the original class, and is told once. `Patch` is what a
patched module keeps.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.module_swap.base import original_class
from ipex_llm.arch import ShiftPlan
from ipex_llm.arch.detect import Facts
from ipex_llm.arch.detect.trace import PICTURE
from ipex_llm.kv_cache.transformers import CacheState, adopt, give_up, state_of_cache
from ipex_llm.model_runner import Runner
from ipex_llm.model_runner.attention import Look
from ipex_llm.records import KEY, without
from ipex_quant.kv_cache import KVCacheScales


@dataclasses.dataclass
class Patch:
    """The patch of one module. A copy of the module has a copy of it, without a runner.

    Attributes:
        top: The model that was optimized.
        rebuild: Function that packs the module again and returns its runner, or None if that is not possible.
        kv: dtype of the cache, None for the dtype of the model.
        kv_scales: Scales of an FP8 or INT8 cache.
        stock_calls: Kinds of calls that the stock forward answers.
        names: Of a decoder: the names of the arguments of its forward.
        layer: Of a layer that runs alone, what its forward must know.
    """

    top: nn.Module
    rebuild: Callable[[nn.Module], Any]
    kv: torch.dtype | None = None
    kv_scales: KVCacheScales | None = None
    stock_calls: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    layer: Facts | None = None

    def reads_places(self, runner: Runner) -> bool:
        """Return whether the forward of a decoder takes a mask or positions; without, padding counts (xLSTM)."""
        places = "attention_mask", "position_ids", "padding"
        return any(name in self.names or name in runner.plan.stock_calls for name in places)


def patch_of(module: nn.Module) -> Patch | None:
    """Return the patch of a module, or None."""
    record = module.__dict__.get(KEY)
    return None if record is None else record.patch


def kv_dtype(module: nn.Module) -> torch.dtype | None:
    """Return the dtype of the cache of a patched model, None for the dtype of the model."""
    patch = patch_of(module)
    return None if patch is None else patch.kv


logger = logging.getLogger("ipex.llm")
_told: set[str] = set()
_silent: contextvars.ContextVar[bool] = contextvars.ContextVar("_silent", default=False)

#: Of `DecoderPlan.stock_calls`: without ``position_ids`` the model begins at position 0 in each call, with a cache too
#: (Bamba). Programs do so as well.
RESTARTS = "positions restart"

#: Why no program runs where `Surroundings` have changed.
CHANGED = "a module in it has other hooks, or was exchanged"

#: Arguments that say nothing about what is computed here.
_IGNORED = frozenset(
    {
        "cache_position",
        "last_cache_position",
        "return_dict",
        "use_cache",
        "logits_to_keep",
        "num_logits_to_keep",
    }
)
#: Arguments that are understood.
_KNOWN = frozenset(
    {
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache",
        "state",
        "output_hidden_states",
    }
)
#: Arguments that are understood where layers read pictures.
_PICTURES = frozenset({PICTURE, "cross_attention_mask", "full_text_row_masked_out_mask"})
#: Arguments of older versions that ask for something only if they are True.
_FLAGS = ("output_attentions", "output_router_logits")


def given_cache(kwargs: dict[str, Any]) -> Any:
    """Return the cache among arguments: ``cache``, earlier ``past_key_values``, or ``state`` (RWKV)."""
    names = ("cache", "past_key_values", "state")
    return next((one for name in names if (one := kwargs.get(name)) is not None), None)


class Reason(Exception):
    """Why the programs cannot run a call."""


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Let `tell` say nothing: what small copies do is no news."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)


def tell(text: str) -> None:
    """Log a message once per process, at level INFO; not within `silence`."""
    if text not in _told and not _silent.get():
        _told.add(text)
        logger.info("%s", text)


@functools.cache
def _output_class() -> Any:
    """Return the class of what a decoder returns; it has all fields that models on top of one may ask for."""
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.utils.generic import ModelOutput

    # From transformers 5.24 on the cache is called so.
    stock = {field.name for field in dataclasses.fields(BaseModelOutputWithPast)}
    cache = "cache" if "cache" in stock else "past_key_values"
    others = (
        "hidden_states",
        "attentions",
        "cross_attentions",
        "router_logits",
        "shared_kv_states",
        "state",
    )
    return dataclasses.make_dataclass(
        "IpexDecoderOutput",
        [(name, Any, None) for name in ("last_hidden_state", cache, *others)],
        bases=(ModelOutput,),
        namespace={"__module__": __name__},
    )


def _option(decoder: nn.Module, kwargs: dict[str, Any], name: str, default: bool) -> bool:
    """Return an argument, or what the configuration says where it is not given."""
    given = kwargs.get(name)
    if given is None:
        given = getattr(getattr(decoder, "config", None), name, default)
    return bool(given)


def _cache_of(
    decoder: nn.Module, runner: Runner, kwargs: dict[str, Any], batch: int, count: int
) -> tuple[Any, CacheState]:
    """Return the cache to hand out, None if none is wanted, and its state."""
    cache = given_cache(kwargs)
    if cache is None and not _option(decoder, kwargs, "use_cache", True):
        return None, CacheState(runner, batch, count)
    cache, reason = adopt(cache, runner, batch, count + 64, kv_dtype(decoder))
    if reason is not None:
        raise Reason(reason)
    state = state_of_cache(cache)
    assert state is not None
    return cache, state


class DecoderMixin(nn.Module):
    """Forward through programs; put in front of a decoder's class by `subclass`."""

    def __getstate__(self) -> dict[str, Any]:
        return without(self.__dict__, "runner")  # a copy is run by its own forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the decoder."""
        names = self.__dict__[KEY].patch.names
        kwargs.update(zip(names, args, strict=False))
        try:
            runner = usable_runner(self, *kwargs.values())
            return self._run(runner, kwargs)
        except Reason as reason:
            why = str(reason)
            tell(f"{type(self).__name__}: runs its own forward: {why}")
        cache = given_cache(kwargs)
        state = state_of_cache(cache)
        own = self.__dict__[KEY].runner
        indexed = own is not None and own.plan.indexed
        apart = own is not None and (bool(own.plan.pictures) or own.plan.repeated)
        rows = state is not None and any(one is not None and one.own for one in state.cache.layers)
        if state is not None and (state.cache.has_states or indexed or apart or rows):
            # The states of recurrent layers are in a form of their own, which the stock forward does not know. The
            # keys of indexers were not kept. Layers that read pictures or run again count in other caches. Some rows
            # are others.
            lost = indexed and state.length > 0
            stock = original_class(self)
            places = own.plan.places if own is not None and apart else ()
            if lost or not give_up(cache, getattr(self, "config", None), stock, places):
                raise NotImplementedError(
                    f"{type(self).__name__}: a call with a cache must go on as it began, got {why}: pass"
                    " use_cache=False, or begin again without a cache"
                )
            state = None
        mask = kwargs.get("attention_mask")
        if state is not None and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            first = kwargs.get("input_ids")
            first = kwargs.get("inputs_embeds") if first is None else first
            assert first is not None
            state.next_valid = mask[:, -first.shape[1] :].bool().cpu()
        return super().forward(**kwargs)

    def _run(self, runner: Runner, kwargs: dict[str, Any]) -> Any:
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        self._check(runner, kwargs)
        if not self.__dict__[KEY].patch.reads_places(runner):
            kwargs = {**kwargs, "attention_mask": None, "position_ids": None}
        if runner.device.type != "cpu":  # where tokens stand is decided on the CPU
            for name in ("attention_mask", "position_ids"):
                if isinstance(kwargs.get(name), Tensor):
                    kwargs = {**kwargs, name: kwargs[name].cpu()}
        first = ids if embeds is None else embeds
        assert first is not None
        batch, count = first.shape[:2]
        cached = given_cache(kwargs) is not None or _option(self, kwargs, "use_cache", True)
        if runner.plan.indexed and cached and state_of_cache(given_cache(kwargs)) is None:
            raise Reason("a cache has the keys of its indexers, too")
        cache, state = _cache_of(self, runner, kwargs, batch, count)
        if 0 < runner.plan.attention_chunk < state.length + count:
            raise Reason(f"it is longer than a chunk of attention, {runner.plan.attention_chunk}")
        new = self._new_tokens(state, kwargs.get("attention_mask"), batch, count)
        positions = self._positions(state, kwargs, batch, count)
        if runner.plan.stock_calls:
            check_call(runner.plan.stock_calls, kwargs, state.length, count, new is not None)
        if new is not None:
            positions = positions.expand(batch, count)[new]
            first = first[new.to(first.device)]
        else:
            positions = positions.expand(batch, count).reshape(-1)
            first = first.reshape(batch * count, *first.shape[2:])
        if positions.numel() and runner.plan.position_embedding is not None:
            limit = runner.plan.max_positions
            beyond = int(positions.max()) >= limit
            if beyond and "weights" in runner.plan.position_embedding._buffers:
                raise Reason(f"its table of {limit} positions has to grow")
            if beyond:
                raise IndexError(
                    f"{type(self).__name__}: position_ids must be below {limit}, the number of position embeddings,"
                    f" got {int(positions.max())}"
                )
        if embeds is None:
            hidden = runner.embed(first, positions)
        else:
            hidden = runner.place(first.to(runner.dtype), positions)
        look = self._look(runner, state, kwargs, batch, count, new)
        step = state.append(batch, count, new)
        states: list[Tensor] | None = [] if self._wants_states(kwargs) else None
        if hidden.shape[0]:
            more: Any = {
                "tokens": first if embeds is None else None,
                "states": states,
                "look": look,
            }
            rows = runner.run(state.cache, hidden, positions, step, **more)
        else:
            rows = hidden[:, : runner.plan.hidden_size]

        def placed(rows: Tensor) -> Tensor:
            if new is None:
                return rows.view(batch, count, -1)
            out = rows.new_zeros(batch, count, rows.shape[-1])
            out[new.to(rows.device)] = rows
            return out

        out = placed(rows)
        every = None if states is None else (*map(placed, states[:-1]), out)
        if kwargs.get("return_dict") is False:
            return tuple(one for one in (out, cache, every) if one is not None)
        kind = _output_class()
        result = kind(last_hidden_state=out, hidden_states=every)
        if cache is not None:
            own = "cache" if "cache" in kind.__dataclass_fields__ else "past_key_values"
            result["state" if "state" in self.__dict__[KEY].patch.names else own] = cache
        return result

    def _look(
        self,
        runner: Runner,
        state: CacheState,
        kwargs: dict[str, Any],
        batch: int,
        count: int,
        new: Tensor | None,
    ) -> Look | None:
        """Return what the tokens of a call see of pictures, None without any."""
        given, mask = kwargs.get(PICTURE), kwargs.get("cross_attention_mask")
        seen = kwargs.get("full_text_row_masked_out_mask")
        if given is None and not state.pictures:
            return None
        if self._wants_states(kwargs):
            raise Reason("output_hidden_states of a text with a picture")
        if mask is None and count > 1:
            raise Reason(f"{PICTURE} without cross_attention_mask")
        if given is not None and given.numel() % batch:
            raise Reason(f"{PICTURE} of shape {list(given.shape)}")
        if given is not None:
            state.see(runner.pictures(given.reshape(batch, -1, given.shape[-1])))
        rows = state.pictures
        if mask is None:
            mask = rows[0].new_zeros(1, 1, 1, rows[0].shape[2])
        every = torch.arange(batch * count)
        back = every if new is None else every[new.flatten()]
        places = every if new is None else (new.flatten().cumsum(0) - 1).clamp_min(0)
        if seen is None:
            seen = rows[0].new_ones(1, 1)
        else:
            seen = seen[:, 0].expand(batch, count, 1).reshape(-1, 1)[back].to(runner.dtype)
        return Look(rows, mask.to(runner.dtype), seen, count, places, back)

    def _wants_states(self, kwargs: dict[str, Any]) -> bool:
        return _option(self, kwargs, "output_hidden_states", False)

    def _check(self, runner: Runner, kwargs: dict[str, Any]) -> None:
        ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
        if (ids is None) == (embeds is None):
            raise Reason("exactly one of input_ids and inputs_embeds is needed")
        first = ids if embeds is None else embeds
        assert first is not None
        if first.numel() == 0 or first.dim() != (2 if embeds is None else 3):
            raise Reason("the input is empty or of another shape")
        plan = runner.plan
        if embeds is not None and (plan.token_rows is not None or plan.ngrams or plan.tables):
            raise Reason("inputs_embeds of a model whose layers read the tokens")
        if embeds is not None and runner.plan.embedding_scale != 1.0:
            raise Reason("inputs_embeds of a model that scales its embeddings")
        if first.device != runner.device:
            raise Reason(f"the input is on {first.device}")
        if self._wants_states(kwargs):
            plan = runner.plan
            cut = any(
                layer.residual_after_norm
                or layer.streams
                or layer.size is not None
                or layer.shortcut
                or layer.restart
                or isinstance(layer.attention, ShiftPlan)
                for layer in plan.layers
            )
            if cut or plan.output_projection is not None:
                raise Reason(
                    "output_hidden_states of layers that end in a norm, come in pairs, have several streams, or"
                    " another width"
                )
        for name, value in kwargs.items():
            if name in _KNOWN or name in _IGNORED or value is None or value is False:
                continue
            if name in _PICTURES and runner.plan.pictures:
                continue
            raise Reason(f"argument {name}")
        config = getattr(self, "config", None)
        for name in _FLAGS:
            if kwargs.get(name) is None and getattr(config, name, False):
                raise Reason(f"config.{name}")

    def _new_tokens(self, state: CacheState, mask: Any, batch: int, count: int) -> Tensor | None:
        """Return which of the new places are tokens, or None for all."""
        past = state.length
        if mask is None:
            if state.valid is not None:
                raise Reason("the attention mask of earlier calls is missing")
            return None
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            raise Reason("the attention mask is not 2-D")
        if mask.shape[0] != batch or mask.shape[1] not in (past + count, count):
            raise Reason(f"the attention mask has shape {list(mask.shape)}")
        if state.valid is None and bool(mask.all()):
            return None
        known = mask.bool()
        before = state.valid
        if mask.shape[1] == past + count and past:
            same = known[:, :past].all() if before is None else torch.equal(known[:, :past], before)
            if not same:
                raise Reason("the attention mask of earlier tokens has changed")
        new = known[:, -count:].contiguous()
        if before is None:
            before = known.new_ones(batch, past)
        check_gaps(self.__dict__[KEY].runner, torch.cat([before, new], dim=1), count)
        return new

    def _positions(
        self, state: CacheState, kwargs: dict[str, Any], batch: int, count: int
    ) -> Tensor:
        given, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        if given is not None:
            if given.dim() != 2 or given.shape[1] != count or given.shape[0] not in (1, batch):
                raise Reason(f"position_ids of shape {list(given.shape)}")
            # One comparison of a prompt; steps of one token need none.
            if count > 1 and mask is None and not bool((given.diff(dim=1) == 1).all()):
                raise Reason("position_ids start again within a row, as in packed texts")
            return given.to(torch.int64)
        past = state.length
        if RESTARTS in self.__dict__[KEY].runner.plan.stock_calls:
            past = 0
        if (
            mask is not None
            and self.__dict__[KEY].runner.plan.position_offset
            and mask.shape[1] >= past + count
        ):
            # OPT counts the tokens that the mask lets through.
            places = (mask.long().cumsum(1) * mask.long()).long() - 1
            return places[:, -count:].clamp_min(0)
        return torch.arange(past, past + count).unsqueeze(0)


def check_call(
    stock_calls: frozenset[str], kwargs: dict[str, Any], past: int, count: int, padded: bool
) -> None:
    """Raise for a call that programs are not proven for.

    Args:
        stock_calls: Of the plan.
        kwargs: Arguments of the call.
        past: Number of tokens in the cache.
        count: Number of new ones.
        padded: Whether the mask hides any.

    Raises:
        Reason: What is not proven.
    """
    given = kwargs.get("position_ids")
    kind = "padding" if given is not None else "padding without position_ids"
    if padded and (kind in stock_calls or "padding" in stock_calls):
        raise Reason(f"not proven: {kind}")
    if given is None or padded or "position_ids" not in stock_calls:
        return
    if not bool((given == torch.arange(past, past + count)).all()):
        raise Reason("not proven: position_ids that do not follow those in the cache")


def check_gaps(runner: Runner, valid: Tensor, count: int) -> None:
    """Raise if hidden places between tokens count: programs leave them out; windows, ALiBi and states count them.

    Args:
        runner: Runs the decoder.
        valid: bool or int ``[batch, places]``, which of them are tokens.
        count: How many of the places are new.

    Raises:
        Reason: Why the programs would compute something else.
    """
    every = runner.plan.attentions
    states = runner.plan.has_states
    if not states and all(one.window < 0 and one.alibi_slopes is None for one in every):
        return
    valid = valid.bool()
    if states and count == 1 and not bool(valid[:, -1].all()):
        raise Reason("the attention mask hides a single token, which recurrent layers count")
    gaps = ~valid & valid.cummax(1).values
    if not states:  # which also go on through padding at the end
        gaps &= valid.flip(1).cummax(1).values.flip(1)
    if bool(gaps.any()):
        counts = "recurrent layers" if states else "windows and ALiBi"
        raise Reason(f"the attention mask has gaps, which {counts} count")


def check_inference(module: nn.Module, *inputs: Any) -> None:
    """Raise if a program may not stand in for the forward of a module now.

    Args:
        module: The module.
        inputs: Arguments of its forward.

    Raises:
        Reason: Why not.
    """
    if module.training:
        raise Reason("the model is in training mode")
    every = (*module.parameters(), *inputs) if torch.is_grad_enabled() else ()
    if any(getattr(one, "requires_grad", False) for one in every):
        raise Reason("gradients are on: call it under torch.no_grad() or torch.inference_mode()")
    if torch._C._get_tracing_state() is not None or torch.compiler.is_compiling():
        raise Reason("the call is traced")


def decoder_of(model: Any) -> Any:
    """Return the decoder of a patched model."""
    runner = model.__dict__[KEY].runner
    return model.get_decoder() if runner is None else runner.plan.decoder


def usable_runner(module: Any, *inputs: Any) -> Any:
    """Return the runner of a decoder, layer or encoder-decoder if it may run now.

    Raises:
        Reason: Why not.
    """
    runner = module.__dict__[KEY].runner
    if runner is None:
        runner = _revive(module)
    check_inference(module, *inputs)
    if runner.surroundings.changed():
        raise Reason(CHANGED)
    if not runner.fresh():
        runner = _revive(module)
    return runner


def _revive(module: Any) -> Any:
    """Pack again: the parameters are others than those that were packed, or this is a copy."""
    patch = patch_of(module)
    runner = None if patch is None else patch.rebuild(module)
    if runner is None:
        raise Reason("its parameters have changed in a way that programs cannot follow")
    return runner

# SPDX-License-Identifier: Apache-2.0
"""Generation loops that replace those in transformers in ``model.generate``.

``generate`` prepares everything as ever: generation config, processors of logits, stopping criteria, streamer. Only the
loop itself is exchanged, and only where it can honor all of that; otherwise the loop of transformers runs on our
forward, which is told once.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from ipex_llm.arch.seeded import seeded
from ipex_llm.generation._beam import BeamLoop
from ipex_llm.generation._loop import Loop, choose
from ipex_llm.kv_cache.transformers import BLOCK, adopt, is_filled, state_of_cache
from ipex_llm.model_runner import Runner
from ipex_llm.patch.decoder import (
    Reason,
    check_gaps,
    decoder_of,
    given_cache,
    kv_dtype,
    tell,
    usable_runner,
)
from ipex_llm.records import KEY, hooks_of, record_of, without

#: What `generate` may hand to the loop. Anything else is meant for a forward that we do not know.
_KNOWN = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "cache",
        "state",
        "use_cache",
        "cache_position",
        "last_cache_position",
        "logits_to_keep",
        "return_dict",
        "token_type_ids",
    }
)


#: In configurations: tokens that stand for pictures or sound.
_PLACES = frozenset(
    f"{kind}_token_{name}" for kind in ("image", "video", "audio") for name in ("id", "index")
)


class GenerationMixin(nn.Module):
    """Loops; put in front of a model's class by `subclass`."""

    config: Any

    def __getstate__(self) -> dict[str, Any]:
        return without(self.__dict__, "runner")

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        # What models with windows ask for by themselves in transformers 4: a cache of a fixed size.
        hybrid = getattr(generation_config, "cache_implementation", None) == "hybrid"
        outputs = ("output_attentions", "output_hidden_states")  # for which their own forward runs
        if hybrid and not any(getattr(generation_config, name, False) for name in outputs):
            from transformers import DynamicCache

            if model_kwargs.get("past_key_values") is None:
                model_kwargs["past_key_values"] = DynamicCache()
                return None
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, *args, **kwargs
        )

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        try:
            loop = start(self, input_ids, generation_config, synced_gpus, model_kwargs)
        except Reason as reason:
            tell(f"{type(self).__name__}.generate: the loop of transformers runs: {reason}")
            return super()._sample(  # type: ignore[misc]
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                streamer=streamer,
                **model_kwargs,
            )
        loop.choice = choose(generation_config, logits_processor)
        return loop.run(stopping_criteria, streamer)

    def _beam_search(
        self,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        try:
            beams = int(generation_config.num_beams)
            if beams < 1:
                raise ValueError(f"generate: num_beams must be positive, got {beams}")
            loop = start(self, input_ids, generation_config, synced_gpus, model_kwargs, beams)
        except Reason as reason:
            tell(f"{type(self).__name__}.generate: the loop of transformers runs: {reason}")
            return super()._beam_search(  # type: ignore[misc]
                input_ids,
                logits_processor=logits_processor,
                stopping_criteria=stopping_criteria,
                generation_config=generation_config,
                synced_gpus=synced_gpus,
                **model_kwargs,
            )
        return loop.search(logits_processor, stopping_criteria)


class SameRandomMixin(nn.Module):
    """``generate`` of a model that several ranks have parts of: all draw the random numbers of rank 0.

    The numbers come from a generator with a seed that rank 0 draws at the beginning of the call, so that
    `torch.manual_seed` there makes them repeatable. Logits have the same bits on each rank, and with them tokens.
    """

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the one of transformers."""
        parallel = record_of(self).parallel
        if parallel is None:
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        low, high = parallel.from_first(torch.randint(2**24, (2,)).tolist())
        if not _may_sample(self, kwargs):
            return super().generate(*args, **kwargs)  # type: ignore[misc]
        device = next((one.device for one in self.parameters()), "cpu")
        with seeded(low + (high << 24), device):
            return super().generate(*args, **kwargs)  # type: ignore[misc]


def _may_sample(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether a call of ``generate`` may draw random numbers."""
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    sample = kwargs.get("do_sample")
    sample = getattr(config, "do_sample", True) if sample is None else sample
    return bool(sample) or kwargs.get("custom_generate") is not None


class ParallelGenerationMixin(SameRandomMixin, GenerationMixin):
    """Loops for a model that several ranks have parts of."""


def start(
    model: Any,
    input_ids: torch.Tensor,
    config: Any,
    synced_gpus: bool,
    model_kwargs: dict[str, Any],
    beams: int | None = None,
) -> Any:
    """Return our loop for a call of ``generate``.

    Args:
        model: The model.
        input_ids: Prompts, or with beams each prompt as many times.
        config: Generation config.
        synced_gpus: As in transformers.
        model_kwargs: What the forward of the model would get.
        beams: Number of beams, None for a `Loop`.

    Raises:
        Reason: Why it cannot do what is asked for.
    """
    decoder = decoder_of(model)
    runner = usable_runner(decoder)
    head = runner.plan.head
    if head is None:
        raise Reason("the model has no head")
    both = (model, decoder)
    if any((one._forward_hooks or one._forward_pre_hooks) and hooks_of(one) for one in both):
        raise Reason("the model has hooks")
    # The head of a divided model is around the part that its plan names.
    divided = runner.plan.parallel is not None
    if not divided and model.get_output_embeddings() not in (None, *head.modules):
        raise Reason("the head was exchanged")
    if synced_gpus:
        raise Reason("synced_gpus")
    if runner.device.type != "cpu":
        raise Reason(f"the model is on {runner.device}")
    if "generate" in runner.plan.stock_calls:
        raise Reason("not proven: generate")
    _check_options(config, model_kwargs, beams)
    mask = model_kwargs.get("attention_mask")
    mask = mask if decoder.__dict__[KEY].patch.reads_places(runner) else None
    _check_prompt(runner, input_ids, mask)
    places = [v for k, v in vars(model.config).items() if k in _PLACES and isinstance(v, int)]
    if bool(torch.isin(input_ids, torch.tensor(places, dtype=torch.int64)).any()):
        raise Reason(
            "the prompt has places for pictures or sound, which the model embeds in its own way"
        )
    if "padding" in runner.plan.stock_calls and mask is not None and not bool(mask.all()):
        raise Reason("not proven: padding")
    _check_length(runner, config)
    positions = model_kwargs.get("position_ids")
    if beams is not None:
        input_ids = _each(input_ids, beams)
        mask = None if mask is None else _each(mask, beams)
        if positions is not None and positions.shape[0] != 1:
            positions = _each(positions, beams)
    batch, count = input_ids.shape
    room = (config.max_length or count + 64) + 1
    if beams is None:
        room = min(room, count + 4096)
    else:  # of each beam what is new, and a block that it shares no more
        room = count + beams * (min(room - count, 4096) + 2 * BLOCK)
    past = given_cache(model_kwargs)
    if past is not None and is_filled(past):
        raise Reason("there is a past")
    known = state_of_cache(past)
    if known is not None and len(known.sequences) != batch:
        raise Reason("the cache is of another batch")
    cache, reason = adopt(past, runner, batch, room, kv_dtype(model))
    if reason is not None:
        raise Reason(reason)
    kind = Loop if beams is None else BeamLoop
    loop = kind(model, runner, cache, input_ids, mask, positions, config)
    # The loop needs a cache; without use_cache (the configs of MPT) it is only not handed out.
    loop.returns_cache = bool(model_kwargs.get("use_cache", True))
    return loop


def _check_options(config: Any, model_kwargs: dict[str, Any], beams: int | None) -> None:
    """Raise `Reason` for what our loops do not have."""
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, False):
            raise Reason(name)
    if beams is not None and (not config.max_length or getattr(config, "low_memory", None)):
        raise Reason("max_length is missing, or low_memory is set")
    if os.environ.get("DISABLE_IPEX_SAMPLE") and config.do_sample:
        raise Reason("DISABLE_IPEX_SAMPLE is set")
    if getattr(config, "is_assistant", False):
        raise Reason("the model assists another")
    for name, value in model_kwargs.items():
        # What encoders of images and sound gave is an empty mapping for text alone.
        if name not in _KNOWN and value is not None and value is not False and value != {}:
            raise Reason(f"argument {name}")


def _check_prompt(runner: Any, input_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Raise `Reason` for prompts and masks that our loops do not take."""
    if input_ids.dim() != 2 or input_ids.shape[1] == 0 or input_ids.dtype != torch.int64:
        raise Reason("the prompt is empty")
    if mask is not None and mask.shape != input_ids.shape:
        raise Reason("the attention mask has another shape than the prompt")
    if mask is not None and not bool(mask.any(1).all()):
        raise Reason("a prompt has no token")
    if mask is not None:
        check_gaps(runner, mask, mask.shape[1])


def _each(rows: torch.Tensor, beams: int) -> torch.Tensor:
    """Return one of the ``beams`` equal rows of each prompt.

    Raises:
        Reason: They are not equal.
    """
    grouped = rows.unflatten(0, (-1, beams))
    if not bool((grouped == grouped[:, :1]).all()):
        raise Reason("the beams of a prompt begin with different tokens")
    return grouped[:, 0].contiguous()


def _check_length(runner: Runner, config: Any) -> None:
    plan = runner.plan
    longest = config.max_length or 0
    if plan.position_embedding is not None and longest > plan.max_positions + 1:
        raise Reason(f"max_length is beyond the {plan.max_positions} positions of the model")
    if plan.attention_chunk and not 0 < longest <= plan.attention_chunk:
        raise Reason(f"max_length is beyond a chunk of attention, {plan.attention_chunk} positions")
    for attention in plan.attentions:
        rope = attention.rope
        if rope is not None and rope.kind in ("longrope", "dynamic"):
            scaling = rope.scaling or {}
            original: Any = (
                scaling.get("original_max_position_embeddings") or rope.max_position_embeddings
            )
            if longest > original:
                raise Reason("rotary frequencies change with the length")

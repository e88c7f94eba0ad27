# SPDX-License-Identifier: Apache-2.0
"""Generation loops behind ``model.generate``, as functions with the arguments of transformers' former methods.

Each can be called with a model or bound to one (``types.MethodType(hf_greedy_search, model)``).
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor

__all__ = ["hf_beam_sample", "hf_beam_search", "hf_greedy_search", "hf_sample"]

#: Arguments of the former methods that are fields of a generation config.
_FIELDS = (
    "max_length",
    "pad_token_id",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
)


def hf_greedy_search(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with the most likely token at each step.

    Args:
        self: Model of transformers.
        input_ids: int64 ``[B, N]``.
        logits_processor: List of processors, or None.
        stopping_criteria: List of criteria, or None.
        kwargs: ``max_length``, ``pad_token_id``, ``eos_token_id``, ``output_scores``, ``return_dict_in_generate``,
            ``streamer``, and what the model's forward takes.

    Returns:
        Token ids ``[B, N + new]`` or an output of transformers, as ``generate`` does.
    """
    return _run(self, input_ids, logits_processor, stopping_criteria, None, kwargs, do_sample=False)


def hf_sample(
    self: Any,
    input_ids: Tensor,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    logits_warper: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with a random token at each step; ``logits_warper`` limits it. Else like `hf_greedy_search`."""
    return _run(
        self, input_ids, logits_processor, stopping_criteria, logits_warper, kwargs, do_sample=True
    )


def hf_beam_search(
    self: Any,
    input_ids: Tensor,
    beam_scorer: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with beams.

    Args:
        self: Model of transformers.
        input_ids: int64 ``[B, N]``, or ``[B * num_beams, N]`` with a ``beam_scorer``, whose rows repeat each prompt.
        beam_scorer: ``BeamSearchScorer`` of older versions of transformers, or None: give ``num_beams``.
        logits_processor: List of processors, or None.
        stopping_criteria: List of criteria, or None.
        kwargs: As in `hf_greedy_search`; also ``num_beams``, ``length_penalty``, ``early_stopping``,
            ``num_return_sequences``.
    """
    ids, kwargs = _beams(input_ids, beam_scorer, kwargs)
    return _run(self, ids, logits_processor, stopping_criteria, None, kwargs, do_sample=False)


def hf_beam_sample(
    self: Any,
    input_ids: Tensor,
    beam_scorer: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    logits_warper: Any = None,
    **kwargs: Any,
) -> Any:
    """Generate with beams that are drawn at random. Else like `hf_beam_search`."""
    ids, kwargs = _beams(input_ids, beam_scorer, kwargs)
    return _run(
        self, ids, logits_processor, stopping_criteria, logits_warper, kwargs, do_sample=True
    )


def _beams(ids: Tensor, scorer: Any, kwargs: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    kwargs = dict(kwargs)
    if scorer is None:
        kwargs.setdefault("num_beams", 4)
        return ids, kwargs
    kwargs["num_beams"] = beams = scorer.num_beams
    for name, field in (
        ("length_penalty", "length_penalty"),
        ("do_early_stopping", "early_stopping"),
        ("num_beam_hyps_to_keep", "num_return_sequences"),
    ):
        if getattr(scorer, name, None) is not None:
            kwargs[field] = getattr(scorer, name)
    for name in ("attention_mask", "position_ids"):
        if isinstance(kwargs.get(name), Tensor):
            kwargs[name] = kwargs[name][::beams]
    return ids[::beams], kwargs


def _run(
    model: Any,
    ids: Tensor,
    processors: Any,
    criteria: Any,
    warpers: Any,
    kwargs: dict[str, Any],
    *,
    do_sample: bool,
) -> Any:
    config = copy.deepcopy(model.generation_config)
    config.do_sample = do_sample
    kwargs = dict(kwargs)
    kwargs.pop("synced_gpus", None)
    for name in (*_FIELDS, "num_beams", "length_penalty", "early_stopping", "num_return_sequences"):
        value = kwargs.pop(name, None)
        if value is not None:
            setattr(config, name, value)
    if do_sample:
        # Only the warpers set limits.
        config.temperature, config.top_k, config.top_p = 1.0, 0, 1.0
    limit = getattr(criteria, "max_length", None)
    if limit is not None:
        config.max_length = limit
    every = [*(processors or []), *(warpers or [])]
    if every:
        from transformers import LogitsProcessorList

        kwargs["logits_processor"] = LogitsProcessorList(every)
    if criteria:
        kwargs["stopping_criteria"] = criteria
    return model.generate(ids, generation_config=config, **kwargs)

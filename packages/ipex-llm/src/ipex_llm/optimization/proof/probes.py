# SPDX-License-Identifier: Apache-2.0
"""The calls of a small model that programs must answer as the stock forward does."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ipex_core.module_swap.base import original_class
from ipex_llm.arch.detect import parameter_names
from ipex_llm.arch.detect.trace import PICTURE, special_tokens
from ipex_llm.patch.decoder import RESTARTS

#: Calls that a forward can notice before it computes: where a probe of one fails, such calls run the stock forward.
CALLS = frozenset({"padding", "padding without position_ids", "position_ids", "generate", RESTARTS})


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """One call, or some that share a cache.

    Attributes:
        name: For readers of `ipex.explain`.
        run: Model -> what is compared.
        call: What kind of call it is, of `CALLS`; empty: one that every model must answer.
        whole: Model -> what is right, too, for models with states: what the whole text gives. Mamba of transformers
            forgets its state at each part of a prompt, and takes no mask that is longer than the part. MiniMax counts
            the tokens of its first layer, which has none.
    """

    name: str
    run: Callable[[Any], list[Tensor]]
    call: str = ""
    whole: Callable[[Any], list[Tensor]] | None = None


def outcome(result: Any) -> Tensor:
    """Return the logits of a model, or its last hidden states, float32."""
    value = getattr(result, "logits", None)
    if value is None:
        value = result.last_hidden_state
    return value.float()  # type: ignore[no-any-return]


def distance(got: list[Tensor], want: list[Tensor]) -> float:
    """Return the largest difference relative to the largest number; infinite for other shapes."""
    if [t.shape for t in got] != [t.shape for t in want]:
        return float("inf")
    size = max((float(t.abs().max()) for t in want if t.numel()), default=0.0)
    errors = [float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if b.numel()]
    worst = max(errors, default=0.0) / max(size, 1e-30)
    return float("inf") if math.isnan(worst) else worst


def _ids(config: Any, rows: int, length: int, seed: int) -> Tensor:
    special = special_tokens(config)
    vocab = int(getattr(config, "vocab_size", 64))
    usable = torch.tensor([i for i in range(vocab) if i not in special] or [0])
    generator = torch.Generator().manual_seed(seed)
    return usable[torch.randint(len(usable), (rows, length), generator=generator)]


def _cache(result: Any) -> Any:
    """Return the cache of a result: ``cache`` from transformers 5.24 on."""
    names = ("cache", "past_key_values", "state")  # the last one in RWKV
    return next((one for name in names if (one := getattr(result, name, None)) is not None), None)


def _with(model: Any, cache: Any) -> dict[str, Any]:
    """Return the argument that hands a cache to a model."""
    names = parameter_names(original_class(model))
    return {next((n for n in ("cache", "state") if n in names), "past_key_values"): cache}


def _cached(model: Any, cache: Any, **given: Any) -> tuple[Any, Any]:
    """Call a model with a cache, or for the first time (None); return its result and the cache."""
    if cache is None:
        result = model(**given, use_cache=True)
        cache = _cache(result)
        if cache is not None:
            return result, cache
        # It returns none, and only takes one (RecurrentGemma).
        from transformers.cache_utils import DynamicCache

        cache = DynamicCache(config=model.config)
    given = {**given, **_with(model, cache)}
    return model(**given, use_cache=True), cache


def _steps(model: Any, ids: Tensor, cuts: list[int], **first: Any) -> list[Tensor]:
    """Return what parts of texts give that share a cache; `first` goes with the first part."""
    found, cache, start = [], None, 0
    for end in cuts:
        given = first if cache is None else {}
        result, cache = _cached(model, cache, input_ids=ids[:, start:end], **given)
        found.append(outcome(result))
        start = end
    return found


def _padded(ids: Tensor, left: bool, pad: int = 4) -> tuple[Tensor, Tensor]:
    mask = torch.ones_like(ids)
    mask[0, slice(0, pad) if left else slice(-pad, None)] = 0
    return ids, mask


def _places(mask: Tensor) -> Tensor:
    return (mask.cumsum(1) - 1).clamp_min(0)


def _plain(model: Any, ids: Tensor) -> list[Tensor]:
    return [outcome(model(input_ids=ids, use_cache=False))]


def _split(model: Any, ids: Tensor, sizes: list[int]) -> list[Tensor]:
    """Return what `_steps` must give, from one call."""
    return list(_plain(model, ids)[0].split(sizes, dim=1))


def _masked(model: Any, ids: Tensor, mask: Tensor, **more: Any) -> list[Tensor]:
    result = outcome(model(input_ids=ids, attention_mask=mask, use_cache=False, **more))
    return [result[mask.bool()]]


def _continued(model: Any, ids: Tensor, mask: Tensor, start: int, positions: bool) -> list[Tensor]:
    """Return what a padded prompt and steps after it give."""
    places = _places(mask)
    found, cache = [], None
    for begin, end in [(0, start), *((i, i + 1) for i in range(start, ids.shape[1]))]:
        more = {"position_ids": places[:, begin:end]} if positions else {}
        given = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], **more}
        result, cache = _cached(model, cache, **given)
        found.append(outcome(result)[mask[:, begin:end].bool()])
    return found


def _at_once(model: Any, ids: Tensor, mask: Tensor, start: int) -> list[Tensor]:
    """Return what `_continued` must give, from one call."""
    result = outcome(
        model(input_ids=ids, attention_mask=mask, position_ids=_places(mask), use_cache=False)
    )
    cuts = [(0, start), *((i, i + 1) for i in range(start, ids.shape[1]))]
    return [result[:, begin:end][mask[:, begin:end].bool()] for begin, end in cuts]


def _generated(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    made = model.generate(
        ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    return [made.float()]


def _chosen(model: Any, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """Return what `_generated` must give, from calls without a cache."""
    for _ in range(5):
        result = outcome(
            model(input_ids=ids, attention_mask=mask, position_ids=_places(mask), use_cache=False)
        )
        ids = torch.cat([ids, result[:, -1:].argmax(-1)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
    return [ids.float()]


def _seeing(
    model: Any, ids: Tensor, cuts: list[int], mask: Tensor, rows: Tensor, **more: Any
) -> list[Tensor]:
    """Return what parts of texts give that share a cache, the first of which brings pictures.

    Args:
        model: The decoder.
        ids: The texts ``[B, T]``.
        cuts: Where parts end.
        mask: int ``[B, T, S]``, which rows of the pictures are seen.
        rows: Of the pictures, ``[B, S, hidden]``.
        **more: Arguments ``[B, T]`` of each part.
    """
    found, cache, start = [], None, 0
    hidden = torch.zeros(mask.shape).masked_fill(mask == 0, torch.finfo(torch.float32).min)
    seen = mask.any(-1, keepdim=True).float()
    hidden = hidden * seen
    for end in cuts:
        given = {name: value[:, start:end] for name, value in more.items()}
        if "attention_mask" in more:
            given["attention_mask"] = more["attention_mask"][:, :end]
        if cache is None:
            given[PICTURE] = rows
        result, cache = _cached(
            *(model, cache),
            input_ids=ids[:, start:end],
            cross_attention_mask=hidden[:, None, start:end],
            full_text_row_masked_out_mask=seen[:, None, start:end],
            **given,
        )
        valid = given.get("attention_mask")
        out = outcome(result)
        found.append(out if valid is None else out[valid[:, start:end].bool()])
        start = end
    return found


def _picture_probes(config: Any, length: int) -> Iterator[Probe]:
    """Yield the probes of a decoder whose layers read pictures."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 9, int(config.hidden_size), generator=generator)
    ids, mask = _ids(config, 2, length, 0), torch.ones(2, length, 9, dtype=torch.int64)
    mask[0, :2] = 0  # tokens before the picture
    mask[:, :-3, 5:] = 0
    cuts = [length - 3, *range(length - 2, length + 1)]
    yield Probe("a picture", partial(_seeing, ids=ids, cuts=[length], mask=mask, rows=rows))
    one = partial(_seeing, ids=ids, cuts=cuts, mask=mask, rows=rows)
    yield Probe("a picture, token by token", one)
    valid = _padded(ids, True)[1]
    more = {"attention_mask": valid, "position_ids": _places(valid)}
    yield Probe("a picture and padding, token by token", partial(one, **more), "padding")


def probes(
    config: Any, reach: int, positions: int, seeds: int, loop: bool, pictures: bool = False
) -> Iterator[Probe]:
    """Yield the probes of a small model.

    Args:
        config: Its configuration.
        reach: How many tokens it takes to be beyond all that begins at a distance.
        positions: The most positions that it has.
        seeds: How many texts to read: enough of them for each expert to be taken.
        loop: Whether ``generate`` runs a loop of ours.
        pictures: Whether layers read pictures.
    """
    length = max(2, min(reach, positions))
    ids = _ids(config, 2, length, 0)
    for seed in range(seeds):
        text = _ids(config, 2, length, seed)
        name = f"{length} tokens" if not seed else f"{length} tokens, text {seed}"
        yield Probe(name, partial(_plain, ids=text))
    yield Probe("one token", lambda m: [outcome(m(input_ids=ids[:, :1], use_cache=False))])
    half = max(1, length // 4)
    single = [half, *range(half + 1, length + 1)]
    chunks = sorted({half, min(2 * half + 1, length), length - 1, length})
    for name, cuts in (("a cache, token by token", single), ("a prompt in chunks", chunks)):
        sizes = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
        yield Probe(
            name,
            partial(_steps, ids=ids, cuts=cuts),
            RESTARTS,
            partial(_split, ids=ids, sizes=sizes),
        )
    if length < 8:
        return
    if pictures:
        yield from _picture_probes(config, length)
    ones = torch.ones_like(ids)
    yield Probe("a mask that hides nothing", lambda m: _masked(m, ids, ones))
    for left in (True, False):
        side = "left" if left else "right"
        _, mask = _padded(ids, left)
        yield Probe(
            f"padding on the {side}",
            partial(_masked, ids=ids, mask=mask),
            "padding without position_ids",
        )
        yield Probe(
            f"padding on the {side} with position_ids",
            partial(_masked, ids=ids, mask=mask, position_ids=_places(mask)),
            "padding",
        )
    _, mask = _padded(ids, True)
    yield Probe(
        "padding on the left with position_ids, token by token",
        lambda m: _continued(m, ids, mask, length - 3, True),
        "padding",
        lambda m: _at_once(m, ids, mask, length - 3),
    )
    yield Probe(
        "padding on the left, token by token",
        lambda m: _continued(m, ids, mask, length - 3, False),
        "padding without position_ids",
        lambda m: _at_once(m, ids, mask, length - 3),
    )
    shifted = (torch.arange(length - 3) + 3).unsqueeze(0)
    yield Probe(
        "position_ids from 3 on",
        lambda m: [outcome(m(input_ids=ids[:, :-3], position_ids=shifted, use_cache=False))],
        "position_ids",
    )
    own = torch.arange(length).unsqueeze(0).expand(2, -1)
    yield Probe(
        "position_ids from 0 on",
        lambda m: _steps(m, ids, [length], position_ids=own),
        "position_ids",
    )
    packed = torch.cat([torch.arange(length // 2), torch.arange(length - length // 2)]).unsqueeze(0)
    yield Probe(
        "packed texts",
        lambda m: [outcome(m(input_ids=ids[:1], position_ids=packed, use_cache=False))],
        "position_ids",
    )
    yield Probe(
        "packed texts and a cache",
        lambda m: _steps(m, ids, [length], position_ids=packed.expand(2, -1)),
        "position_ids",
    )
    if loop:
        yield Probe(
            "generate",
            lambda m: _generated(m, ids[:, :6], mask[:, :6]),
            "generate",
            lambda m: _chosen(m, ids[:, :6], mask[:, :6]),
        )

# SPDX-License-Identifier: Apache-2.0
"""Calls of a causal language model with random lengths, masks, positions and cuts; a seed makes one call."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import torch

__all__ = ["FAMILIES", "Pattern", "difference", "pattern"]

Tensor = torch.Tensor

#: Families of families.py that random calls are made of: one of each structure. Ten of them or more reach each depth.
FAMILIES = (
    *("llama", "mistral", "gemma3", "gpt2", "opt", "falcon_alibi", "qwen3_moe"),
    *("phi3_longrope", "deepseek_v3", "gpt_oss", "jamba", "phi", "gemma2"),
)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """One call, or several that share a cache.

    Attributes:
        ids: int64 ``[B, T]``.
        mask: int64 ``[B, T]``, or None.
        positions: int64 ``[B or 1, T]``, or None.
        cuts: Ends of the parts that are read one after the other; one part: no cache.
        text: What it is.
    """

    ids: Tensor
    mask: Tensor | None
    positions: Tensor | None
    cuts: tuple[int, ...]
    text: str


def _mask(kind: str, batch: int, length: int, rng: random.Random) -> Tensor | None:
    if kind == "none":
        return None
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row in range(batch):
        pad = rng.randrange(length // 2 + 1)
        if kind in ("left", "both"):
            mask[row, :pad] = 0
        if kind in ("right", "both") and pad:
            mask[row, -min(pad, length // 4 + 1) :] = 0
        if kind == "holes":
            for _ in range(3):
                mask[row, rng.randrange(length)] = 0
        if not mask[row].any():
            mask[row, length // 2] = 1
    return mask


def _positions(kind: str, mask: Tensor | None, length: int, rng: random.Random) -> Tensor | None:
    places = torch.arange(length).unsqueeze(0)
    if kind == "none":
        return None
    if kind == "shifted":
        return places + rng.randrange(1, 9)
    if kind == "packed":
        cut = rng.randrange(1, length) if length > 1 else 0
        return torch.cat([places[:, :cut], places[:, : length - cut]], 1)
    if kind == "counted" and mask is not None:
        return (mask.cumsum(1) - 1).clamp_min(0)
    return places


def pattern(seed: int, vocab: int, longest: int = 48) -> Pattern:
    """Return the call of a seed.

    Args:
        seed: Any number.
        vocab: Tokens are from 3 to below this.
        longest: Most tokens of a text.
    """
    rng = random.Random(seed)
    batch, length = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5, *range(7, longest + 1)))
    kind = rng.choice(("none", "none", "ones", "left", "left", "right", "both", "holes"))
    places = rng.choice(("none", "none", "plain", "shifted", "packed", "counted", "counted"))
    ids = torch.tensor([[rng.randrange(3, vocab) for _ in range(length)] for _ in range(batch)])
    mask = _mask(kind, batch, length, rng)
    positions = _positions(places, mask, length, rng)
    cuts = {length}
    if rng.random() < 0.5:
        cuts |= {rng.randrange(1, length + 1) for _ in range(rng.choice((1, 2, 4)))}
    text = f"seed {seed}: {batch}x{length}, mask {kind}, position_ids {places}, cuts {sorted(cuts)}"
    return Pattern(ids, mask, positions, tuple(sorted(cuts)), text)


def _parts(model: Any, call: Pattern) -> list[Tensor]:
    found, cache, start, name = [], None, 0, ""
    for end in call.cuts:
        given: dict[str, Any] = {
            "input_ids": call.ids[:, start:end],
            "use_cache": len(call.cuts) > 1,
        }
        if call.mask is not None:
            given["attention_mask"] = call.mask[:, :end]
        if call.positions is not None:
            given["position_ids"] = call.positions[:, start:end]
        if cache is not None:
            given[name] = cache
        result = model(**given)
        name = "cache" if "cache" in result else "past_key_values"  # xLSTM ignores the latter
        cache = getattr(result, name) if len(call.cuts) > 1 else None
        logits = result.logits
        if call.mask is not None:
            logits = logits[call.mask[:, start:end].bool()]
        found.append(logits)
        start = end
    return found


@torch.no_grad()
def sensitivity(model: Any, call: Pattern, draws: int = 4) -> float:
    """Return how far the logits of a model move when its weights move by their last bit; see `difference`."""
    worst = 0.0
    for seed in range(draws):
        moved = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(seed)
        for parameter in moved.parameters():
            if parameter.is_floating_point():
                steps = torch.randint(-1, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + steps * torch.finfo(parameter.dtype).eps / 2)
        worst = max(worst, difference(moved, model, call))
    return worst


def _forgets(model: Any) -> bool:
    """Return whether the stock model starts from zeros at each part of a text (Mamba)."""
    rates = (getattr(module, "A_log", None) for module in model.modules())
    return any(isinstance(one, Tensor) and one.ndim == 2 for one in rates)


def _at_once(model: Any, call: Pattern) -> list[Tensor]:
    """Return what `_parts` would give if nothing were forgotten."""
    whole = dataclasses.replace(call, cuts=call.cuts[-1:], mask=None)
    (logits,) = _parts(model, whole) if call.mask is None else _masked(model, call)
    edges = zip((0, *call.cuts), call.cuts, strict=False)
    parts = [(logits[:, a:b], None if call.mask is None else call.mask[:, a:b]) for a, b in edges]
    return [part if mask is None else part[mask.bool()] for part, mask in parts]


def _masked(model: Any, call: Pattern) -> tuple[Tensor]:
    given = {} if call.positions is None else {"position_ids": call.positions}
    result = model(input_ids=call.ids, attention_mask=call.mask, use_cache=False, **given)
    return (result.logits,)


@torch.no_grad()
def difference(fast: Any, model: Any, call: Pattern) -> float:
    """Return the largest difference of logits of tokens, relative to the largest; 0 where the stock model raises."""
    try:
        want = _parts(model, call)
        other = None
        if len(call.cuts) > 1 and _forgets(model):
            if call.positions is not None and "plain" not in call.text:
                return 0.0  # parts that the stock forward answers, which forgets what was before
            other = _at_once(model, call)
    except Exception:  # not a call of this model
        return 0.0
    worst = _worst(fast, call, want)
    return worst if other is None else min(worst, _worst(fast, call, other))


def _worst(fast: Any, call: Pattern, want: list[Tensor]) -> float:
    worst = 0.0
    size = max(float(t.abs().max()) for t in want if t.numel())
    for a, b in zip(_parts(fast, call), want, strict=True):
        if b.numel():
            worst = max(worst, float((a - b).abs().max().nan_to_num(nan=torch.inf)) / size)
    return worst

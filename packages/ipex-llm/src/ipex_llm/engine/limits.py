# SPDX-License-Identifier: Apache-2.0
"""Checks before any work: the model, sizes, memory, prompts; and the tokens that end an output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ipex_core.errors import StaleWeightsError
from ipex_llm.kv_cache import CacheMemoryError, available_memory, format_bytes
from ipex_llm.patch.decoder import Reason, decoder_of, usable_runner
from ipex_llm.records import record_of

#: Share of the free memory that the cache takes if nothing else is said.
DEFAULT_MEMORY_SHARE = 0.5


def check_positive(name: str, value: object) -> None:
    """Raise a ValueError unless the argument of the engine is a positive integer."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"Engine: {name} must be a positive integer, got {value}")


def check_snapshots(value: object) -> None:
    """Raise a ValueError unless the argument of the engine is None or an integer from 0 on."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(
            f"Engine: max_state_snapshots must be None or an integer from 0 on, got {value!r}"
        )


def cache_blocks(
    one: int,
    num_blocks: int | None,
    cache_bytes: int | None,
    most: int,
    share: float = DEFAULT_MEMORY_SHARE,
    states: int = 0,
    device: torch.device | None = None,
) -> int:
    """Return the number of blocks of the cache, after a look at the memory that there is.

    Args:
        one: Bytes of a block.
        num_blocks: What was asked for, or None.
        cache_bytes: A budget, or None.
        most: Blocks that could ever be used.
        share: Part of the free memory, where nothing was asked for.
        states: Bytes of the states of recurrent layers, which come besides.
        device: Where the cache is; None: on the CPU.

    Raises:
        CacheMemoryError: They do not fit the free memory, or the budget holds none.
    """
    free = available_memory(device)
    if num_blocks is None:
        budget = cache_bytes
        if budget is None:
            budget = int(share * free) - states if free is not None else most * one
        else:
            budget -= states
        num_blocks = budget // one if one else most
        if cache_bytes is None:
            num_blocks = min(num_blocks, most)
        if num_blocks <= 0:
            source = "from the free memory" if cache_bytes is None else "as cache_bytes"
            raise CacheMemoryError(
                f"Engine: the cache must have at least one block of {format_bytes(one)}, got"
                f" {format_bytes(budget)} {source}"
            )
    if free is not None and num_blocks * one + states > free:
        more = f" and states of {format_bytes(states)}" if states else ""
        raise CacheMemoryError(
            f"Engine: the cache must fit the free memory of {format_bytes(free)}, got {num_blocks} blocks of"
            f" {format_bytes(one)}{more}, {format_bytes(num_blocks * one + states)}"
        )
    return num_blocks


def snapshot_rows(
    wanted: int | None, most: int, size: int, device: torch.device | None = None
) -> int:
    """Return how many states of prefixes to keep.

    Args:
        wanted: What was asked for, or None.
        most: Otherwise at most.
        size: Bytes of one.
        device: Where they are; None: on the CPU.
    """
    if wanted is not None:
        return wanted
    free = available_memory(device)
    return most if free is None else min(most, free // 8 // size)


def prompt_ids(prompt: str | Sequence[int] | torch.Tensor, tokenizer: Any) -> list[int]:
    """Return the token ids of a prompt.

    Raises:
        TypeError: It is no prompt, or text without a tokenizer.
    """
    where = "Engine.add_request"
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"{where}: prompt must be token ids without a tokenizer, got text")
        return [int(token) for token in tokenizer.encode(prompt)]
    if isinstance(prompt, torch.Tensor):
        one = prompt.dim() == 1 or (prompt.dim() == 2 and prompt.shape[0] == 1)
        if prompt.dtype not in (torch.int64, torch.int32) or not one:
            got = f"{prompt.dtype} {list(prompt.shape)}"
            raise TypeError(f"{where}: prompt must be integers [T] or [1, T], got {got}")
        return [int(token) for token in prompt.flatten().tolist()]
    tokens = list(prompt) if isinstance(prompt, Iterable) else [None]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        got = type(prompt).__name__
        raise TypeError(f"{where}: prompt must be text or a list of integers, got {got}")
    return tokens


def check_prompt(tokens: Sequence[int], max_model_len: int, vocab_size: int, room: int = 1) -> None:
    """Raise a ValueError unless these are the ids of a prompt that leaves room for so many tokens."""
    where = "Engine.add_request"
    if not tokens:
        raise ValueError(f"{where}: prompt must have at least one token, got none")
    if len(tokens) + room > max_model_len:
        raise ValueError(
            f"{where}: prompt must have fewer than {max_model_len - room + 1} tokens, the context of this engine, got"
            f" {len(tokens)}"
        )
    wrong = [token for token in tokens if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{where}: prompt must have ids in [0, {vocab_size}), got {wrong[0]}")


_RUNNER = ("forward", "new_cache", "cache_bytes", "plan", "vocab_size")


def runner_of(model: Any, where: str = "Engine") -> Any:
    """Return the runner of an optimized model with the weights it has now, or the runner itself.

    Raises:
        TypeError: The model has none.
    """
    known, why = record_of(model), ""
    found = model if known.runner is None else known.runner
    decoder = None if known.patch is None else decoder_of(model)
    if record_of(decoder).patch is not None:
        try:
            with torch.no_grad():
                found = usable_runner(decoder)
        except Reason as reason:
            found, why = None, f": {reason}"
    if not all(hasattr(found, name) for name in _RUNNER):
        raise TypeError(
            f"{where}: model must be one that ipex.llm.optimize runs as a whole (see ipex.explain(model)), got"
            f" {type(model).__name__}{why}"
        )
    return found


class Origin:
    """The module that a runner belongs to, to notice when it changes; none for a runner that stands alone."""

    def __init__(self, model: Any, runner: Any) -> None:
        homes = (model,) if record_of(model).patch is None else (model, decoder_of(model))
        self._home = next((home for home in homes if record_of(home).runner is runner), None)
        self._runner = runner

    def check(self) -> None:
        """Raise a StaleWeightsError if weights or modules are no longer those that the runner was made from."""
        home, runner = self._home, self._runner
        if home is None:
            return
        same = record_of(home).runner is runner and runner.fresh()
        if not same or runner.surroundings.changed():
            raise StaleWeightsError(
                "Engine: the weights of the model must be as they were when the engine was made, got a change: make a"
                " new Engine"
            )


def _ids(value: Any) -> set[int]:
    if value is None:
        return set()
    return {int(token) for token in value} if isinstance(value, Iterable) else {int(value)}


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Return the end tokens that generation config, config and tokenizer name, the first of them that names any."""
    for owner in (
        getattr(model, "generation_config", None),
        getattr(model, "config", None),
        tokenizer,
    ):
        found = _ids(getattr(owner, "eos_token_id", None))
        if found:
            return found
    return set()

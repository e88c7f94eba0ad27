# SPDX-License-Identifier: Apache-2.0
"""What the engine runs: the runner of a model, and the tokens that end an output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["end_tokens", "runner_of"]

_RUNNER = ("forward", "new_cache", "cache_bytes", "plan", "vocab_size")


def runner_of(model: Any) -> Any:
    """Return the runner of an optimized model, or the runner itself.

    Raises:
        TypeError: The model has none.
    """
    found = getattr(model, "_ipex_runner", model)
    if not all(hasattr(found, name) for name in _RUNNER):
        raise TypeError(
            "Engine: model must be one that ipex.llm.optimize runs as a whole (see ipex.explain(model)), got"
            f" {type(model).__name__}"
        )
    return found


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

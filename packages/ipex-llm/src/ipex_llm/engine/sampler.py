# SPDX-License-Identifier: Apache-2.0
"""The next token of each request from its row of logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ipex_llm.engine.params import SamplingParams, TokenLogprobs
from ipex_llm.engine.request import Request

__all__ = ["choose"]

Tensor = torch.Tensor


def choose(requests: Sequence[Request], logits: Tensor) -> list[int | None]:
    """Choose a token for each request, and note log probabilities where they are asked for.

    Each row is treated on its own, so that the tokens of a request do not depend on what else is in the batch.

    Args:
        requests: The requests, of which each may draw a random number.
        logits: ``[R, vocab]``, a row for each request.

    Returns:
        R tokens; None for a row that no token can be chosen from, since it has NaN or infinity or no finite number.
    """
    original = logits
    if any(_changed(request) for request in requests):
        logits = logits.clone()
        for request, row in zip(requests, logits, strict=True):
            if _changed(request):
                _change(request, row)
    # The maximum is NaN if anything is.
    usable = logits.amax(-1).isfinite().tolist()
    groups: dict[tuple[float, int, float, float] | None, list[int]] = {}
    for row, request in enumerate(requests):
        if not usable[row]:
            continue
        groups.setdefault(_group(request.params), []).append(row)
    chosen: list[int | None] = [None] * len(requests)
    for group, rows in groups.items():
        part = logits if len(rows) == len(requests) else logits[rows]
        if group is None:
            tokens = torch.ops.ipex.argmax(part)
        else:
            noise = torch.tensor([requests[row].noise() for row in rows], dtype=torch.float32)
            tokens = torch.ops.ipex.sample_token(part, noise, *group)
        for row, value in zip(rows, tokens.tolist(), strict=True):
            chosen[row] = value
    for row, request in enumerate(requests):
        token = chosen[row]
        if token is not None and request.params.logprobs is not None:
            request.logprobs.append(_logprobs(original[row], token, request.params.logprobs))
    return chosen


def _group(params: SamplingParams) -> tuple[float, int, float, float] | None:
    """Return what rows must share to be sampled by one call; None for the most likely token."""
    if params.greedy:
        return None
    return float(params.temperature), params.top_k, float(params.top_p), float(params.min_p)


def _changed(request: Request) -> bool:
    return request.params.penalized or request.new_tokens < request.params.min_new_tokens


def _change(request: Request, row: Tensor) -> None:
    params = request.params
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(request.tokens)))
        values = row[seen]
        factor = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / factor, values * factor)
    if params.presence_penalty or params.frequency_penalty:
        counts = Counter(request.tokens[request.prompt_length :])
        if counts:
            places = torch.tensor(list(counts))
            times = torch.tensor(list(counts.values()), dtype=torch.float32)
            row[places] -= (times * params.frequency_penalty + params.presence_penalty).to(
                row.dtype
            )
    if request.new_tokens < params.min_new_tokens:
        ends = sorted({*request.ends, *params.stop_token_ids})
        row[
            torch.tensor([end for end in ends if end < row.numel()], dtype=torch.int64)
        ] = -torch.inf


def _logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    values = row.float().log_softmax(-1)
    top = values.topk(min(count, values.numel()))
    alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return TokenLogprobs(token, float(values[token]), tuple(alternatives))

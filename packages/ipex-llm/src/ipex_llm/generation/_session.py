# SPDX-License-Identifier: Apache-2.0
"""A batch of sequences that is generated: its cache, its positions, one call per step."""

from __future__ import annotations

from typing import Any

import torch

from ipex_llm.kv_cache.transformers import CacheState
from ipex_llm.model_runner.runner import Runner

__all__ = ["Session"]

Tensor = torch.Tensor

#: Tokens of one call while a prompt is read: bounds the memory of activations, large enough for full speed.
CHUNK = 4096


class Session:
    """Runs the steps of a batch.

    Args:
        runner: Runs the decoder.
        state: Cache of the batch, empty.
    """

    def __init__(self, runner: Runner, state: CacheState) -> None:
        self.runner = runner
        self.state = state
        self.positions = torch.zeros(0, dtype=torch.int64)  # of the next token of each sequence

    def prefill(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, chunk: int | None = None
    ) -> Tensor:
        """Run the prompts and return the logits of their last tokens, ``[B, V]``.

        Args:
            ids: ``[B, N]``, padded on any side.
            mask: ``[B, N]``, 0 at padding; or None.
            positions: ``[B, N]`` or ``[1, N]``, or None: counted.
            chunk: Tokens of each prompt per call.
        """
        batch, count = ids.shape
        valid = None if mask is None or bool(mask.all()) else mask.bool()
        if positions is None:
            positions = torch.arange(count).unsqueeze(0)
            if valid is not None:
                positions = (valid.long().cumsum(1) - 1).clamp_min(0)
        positions = positions.expand(batch, count)
        size = chunk or max(CHUNK // batch, 1)
        logits: Tensor | None = None
        for start in range(0, count, size):
            end = min(start + size, count)
            part = None if valid is None else valid[:, start:end].contiguous()
            if part is not None and bool(part.all()) and self.state.valid is None:
                part = None
            logits = self._chunk(ids[:, start:end], positions[:, start:end], part, logits)
        assert logits is not None
        if valid is None:
            self.positions = positions[:, -1] + 1
        else:
            self.positions = torch.where(valid, positions, -1).amax(1) + 1
        return logits

    def _chunk(
        self, ids: Tensor, positions: Tensor, valid: Tensor | None, former: Tensor | None
    ) -> Tensor:
        batch, count = ids.shape
        step = self.state.append(batch, count, valid)
        if valid is None:
            tokens, at = ids.reshape(-1), positions.reshape(-1)
        else:
            tokens, at = ids[valid], positions[valid]
            if tokens.numel() == 0:
                return former if former is not None else torch.zeros(batch, self.runner.vocab_size)
        runner = self.runner
        starts = step.starts.long()
        some = starts[1:] > starts[:-1]
        whole = bool(some.all())
        rows = None if whole else (starts[1:] - 1)[some]
        out = runner.run(self.state.cache, runner.embed(tokens, at), at, step, rows, logits=True)
        if whole:
            return out
        if former is None:
            former = torch.zeros(batch, out.shape[1], dtype=out.dtype)
        former[some] = out
        return former

    def step(self, tokens: Tensor) -> Tensor:
        """Run one token ``[B]`` of each sequence and return logits ``[B, V]``."""
        runner, state, positions = self.runner, self.state, self.positions
        if state.valid is None:
            step = state.sequences.append(1)
            state.length += 1
        else:
            step = state.append(len(state.sequences), 1, None)
        hidden = runner.embed(tokens, positions)
        logits = runner.run(state.cache, hidden, positions, step, logits=True)
        self.positions = positions + 1
        return logits

    def select(self, indices: Any) -> None:
        """Let sequence i be what sequence ``indices[i]`` was (beams)."""
        self.state.select(indices.tolist())
        self.positions = self.positions[indices]

# SPDX-License-Identifier: Apache-2.0
"""A runner without a model: its logits depend on all tokens before, which it reads from the paged cache alone."""

from __future__ import annotations

import random
from types import SimpleNamespace

import torch

from ipex_llm.engine import Engine, SamplingParams

__all__ = ["GREEDY", "CharTokenizer", "FakeRunner", "drain", "engine", "prompts"]

GREEDY = SamplingParams(max_new_tokens=12)


class FakeRunner:
    """Writes tokens and positions into the cache, and fails if what it finds there is not a whole prefix."""

    def __init__(self, vocab=64, context=256, bytes_per_token=16, seed=0):
        self.plan = SimpleNamespace(max_positions=context)
        self.dtype = torch.float32
        self.vocab_size = vocab
        self.bytes_per_token = bytes_per_token
        self.batches = []
        self.weights = torch.randn(257, vocab, generator=torch.Generator().manual_seed(seed)) * 2
        self.broken = False
        self.poison = {}  # a token after which every logit is this number

    def new_cache(self, num_blocks, block_size, dtype=None):
        return torch.full((num_blocks, block_size, 2), -1, dtype=torch.int64)

    def cache_bytes(self, num_blocks, block_size, dtype=None):
        return num_blocks * block_size * self.bytes_per_token

    def forward(
        self,
        cache,
        tokens,
        positions,
        slot_mapping,
        block_tables,
        query_starts,
        context_lens,
        rows=None,
    ):
        if self.broken:
            raise RuntimeError("broken")
        assert tokens.dtype == positions.dtype == slot_mapping.dtype == torch.int64
        assert block_tables.dtype == query_starts.dtype == context_lens.dtype == torch.int32
        assert len(tokens) == len(positions) == len(slot_mapping) == int(query_starts[-1])
        assert int(block_tables.min()) >= 0 and int(block_tables.max()) < len(cache)
        self.batches.append(len(tokens))
        slots = cache.view(-1, 2)
        slots[slot_mapping, 0] = tokens
        slots[slot_mapping, 1] = positions
        size = cache.shape[1]
        logits = []
        for b, length in enumerate(context_lens.tolist()):
            blocks = block_tables[b, : -(-length // size)].long()
            seen = cache[blocks].view(-1, 2)[:length]
            assert torch.equal(seen[:, 1], torch.arange(length)), "the cache is not a prefix"
            first, last = query_starts[b].item(), query_starts[b + 1].item()
            assert torch.equal(positions[first:last], torch.arange(length - last + first, length))
            for at in range(length - (last - first), length):
                logits.append(self.row(seen[: at + 1, 0]))
        wanted = query_starts[1:].long() - 1 if rows is None else rows
        return torch.stack(logits)[wanted]

    def row(self, tokens):
        for token, value in self.poison.items():
            if token in tokens.tolist():
                return torch.full_like(self.weights[0], value)
        weights = torch.arange(1, len(tokens) + 1)
        return self.weights[int((tokens * weights * 31 + weights).sum()) % 257]

    def alone(self, prompt, count):
        """Return the greedy tokens, without any cache."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.row(torch.tensor(tokens)).argmax()))
        return tuple(tokens[len(prompt) :])


class CharTokenizer:
    """Token i is the character chr(32 + i); token 0 ends."""

    eos_token_id = 0

    def encode(self, text):
        return [ord(c) - 32 for c in text]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(32 + i) for i in ids if i or not skip_special_tokens)


def prompts(count, least=1, most=40, seed=0):
    """Return lists of random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(1, 64) for _ in range(draw.randint(least, most))] for _ in range(count)]


def engine(runner=None, **options):
    """Return an engine with a small cache."""
    options = {"block_size": 4, "num_blocks": 64, "eos_token_ids": ()} | options
    return Engine(runner or FakeRunner(), **options)


def drain(e):
    """Run an engine until it has no work, and return the outputs of each request."""
    found = {}
    while e.has_work:
        for output in e.step():
            found.setdefault(output.request_id, []).append(output)
    return found

# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding: wrong arguments, indices of any kind, and what the ops have in common."""

from __future__ import annotations

import math

import hypothesis
import pytest
import refusals
import torch
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs

ops = torch.ops.ipex

Q, K = torch.ones(5, 4, 16), torch.ones(5, 2, 16)
Q4, K4 = Q.view(1, 5, 4, 16), K.view(1, 5, 2, 16)
T = torch.ones(5, 16)
POSITIONS = torch.arange(5)
CACHE = torch.zeros(3, 2, 4, 16)


def bad_calls():
    op = "rotary_embedding"
    yield op, (Q.double(), K, T, T, 16, True), "query must have dtype"
    yield op, (Q[0, 0], K, T, T, 16, True), "query must have at least 3 dim|query must be 3-D"
    yield op, (Q, K4, T, T, 16, True), "key must have the shape of query but"
    yield op, (Q, K[:4], T, T, 16, True), "key must have the shape of query but"
    yield op, (Q, K.half(), T, T, 16, True), "key must have the dtype of query"
    yield op, (Q, K, T, T, 15, True), "rotary_dim must be an even number between 2 and 16, got 15"
    yield op, (Q, K, T, T, 18, True), "rotary_dim must be an even number"
    yield op, (Q, K, T, T, 0, True), "rotary_dim must be an even number"
    yield op, (Q, K, T, T, 8, True), "sin must have at least 2 dimensions, the last of size 8 or 4"
    yield op, (Q, K, T[0], T[0], 16, True), "sin must have at least 2"
    yield op, (Q, K, T.half(), T, 16, True), "sin must have the dtype of query"
    yield op, (Q, K, T, T[:4], 16, True), "cos must have the shape of sin"
    yield op, (Q, K, T[:4], T[:4], 16, True), "sin must have a row for each of 5 tokens"
    yield op, (Q, K, T, T, 16, True, POSITIONS[:4]), "position_ids must have an entry for each"
    yield op, (Q, K, T, T, 16, True, POSITIONS.short()), "position_ids must have dtype int32"
    yield op, (Q, K, T, T, 16, True, POSITIONS + 1), "position_ids must hold rows .*got 5"
    yield op, (Q, K, T, T, 16, True, POSITIONS - 1), "position_ids must hold rows .*got -1"
    yield op, (Q[:, :1].expand(5, 4, 16), K, T, T, 16, True), "query must not be expanded"
    yield "rotary_embedding_functional", (Q, K, T, T, 20, True), "rotary_dim must be"

    op = "rotary_embedding_batched"
    q, k = Q.flatten(1), K.flatten(1)
    yield op, (POSITIONS.float(), q, k, 16, T, True, 16), "positions must have dtype"
    yield op, (POSITIONS[0], q, k, 16, T, True, 16), "positions must be 1-D"
    yield op, (POSITIONS, q, k, 0, T, True, 16), "head_size must be positive, got 0"
    yield op, (POSITIONS, q, k, 15, T, True, 14), "query must have shape"
    yield op, (POSITIONS, q, k[:3], 16, T, True, 16), "key must have shape"
    yield op, (POSITIONS, q, k.half(), 16, T, True, 16), "key must have the dtype"
    yield op, (POSITIONS, q, k, 16, T, True, 12), "cos_sin_cache must be 2-D with rot_dim = 12"
    yield op, (POSITIONS, q, k, 16, T, True, 13), "rot_dim must be an even"
    yield op, (POSITIONS, q, k, 16, T.half(), True, 16), "cos_sin_cache must have the dtype"
    yield op, (POSITIONS + 1, q, k, 16, T, True, 16), "positions must hold .*got 5"
    offsets = (POSITIONS, q, k, 16, T, True, 16)
    yield op, (*offsets, POSITIONS[:2]), "cos_sin_cache_offsets must have an entry"
    yield op, (*offsets, POSITIONS.float()), "cos_sin_cache_offsets must have dtype"
    yield op, (*offsets, POSITIONS), "positions must hold .*got 3"
    yield op, (*offsets, torch.full((5,), 2**63 - 1)), "positions must hold"

    op = "rotary_embedding_and_cache"
    caches = (CACHE, CACHE.clone())
    slots = torch.tensor([0, 11, -1, 5, 7])
    yield op, (Q, K, K[:, :1], *caches, T, T, slots, 16, True), "value must have the shape of key"
    yield op, (Q, K, K, CACHE.half(), CACHE.half(), T, T, slots, 16, True), "key_cache must have"
    yield op, (Q, K, K, CACHE, CACHE[:2], T, T, slots, 16, True), "value_cache must have the shape"
    yield (
        op,
        (Q, K, K, *(c[:, :1] for c in caches), T, T, slots, 16, True),
        "key_cache must have sh",
    )
    yield op, (Q, K, K, *caches, T, T, slots + 1, 16, True), "slot_mapping must hold .*got 12"
    yield op, (Q, K, K, *caches, T, T, slots[:4], 16, True), "slot_mapping must have an entry"
    yield op, (Q, K, K, *caches, T, T, slots.short(), 16, True), "slot_mapping must have dtype"
    yield op, (Q, K, K, *caches, T, T, None, 16, True), "query must be 4-D without"
    q4 = (Q4, K4, K4, *caches, T, T, None, 16, True)
    yield op, q4, "position_ids must be given"
    yield op, (*q4, POSITIONS), "position_ids must be below the 4 rows"
    yield op, (*q4, POSITIONS, -0.5), "k_scale must be positive, got -0.5"
    yield op, (*q4, POSITIONS, 1.0, 0.0), "v_scale must be positive, got 0"
    none = (CACHE[:0], CACHE[:0])
    yield op, (Q4, K4, K4, *none, T, T, None, 16, True, POSITIONS), "key_cache must have a block"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@hypothesis.given(
    ids=st.lists(st.integers(-3, 12), min_size=5, max_size=5),
    slots=st.lists(st.integers(-(2**40), 14), min_size=5, max_size=5, unique=True),
)
@hypothesis.settings(max_examples=60, deadline=None)
def test_any_positions_and_slots(ids, slots):
    """Indices in range give the result of the reference, others raise and leave the cache alone."""
    table = torch.linspace(-1, 1, 10 * 16).view(10, 16)
    ours, theirs = ([Q.clone(), K, K, CACHE.clone(), CACHE.clone()] for _ in range(2))
    rest = (table, table, torch.tensor(slots), 16, False, torch.tensor(ids))
    valid = all(0 <= i < 10 for i in ids) and all(s < 12 for s in slots)
    if valid:
        ops.rotary_embedding_and_cache(*ours, *rest)
        specs()["rotary_embedding_and_cache"].reference(*theirs, *rest)
    else:
        with pytest.raises(RuntimeError, match="must hold"):
            ops.rotary_embedding_and_cache(*ours, *rest)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("half", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_op_equals_the_two_in_a_row(half, dtype, level):
    q, k, v = (torch.randn(9, h, 48).to(dtype) for h in (3, 2, 2))
    sin, cos = (f(torch.randn(9, 10)) for f in (torch.sin, torch.cos))
    slots = torch.randperm(32)[:9]
    caches = [torch.zeros(4, 2, 8, 48, dtype=dtype) for _ in range(2)]
    q1, k1 = q.clone(), k.clone()
    ops.rotary_embedding_and_cache(q, k, v, *caches, sin, cos, slots, 20, half)
    assert torch.equal(k, k1)
    ops.rotary_embedding(q1, k1, sin, cos, 20, half)
    assert torch.equal(q, q1)
    rows = [c.transpose(1, 2).flatten(0, 1)[slots] for c in caches]
    assert torch.equal(rows[0], k1)
    assert torch.equal(rows[1], v)
    assert caches[1].count_nonzero() == v.count_nonzero()


@pytest.mark.parametrize("half", [True, False])
def test_dot_products_depend_on_distance_only(half, level):
    """What the embedding is for."""
    angles = torch.arange(40.0)[:, None] * 10000 ** -(torch.arange(16) / 16)
    q, k = torch.randn(1, 1, 32).expand(40, 1, 32), torch.randn(1, 1, 32).expand(40, 1, 32)
    q, k = q.clone(), k.clone()
    ops.rotary_embedding(q, k, angles.sin(), angles.cos(), 32, half)
    scores = (q[:, 0] @ k[:, 0].T).numpy()
    for distance in (0, 3, 17):
        assert scores.diagonal(distance).std() < 1e-4 * math.sqrt(32)


def test_transformers_chain():
    """The result of the eager chain of transformers' Llama, in bfloat16 within its rounding."""
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 8, 11, 64), torch.randn(2, 2, 11, 64)
    angles = torch.randn(2, 11, 32)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    want = llama.apply_rotary_pos_emb(q, k, cos, sin)
    got = ops.rotary_embedding_functional(q.transpose(1, 2), k.transpose(1, 2), sin, cos, 64, True)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.transpose(1, 2), w)

# SPDX-License-Identifier: Apache-2.0
"""Decode attention and cache writes: wrong arguments, fuzzed indices, masks, whole beam searches."""

from __future__ import annotations

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs
from ipex_core.nn import functional as ipex_functional

ops = torch.ops.ipex

KV = torch.ones(3, 2, 8)
CACHE = torch.zeros(4, 2, 16, 8)
SLOTS = torch.tensor([0, 17, 63])
Q4 = torch.ones(2, 4, 1, 8)
CONTIGUOUS = torch.ones(2, 2, 5, 8)
Q3 = torch.ones(2, 4, 8)
TABLES = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
LENGTHS = torch.tensor([20, 5], dtype=torch.int32)
PAGED = (CACHE, CACHE, None, 0.3, TABLES, LENGTHS, 16, 20, None)
NEW = torch.ones(4, 1, 2, 8)
COLUMNS = torch.zeros(10, 4, 2, 8)
BEAMS = torch.arange(4).repeat(12, 1)
BEAMS[10:] = 1
INDIRECT = (NEW, NEW, NEW, COLUMNS, COLUMNS, BEAMS, 3)

MLA_QUERY = torch.ones(2, 3, 16)
MLA_CACHE = torch.ones(2, 20, 16)


def _with(args, index, value):
    return (*args[:index], value, *args[index + 1 :])


def bad_calls():
    write = (KV, KV, CACHE, CACHE, SLOTS)
    for op in ("reshape_and_cache", "reshape_and_cache_flash"):
        yield op, (KV[0], *write[1:]), "key must be 3-D"
        yield op, (KV.double(), *write[1:]), "key must have dtype"
        yield op, _with(write, 1, KV[:2]), "value must have the shape"
        yield op, _with(write, 2, CACHE[0]), "key_cache must be 4-D"
        yield op, _with(write, 2, CACHE.half()), "key_cache must have the dtype of key"
        yield op, _with(write, 3, CACHE[:2]), "value_cache must have the shape"
        yield op, (KV, KV, CACHE[:, :1], CACHE[:, :1], SLOTS), "key_cache must have shape"
        yield op, _with(write, 4, SLOTS[:2]), "slot_mapping must be 1-D of size"
        yield op, _with(write, 4, SLOTS.float()), "slot_mapping must have dtype"
        yield op, _with(write, 4, SLOTS + 1), "slot_mapping must hold slots below .* = 64, got 64"
        yield op, (*write, "fp4"), "kv_cache_dtype must be one of"
        yield op, (*write, "fp8"), "key_cache must have dtype float8_e5m2"
        yield op, (*write, "fp8_e4m3"), "key_cache must have dtype float8_e4m3fn"
        yield op, (*write, "auto", 0.0), "k_scale must be positive and finite, got 0"
        yield op, (*write, "auto", 1.0, float("nan")), "v_scale must be positive"
        yield op, (*write, "auto", 1.0, 1.0, torch.ones(4, 2, 16)), "key_scales must be None"
        wide = torch.zeros(4, 2, 16, 16)[..., ::2]
        yield op, (KV, KV, wide, CACHE, SLOTS), "contiguous last dimension"
    decode = (Q4, CONTIGUOUS, CONTIGUOUS)
    op = "decode_attention"
    yield op, (Q3, CONTIGUOUS, CONTIGUOUS), "query must be 4-D"
    yield op, (Q4[:1], CONTIGUOUS, CONTIGUOUS), "key_cache must have shape"
    yield op, (Q4[:, :3], CONTIGUOUS, CONTIGUOUS), "heads that divides"
    yield op, (Q4, CONTIGUOUS, CONTIGUOUS.half()), "value_cache must have the dtype"
    yield op, (*decode, torch.tensor([5, 6])), "lengths must be between 0 and .* = 5, got 6"
    yield op, (*decode, torch.tensor([-1, 5])), "lengths must be between"
    yield op, (*decode, torch.tensor([1])), "lengths must have size B = 2"
    yield op, (*decode, torch.ones(2)), "lengths must have dtype"
    yield op, (*decode, None, torch.ones(3, 5)), "mask must be broadcastable"
    yield op, (*decode, None, torch.ones(1, 5).int()), "mask must have dtype"
    yield op, (*decode, None, None, 0.0, torch.ones(3)), "alibi_slopes must be 1-D of size heads"
    yield op, (*decode, None, None, 0.0, None, 0), "window_size must be -1 or positive, got 0"
    yield op, (*decode, None, None, 0.0, None, -1, 0.0, torch.ones(4).half()), "sinks must have"
    big = torch.ones(1, 1, 1, 1025)
    yield op, (big, big, big), "head size between 1 and 1024, got 1025"
    op = "single_query_cached_kv_attention"
    paged = (Q3, Q3, *PAGED)
    yield op, _with(paged, 1, Q4), "query must be 3-D"
    yield op, _with(paged, 0, Q3[:1]), "output must have the shape"
    yield op, _with(paged, 0, Q3.bfloat16()), "output must have the dtype"
    yield op, _with(paged, 8, 8), "key_cache must have shape"
    yield op, _with(paged, 4, torch.tensor([0, 1, 0, 1])), "head_mapping must map head 1 to 0"
    yield op, _with(paged, 4, torch.tensor([0])), "head_mapping must have size"
    yield op, _with(paged, 6, TABLES[:1]), "block_tables must have 2 rows"
    yield op, _with(paged, 6, TABLES[0]), "block_tables must be 2-D"
    yield op, _with(paged, 6, TABLES + 3), "block_tables must hold numbers of blocks in \\[0, 4\\)"
    yield op, _with(paged, 6, TABLES - 1), "block_tables must hold .* got -1"
    yield op, _with(paged, 7, LENGTHS + 13), "context_lens must be between 0 and .* = 32, got 33"
    yield op, _with(paged, 7, LENGTHS[:1]), "context_lens must have size"
    yield op, _with(paged, 9, 19), "max_context_len must be at least"
    op = "indirect_access_kv_cache_attention"
    yield op, _with(INDIRECT, 0, Q3), "query must be 4-D"
    yield op, _with(INDIRECT, 1, NEW[:2]), "key must have shape"
    yield op, _with(INDIRECT, 2, NEW.half()), "value must have the dtype"
    yield op, _with(INDIRECT, 3, COLUMNS[:, :2]), "value_cache must have the shape"
    yield op, _with(INDIRECT, 5, BEAMS[:11]), "beam_idx must have shape"
    yield op, _with(INDIRECT, 5, BEAMS.int()), "beam_idx must have dtype int64"
    yield op, _with(INDIRECT, 5, BEAMS + 1), "beam_idx must hold numbers of sequences"
    yield op, _with(INDIRECT, 5, BEAMS * 0), "beam_idx must hold in its last row"
    yield op, _with(INDIRECT, 6, 10), "offset must be between 0 and .* = 9, got 10"
    yield op, _with(INDIRECT, 6, -1), "offset must be between"
    op = "mla_decode_attention"
    latent = (MLA_QUERY, MLA_CACHE, LENGTHS, 0.3, 12)
    yield op, _with(latent, 0, Q4), "query must be 3-D"
    yield op, _with(latent, 1, MLA_CACHE[..., :8]), "kv_cache must have shape"
    yield op, _with(latent, 1, MLA_CACHE.half()), "kv_cache must have the dtype"
    yield op, _with(latent, 1, MLA_CACHE[:1]), "kv_cache must have 2 blocks"
    yield op, _with(latent, 2, LENGTHS + 1), "lengths must be between 0 and .* = 20, got 21"
    yield op, _with(latent, 2, LENGTHS[:1]), "lengths must have size"
    yield op, _with(latent, 4, 17), "kv_lora_rank must be between 1 and .* = 16, got 17"
    yield op, (*latent, TABLES), "block_tables must hold numbers of blocks in \\[0, 2\\)"
    yield op, (*latent, TABLES[:1]), "block_tables must have 2 rows"
    yield op, (*latent, None, torch.ones(2, 8)), "new_rows must have shape"
    yield op, _with((*latent, None, torch.ones(2, 16)), 2, LENGTHS * 0), "lengths must be positive"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


def _agree(op, args, tolerance=1e-4):
    """Call kernel and reference on copies; both raise the same or leave the same in all tensors."""
    copies = [[a.clone() if isinstance(a, torch.Tensor) else a for a in args] for _ in range(2)]
    try:
        want = specs()[op].reference(*copies[0])
    except OpArgumentError as error:
        with pytest.raises(RuntimeError) as native:
            getattr(ops, op)(*copies[1])
        assert str(native.value) == str(error)
        for a, b in zip(args, copies[1], strict=True):
            assert not isinstance(a, torch.Tensor) or torch.equal(a, b)
        return
    got = getattr(ops, op)(*copies[1])
    for a, b in zip(copies[0] + [want], copies[1] + [got], strict=True):
        if isinstance(a, torch.Tensor):
            torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-3, 25), max_size=9), st.booleans())
def test_fuzz_slots(slots, wide):
    key = torch.randn(len(slots), 2, 8)
    cache = torch.zeros(3, 2, 8, 8)
    mapping = torch.tensor(slots, dtype=torch.int64 if wide else torch.int32)
    _agree("reshape_and_cache", (key, key + 1, cache, cache.clone(), mapping))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_fuzz_block_tables(data):
    sequences = data.draw(st.integers(0, 3))
    columns = data.draw(st.integers(0, 3))
    number = st.integers(-1, 5) if data.draw(st.booleans()) else st.integers(0, 4)
    rows = [
        data.draw(st.lists(number, min_size=columns, max_size=columns)) for _ in range(sequences)
    ]
    tables = torch.tensor(rows, dtype=torch.int32).reshape(sequences, columns)
    lengths = [data.draw(st.integers(-1, columns * 4 + 1)) for _ in range(sequences)]
    query = torch.randn(sequences, 2, 8)
    cache = torch.randn(5, 1, 4, 8)
    longest = data.draw(st.sampled_from([max([*lengths, 0]), 3, 1000]))
    args = (torch.zeros_like(query), query, cache, cache.flip(0), None, 0.0, tables)
    args = (*args, torch.tensor(lengths, dtype=torch.int64), 4, longest, None)
    _agree("single_query_cached_kv_attention", args)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fuzz_latent_cache(data):
    number = st.integers(-1, 5) if data.draw(st.booleans()) else st.integers(0, 4)
    rows = data.draw(st.lists(st.lists(number, min_size=2, max_size=2), min_size=2, max_size=2))
    lengths = torch.tensor(data.draw(st.lists(st.integers(-1, 9), min_size=2, max_size=2)))
    query, cache = torch.randn(2, 3, 16), torch.randn(5, 4, 16)
    new = torch.randn(2, 16) if data.draw(st.booleans()) else None
    _agree("mla_decode_attention", (query, cache, lengths, 0.3, 12, torch.tensor(rows), new))


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fuzz_lengths_and_beams(data):
    lengths = torch.tensor(data.draw(st.lists(st.integers(-1, 8), min_size=2, max_size=2)))
    query, cache = torch.randn(2, 2, 2, 8), torch.randn(2, 1, 7, 8)
    _agree("decode_attention", (query, cache, cache.flip(0), lengths))
    beam_idx = torch.tensor(
        data.draw(
            st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=9, max_size=9)
        )
    )
    beam_idx[8, 0] = data.draw(st.integers(-1, 5))
    new, columns = torch.randn(4, 1, 2, 8), torch.randn(7, 4, 2, 8)
    offset = data.draw(st.integers(0, 6))
    _agree(
        "indirect_access_kv_cache_attention",
        (new, new + 1, new - 1, columns, columns.flip(0), beam_idx, offset),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_see_nothing_give_zeros(dtype):
    query = torch.randn(2, 4, 1, 64).to(dtype)
    cache = torch.randn(2, 2, 700, 64).to(dtype)
    hidden = torch.ones(2, 1, 1, 700, dtype=torch.bool)
    hidden[1] = False
    sinks = torch.zeros(4)
    for arguments in ((None, hidden), (torch.tensor([700, 0]),)):
        for sink in (None, sinks):
            options = (*arguments, *[None] * (2 - len(arguments)), 0.0, None, -1, -1.0, sink)
            out = ops.decode_attention(query, cache, cache, *options)
            assert out[1].eq(0).all()
            assert out[0].isfinite().all()
            assert out[0].ne(0).any()


def test_values_behind_the_length_are_not_read():
    cache = torch.full((1, 1, 128, 64), float("nan"))
    cache[:, :, :65] = 1.0
    out = ops.decode_attention(torch.ones(1, 1, 1, 64), cache, cache, torch.tensor([65]))
    torch.testing.assert_close(out, torch.ones_like(out))


def test_written_rows_are_found_again():
    """Cache writes and paged attention against attention over the same rows, for all cache types."""
    torch.manual_seed(0)
    tokens, heads, size, block = 50, 2, 64, 16
    key, value = torch.randn(tokens, heads, size), torch.randn(tokens, heads, size)
    query = torch.randn(1, 4, size)
    slots = (
        torch.randperm(5)[:4].repeat_interleave(block)[:tokens] * block
        + torch.arange(tokens) % block
    )
    want = ops.decode_attention(
        query[:, :, None], key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    )[:, :, 0]
    table = (slots[::block] // block).int()[None]
    for dtype, scale, tolerance in (
        (torch.float32, 1.0, 1e-5),
        (torch.float8_e5m2, 1.0, 0.15),
        (torch.float8_e4m3fn, 0.01, 0.08),
        (torch.int8, 0.03, 0.03),
        (torch.int8, None, 0.02),
    ):
        caches = [torch.zeros(5, heads, block, size).to(dtype) for _ in range(2)]
        scales = [torch.zeros(5, heads, block) for _ in range(2)] if scale is None else [None, None]
        factors = (scale or 1.0,) * 2
        ops.reshape_and_cache(key, value, *caches, slots, "auto", *factors, *scales)
        out = torch.empty_like(query)
        ops.single_query_cached_kv_attention(
            out, query, *caches, None, 0.0, table, torch.tensor([tokens]), block, tokens, None,
            -1, *factors, -1.0, None, *scales,
        )  # fmt: skip
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 40, 64, 128, 200, 576])
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7])
def test_int8_caches_meet_16_bit_queries(heads, size, dtype, level):
    """Groups of every size of a tile, parts of blocks of keys, scales of rows that differ a lot."""
    generator = torch.Generator().manual_seed(heads * 1000 + size)
    kv_heads, keys = 2, 131
    query = torch.randn(1, heads * kv_heads, 1, size, generator=generator).to(dtype)
    shape = (1, kv_heads, keys, size)
    key, value = (
        torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator) for _ in range(2)
    )
    scales = [torch.rand(shape[:3], generator=generator) ** 4 / 40 for _ in range(2)]
    rest = (None, None, 0.0, None, -1, -1.0, None, 1.0, 1.0, *scales)
    got = ops.decode_attention(query, key, value, *rest)
    want = specs()["decode_attention"].reference(query.double(), key, value, *rest)
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_queries_of_int8_caches_reach_their_head_only(value, level):
    query = torch.ones(1, 4, 1, 64).bfloat16()
    query[0, 1, 0, 3] = value
    cache = torch.randint(-9, 9, (1, 1, 70, 64), dtype=torch.int8)
    out = ops.decode_attention(query, cache, cache)
    assert out[0, 1].isnan().all()
    assert out[0, [0, 2, 3]].isfinite().all()


def test_all_e4m3_codes():
    """Every code comes back as its number, and numbers between two codes go to the nearest, ties to even."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()]
    order = finite.sort().values
    middle = (order[1:] + order[:-1]) / 2
    above, below = (torch.nextafter(middle, torch.tensor(end)) for end in (1e9, -1e9))
    rows = torch.cat([finite, middle, above, below, torch.tensor([449.0, -1e30, 1e-30, -1e-9])])
    rows = torch.cat([rows, rows.new_zeros(-len(rows) % 16)]).view(-1, 1, 16)
    caches = [torch.zeros(len(rows), 1, 1, 16, dtype=torch.float8_e4m3fn) for _ in range(2)]
    ops.reshape_and_cache(rows, rows, *caches, torch.arange(len(rows)), "fp8_e4m3")
    want = rows.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    assert torch.equal(caches[0][:, :, 0].float(), want)
    # A single key gives its value, so attention reads each code.
    stored = codes.view(torch.float8_e4m3fn).view(16, 1, 1, 16)
    out = ops.decode_attention(torch.zeros(16, 1, 1, 16), torch.zeros_like(stored), stored)
    torch.testing.assert_close(out.flatten(), numbers, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", [torch.float32, torch.float8_e5m2, torch.float8_e4m3fn])
@pytest.mark.parametrize("shared", [False, True])
def test_beam_search_equals_reordered_caches(shared, kind):
    """Prompt, six reordered steps with growth of the caches, against caches that are copied at each step."""
    torch.manual_seed(1)
    batch, beams, prompt, heads, kv_heads, size = 2, 3, 5, 4, 2, 32
    n = batch * beams
    rows = batch if shared else n

    def new(count, tokens):
        return [torch.randn(count, tokens, h, size) for h in (heads, kv_heads, kv_heads)]

    def stored(x):
        return x.to(kind).float()

    q, k, v = new(rows, prompt)
    dummy = torch.zeros(1, 1, 1, 1, dtype=kind)
    past = (torch.zeros(1, 0, 0, 1), dummy, dummy, torch.zeros(1, n, dtype=torch.int64))
    mask = torch.zeros(rows, 1, prompt, prompt)
    out, weights, past = ipex_functional.indirect_access_kv_cache_attention(
        q, k, v, size**0.5, past, attention_mask=mask, text_max_length=7
    )
    assert weights is None
    assert past[0].shape == (1, prompt, prompt, 1)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    repeat = beams if shared else 1
    keys, values = (stored(t).repeat_interleave(repeat, 0) for t in (k, v))
    for step in range(6):
        base = torch.arange(n) // beams * beams
        chosen = base + (0 if step == 0 else torch.randint(0, beams, (n,)))
        keys, values = keys[chosen], values[chosen]
        past[3][past[0].shape[-2] - 1] = chosen
        q, k, v = new(n, 1)
        keys, values = torch.cat([keys, stored(k)], 1), torch.cat([values, stored(v)], 1)
        mask = torch.zeros(n, 1, 1, keys.shape[1])
        out, _, past = ipex_functional.indirect_access_kv_cache_attention(
            q, k, v, size**0.5, past, attention_mask=mask, text_max_length=7
        )
        want = torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (q, keys, values)), enable_gqa=True
        )
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-4)
    assert past[1].shape[0] == 14
    assert past[1].dtype == kind


def test_without_a_mask_there_is_no_cache():
    q = torch.randn(1, 3, 2, 16)
    out, weights, present = ipex_functional.indirect_access_kv_cache_attention(q, q, q, 4.0)
    heads = q.transpose(1, 2)
    want = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
    assert weights is None
    assert present is None


def test_head_mask_is_refused():
    q = torch.randn(1, 3, 2, 16)
    with pytest.raises(OpArgumentError, match="head_mask must be None"):
        ipex_functional.indirect_access_kv_cache_attention(q, q, q, 4.0, head_mask=q)

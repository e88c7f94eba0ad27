# SPDX-License-Identifier: Apache-2.0
"""Modules of attention over caches and over sequences that lie one after the other."""

import pytest
import torch
from accuracy import DTYPES, close

from ipex_core.errors import OpArgumentError
from ipex_llm import modules as M
from ipex_llm.kv_cache import CACHE_DTYPES

pytestmark = pytest.mark.usefixtures("no_gradients")


def attend(query, key, value, scale, window=None):
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.float().transpose(0, 1) for t in (query, key, value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(k.shape[1])
    hidden = behind < 0
    if window is not None:
        hidden |= behind >= window
    scores = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, -float("inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


BLOCK = 4
TABLE = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
LENGTHS = [5, 7]


def slots(sequence, start, end):
    return [int(TABLE[sequence, p // BLOCK]) * BLOCK + p % BLOCK for p in range(start, end)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", ["reshape_and_cache", "reshape_and_cache_flash"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", ["auto", "fp8_e5m2", "fp8_e4m3"])
def test_paged_attention(dtype, write, index, name):
    kind = CACHE_DTYPES[name] or dtype
    caches = [torch.zeros(5, 2, BLOCK, 16, dtype=kind) for _ in range(2)]
    rows = [torch.randn(2, n, 2, 16).to(dtype) for n in LENGTHS]
    if kind != dtype:
        rows = [r.to(kind).to(dtype) for r in rows]
    key, value = torch.cat(rows, 1)
    where = torch.tensor([*slots(0, 0, 5), *slots(1, 0, 7)], dtype=index)
    skipped = where.clone()
    skipped[3] = -1
    getattr(M.PagedAttention, write)(key, value, *caches, skipped, name)
    assert not caches[0].float()[3, :, 3].any()
    getattr(M.PagedAttention, write)(key, value, *caches, where, name, 1.0, 1.0)

    query = torch.randn(2, 4, 16).to(dtype)
    out = torch.empty_like(query)
    lens, mapping = torch.tensor(LENGTHS, dtype=index), torch.tensor([0, 0, 1, 1])
    for window in (-1, 3):
        M.PagedAttention.single_query_cached_kv_attention(
            out, query, *caches, mapping, 0.3, TABLE, lens, BLOCK, 7, None, window
        )
        for s in range(2):
            limit = None if window < 0 else window
            close(out[s : s + 1], attend(query[s : s + 1], *rows[s], 0.3, limit), dtype)

    query = torch.randn(5, 4, 16).to(dtype)  # the last 2 and the last 3 tokens
    starts, kv = (torch.tensor(v, dtype=index) for v in ([0, 2, 5], [0, 5, 12]))
    for method in ("flash_attn_varlen_func", "flash_atten_varlen"):
        out = torch.empty_like(query)
        getattr(M.PagedAttention, method)(
            out, query, *caches, starts, kv, 3, 7, 0.3, True, TABLE, None, kv_cache_dtype=name
        )
        close(out[:2], attend(query[:2], *rows[0], 0.3), dtype)
        close(out[2:], attend(query[2:], *rows[1], 0.3), dtype)


def test_paged_attention_errors():
    key, value = torch.randn(2, 3, 2, 16)
    caches = [torch.zeros(2, 2, BLOCK, 16) for _ in range(2)]
    put = M.PagedAttention.reshape_and_cache
    good = torch.tensor([0, 1, 2])
    for arguments, text in (
        ((key, value, *caches, torch.tensor([0, 1, 8])), "slot_mapping must hold slots below"),
        ((key, value, *caches, good.float()), "slot_mapping must"),
        ((key, value, *caches, good, "fp4"), "kv_cache_dtype must be"),
        ((key, value, *caches, good, "fp8"), "must"),
        ((key[:, :1], value, *caches, good), "must"),
    ):
        with pytest.raises(RuntimeError, match=text):
            put(*arguments)
    assert not caches[0].any() and not caches[1].any()
    query = torch.randn(1, 2, 16)
    for table, length, text in (([[2]], 3, "block_tables"), ([[0]], 5, "context_lens")):
        with pytest.raises(RuntimeError, match=text):
            M.PagedAttention.single_query_cached_kv_attention(
                torch.empty_like(query),
                query,
                *caches,
                None,
                0.3,
                torch.tensor(table),
                torch.tensor([length]),
                BLOCK,
                8,
                None,
            )


def test_copy_and_swap_blocks():
    first, second = torch.randn(2, 5, 2, 4, 8)
    cache, kept = first.clone(), first
    M.PagedAttention.copy_blocks(cache, [second.clone()], {0: [1, 2], 3: 4})
    assert torch.equal(cache, kept[torch.tensor([0, 0, 0, 3, 3])])
    other = second.clone()
    M.PagedAttention.swap_blocks(kept, other, torch.tensor([[1, 0], [2, 4]]))
    assert torch.equal(other[0], kept[1]) and torch.equal(other[4], kept[2])
    assert torch.equal(other[1:4], second[1:4])
    pairs = torch.tensor([[0, 1]])
    M.PagedAttention.copy_blocks(key_cache=cache, value_cache=other, block_map=pairs)
    M.PagedAttention.swap_blocks(src=cache, dst=other, block_map=pairs)
    assert torch.equal(cache[1], cache[0]) and torch.equal(other[1], cache[0])
    with pytest.raises(
        OpArgumentError, match=r"copy_blocks: block_mapping must hold blocks in \[0, 5\)"
    ):
        M.PagedAttention.copy_blocks(cache, cache, {0: 5})
    with pytest.raises(OpArgumentError, match="swap_blocks: block_mapping must be a dictionary or"):
        M.PagedAttention.swap_blocks(cache, other, torch.ones(3))


def test_varlen_and_indirect_access_modules():
    query, key, value = torch.randn(3, 6, 2, 8)
    out, offsets = torch.empty_like(query), torch.tensor([0, 6])
    rest = (None, 6, 6, 0.0, 0.3, False, True, False, None)
    assert M.VarlenAttention()(query, key, value, out, offsets, offsets, *rest) is out
    expected, out = out, torch.empty_like(query)
    flash = M.VarlenAttention.apply_function_flash_varlen
    first = (query, key, value, out, offsets, offsets, None)
    last = (0.3, False, True, -1, -1, False, None)
    flash(*first, None, None, 6, 6, 0.0, *last)
    assert torch.equal(out, expected)
    flash(
        *(*first[:3], out.zero_(), *first[4:]),
        **{"block_tables_": None, "alibi_slopes": None, "max_seqlen_q": 6, "max_seqlen_k": 6},
        **{"p_dropout": 0.0, "softmax_scale": 0.3, "zero_tensors": False, "is_causal": True},
        **{"window_size_left": -1, "window_size_right": -1, "return_softmax": False, "gen_": None},
    )
    assert torch.equal(out, expected)
    close(out, attend(query, key, value, 0.3))
    again = torch.empty_like(out)
    M.VarlenAttention.apply_function(query, key, value, again, offsets, offsets, *rest)
    assert torch.equal(out, again)

    module = M.IndirectAccessKVCacheAttention(text_max_length=7)
    mask = torch.zeros(1, 1, 6, 6)
    got, weights, past = module(query[None], key[None], value[None], 1 / 0.3, None, None, mask)
    close(got[0].transpose(0, 1), attend(query, key, value, 0.3))
    assert weights is None and past[1].shape == (7, 1, 2, 8)
    for step in range(3):
        q, k, v = torch.randn(3, 1, 1, 2, 8)
        key, value = torch.cat([key, k[0]]), torch.cat([value, v[0]])
        mask = torch.zeros(1, 1, 1, 7 + step)
        got, _, past = module(q, k, v, 1 / 0.3, past, None, mask)
        close(got[0].transpose(0, 1), attend(q[0], key, value, 0.3))
    with pytest.raises(OpArgumentError, match="text_max_length must be positive, got 0"):
        M.IndirectAccessKVCacheAttention(0)

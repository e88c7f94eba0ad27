# SPDX-License-Identifier: Apache-2.0
"""The attention functions against plain PyTorch, what they write in place, and what they refuse."""

import pytest
import torch
from accuracy import DTYPES, close

from ipex_core.errors import OpArgumentError
from ipex_llm import functional as fn

pytestmark = pytest.mark.usefixtures("no_gradients")


def attend(query, key, value, causal, scale, bias=0.0):
    """Attend in one sequence; the queries are the last positions."""
    group = query.shape[1] // key.shape[1]
    q, k, v = (t.float().transpose(0, 1) for t in (query, key, value))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * scale + bias
    if causal:
        behind = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
        scores = scores.masked_fill(torch.arange(k.shape[1]) > behind, -float("inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def varlen(query, key, value, offsets, key_offsets=None, **changes):
    key_offsets = offsets if key_offsets is None else key_offsets
    out = torch.full_like(query, 7.0)
    options = {
        "alibi_slopes": None,
        "pdropout": 0.0,
        "zero_tensors": False,
        "is_causal": True,
        "return_softmax": False,
        "gen_": None,
        **changes,
    }
    given = fn.varlen_attention(
        query=query,
        key=key,
        value=value,
        out=out,
        seqlen_q=offsets,
        seqlen_k=key_offsets,
        max_seqlen_q=9,
        max_seqlen_k=9,
        softmax_scale=0.3,
        **options,
    )
    assert given is out
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_varlen_attention(dtype, causal, index):
    query = torch.randn(8, 4, 16).to(dtype)
    key, value = torch.randn(2, 12, 2, 16).to(dtype)
    offsets = torch.tensor([0, 3, 7], dtype=index)
    keys = torch.tensor([0, 5, 12], dtype=index)
    got = varlen(query, key, value, offsets, keys, is_causal=causal)
    for (q0, q1), (k0, k1) in (((0, 3), (0, 5)), ((3, 7), (5, 12))):
        want = attend(query[q0:q1], key[k0:k1], value[k0:k1], causal, 0.3)
        close(got[q0:q1], want, dtype)
    assert bool((got[7] == 7.0).all())
    assert bool((varlen(query, key, value, offsets, keys, zero_tensors=True)[7] == 0.0).all())


def test_varlen_attention_with_alibi_window_and_softcap():
    query, key, value = torch.randn(3, 6, 2, 16)
    offsets, slopes = torch.tensor([0, 6]), torch.tensor([0.5, 0.25])
    distance = torch.arange(6)[:, None] - torch.arange(6)
    want = attend(query, key, value, True, 0.3, -slopes[:, None, None] * distance.abs())
    close(varlen(query, key, value, offsets, alibi_slopes=slopes), want)
    window = torch.where(distance > 2, -float("inf"), 0.0)
    want = attend(query, key, value, True, 0.3, window)
    close(varlen(query, key, value, offsets, window_size_left=2), want)
    q, k, v = (t.transpose(0, 1) for t in (query, key, value))
    scores = torch.tanh(q @ k.transpose(1, 2) * 0.3 / 2) * 2
    scores = scores.masked_fill(distance < 0, -float("inf"))
    want = (scores.softmax(-1) @ v).transpose(0, 1)
    close(varlen(query, key, value, offsets, softcap=2.0), want)


def test_varlen_attention_errors():
    query, key, value = torch.randn(3, 6, 2, 16)
    good = torch.tensor([0, 6])
    generator = torch.Generator()
    for changes, text in (
        ({"gen_": generator}, "varlen_attention: gen_ must be None, got Generator"),
        ({"pdropout": 0.1}, "pdropout must be 0, got 0.1"),
        ({"return_softmax": True}, "return_softmax must be False"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape"),
    ):
        with pytest.raises(RuntimeError, match=text):
            varlen(query, key, value, good, **changes)
    for offsets in (torch.tensor([0, 7]), torch.tensor([-1, 6]), torch.tensor([4, 2])):
        with pytest.raises(RuntimeError, match="seqlen_q must hold non-decreasing"):
            varlen(query, key, value, offsets, torch.tensor([0, 6]))


def forward(query, key, value, offsets, keys, used=None, table=None, **changes):
    out = torch.full_like(query, 7.0)
    options = {"pdropout": 0.0, "zero_tensors": False, "return_softmax": False, "gen_": None}
    options.update(changes)
    fn.varlen_fwd(
        *(query, key, value, out, offsets, keys, used, table, None, 9, 9),
        softmax_scale=0.3,
        is_causal=True,
        window_size_left=-1,
        window_size_right=-1,
        **options,
    )
    return out


def test_varlen_fwd():
    query, (key, value) = torch.randn(5, 4, 16), torch.randn(2, 12, 2, 16)
    offsets, keys = torch.tensor([0, 2, 5]), torch.tensor([0, 5, 12])
    got = forward(query, key, value, offsets, keys)
    close(got[2:], attend(query[2:], key[5:], value[5:], True, 0.3))
    used = torch.tensor([4, 3])
    got = forward(query, key, value, offsets, keys, used)
    close(got[:2], attend(query[:2], key[:4], value[:4], True, 0.3))
    close(got[2:], attend(query[2:], key[5:8], value[5:8], True, 0.3))
    caches = torch.zeros(2, 6, 2, 4, 16)  # keys and values: 6 blocks of 4 rows
    table = torch.tensor([[5, 0], [2, 1]])
    slots = torch.tensor([20, 21, 22, 23, 0, 8, 9, 10, 11, 4, 5, 6])
    for cache, rows in zip(caches, (key, value), strict=True):
        cache.transpose(1, 2).reshape(24, 2, 16)  # as rows
        for row, slot in zip(rows, slots.tolist(), strict=True):
            cache[slot // 4, :, slot % 4] = row
    close(
        forward(query, *caches, offsets, keys, table=table)[2:],
        forward(query, key, value, offsets, keys)[2:],
    )
    paged = forward(query, *caches, offsets, keys, used, table, zero_tensors=True)
    close(paged, got)
    for changes, text in (
        ({"used": torch.tensor([1])}, r"varlen_fwd: seqused_k must have shape \[2\], got \[1\]"),
        ({"used": torch.tensor([6, 1])}, "seqused_k must hold numbers between 0 and"),
        ({"gen_": torch.Generator()}, "varlen_fwd: gen_ must be None"),
    ):
        with pytest.raises(OpArgumentError, match=text):
            forward(query, key, value, offsets, keys, **changes)
    for changes, text in (
        ({"pdropout": 0.5}, "varlen_fwd: pdropout must be 0"),
        ({"return_softmax": True}, "varlen_fwd: return_softmax must be False"),
        ({"used": torch.tensor([-1, 1])}, "varlen_fwd: seqused_k must hold no negative numbers"),
    ):
        with pytest.raises(OpArgumentError, match=text):
            forward(query, *caches, offsets, keys, table=table, **changes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_indirect_access_attention_with_beams(dtype):
    batch, beams, heads, kv_heads, size, prompt, steps = 2, 2, 4, 2, 8, 5, 4
    scale = size**0.5
    keys, values = torch.randn(2, prompt, batch, kv_heads, size).to(dtype)
    history = [
        [(keys[:, b // beams], values[:, b // beams])] for b in range(batch * beams)
    ]  # per sequence
    carrier = torch.empty(1, 0, 0, 1, dtype=torch.int64)
    past = (
        carrier,
        *(torch.empty(1, 1, 1, 1, dtype=dtype) for _ in range(2)),
        torch.empty(prompt + 2, batch * beams, dtype=torch.int64),
    )
    query = torch.randn(batch, prompt, heads, size).to(dtype)
    mask = torch.zeros(batch, 1, prompt, prompt)
    out, weights, past = fn.indirect_access_kv_cache_attention(
        query,
        keys.transpose(0, 1),
        values.transpose(0, 1),
        scale,
        past,
        None,
        mask,
        text_max_length=6,
    )
    assert weights is None
    for b in range(batch):
        want = attend(query[b], keys[:, b], values[:, b], True, 1 / scale)
        close(out[b].transpose(0, 1), want, dtype)
    for step in range(steps):  # beyond the six positions: the caches grow
        length = prompt + step
        query = torch.randn(batch * beams, 1, heads, size).to(dtype)
        k, v = torch.randn(2, batch * beams, 1, kv_heads, size).to(dtype)
        mask = torch.zeros(batch * beams, 1, 1, length + 1)
        out, _, past = fn.indirect_access_kv_cache_attention(
            query, k, v, scale, past, attention_mask=mask
        )
        for s in range(batch * beams):
            history[s] = [*history[s], (k[s], v[s])]
            ks, vs = (torch.cat([pair[i] for pair in history[s]]) for i in (0, 1))
            close(out[s].transpose(0, 1), attend(query[s], ks, vs, True, 1 / scale), dtype)
        order = torch.tensor([1, 0, 2, 2])
        past[3][length] = order
        history = [history[int(s)] for s in order]


def test_indirect_access_attention_errors():
    query, key, value = torch.randn(3, 1, 2, 2, 8)
    with pytest.raises(OpArgumentError, match="head_mask must be None"):
        fn.indirect_access_kv_cache_attention(query, key, value, 1.0, None, key)
    with pytest.raises(OpArgumentError, match="attention_mask must be 4-D"):
        fn.indirect_access_kv_cache_attention(
            query, key, value, 1.0, attention_mask=torch.zeros(2, 2)
        )
    out, _, present = fn.indirect_access_kv_cache_attention(query, key, value, 8**0.5)
    assert present is None  # no mask: whole attention, no cache
    close(out[0].transpose(0, 1), attend(query[0], key[0], value[0], False, 8**-0.5))

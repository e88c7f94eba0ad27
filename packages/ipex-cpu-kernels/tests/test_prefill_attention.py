# SPDX-License-Identifier: Apache-2.0
"""Attention over whole sequences: wrong arguments, random sequences and pages, hidden keys, NaN."""

from __future__ import annotations

import math

import pytest
import refusals
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs
from ipex_core.testing import reference_result, samples

ops = torch.ops.ipex
Q = torch.randn(1, 4, 6, 16)
ROWS = torch.randn(9, 4, 16)
KV = torch.randn(9, 2, 16)
OFFSETS = torch.tensor([0, 4, 9])
CACHE = torch.randn(3, 2, 8, 16)
TABLE = torch.tensor([[0, 1], [2, 0]])

#: The level stays the same for all examples of a test.
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def varlen(**changes):
    args = {
        "query": ROWS,
        "key": KV,
        "value": KV,
        "out": ROWS.clone(),
        "seqlen_q": OFFSETS,
        "seqlen_k": OFFSETS,
        "alibi_slopes": None,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
        "pdropout": 0.0,
        "softmax_scale": 0.0,
        "zero_tensors": False,
        "is_causal": True,
        "return_softmax": False,
    }
    return "varlen_attention", args | changes


def paged(**changes):
    args = {
        "out": ROWS.clone(),
        "query": ROWS,
        "key_cache": CACHE,
        "value_cache": CACHE,
        "cu_seqlens_q": OFFSETS,
        "cu_seqlens_kv": torch.tensor([0, 12, 20]),
        "max_seqlen_q": 5,
        "max_seqlen_kv": 12,
        "softmax_scale": 0.0,
        "is_causal": True,
        "block_table": TABLE,
    }
    return "flash_attn_varlen_func", args | changes


def dense(**changes):
    return "attention", {"query": Q, "key": Q, "value": Q} | changes


BAD = [
    (dense(alibi_slopes=torch.ones(3)), r"alibi_slopes must have shape \[4\] or \[1, 4\]"),
    (dense(alibi_slopes=torch.ones(4).double()), "alibi_slopes must have the dtype"),
    (dense(sinks=torch.ones(1, 4)), r"sinks must have shape \[4\]"),
    (dense(sinks=torch.ones(4).half()), "sinks must have the dtype"),
    (dense(softcap=math.inf), "softcap must be a finite number, got inf"),
    (varlen(query=ROWS[0]), "query must be 3-D"),
    (varlen(query=ROWS.int()), "query must have dtype"),
    (varlen(out=ROWS[:5].clone()), "out must have the shape"),
    (varlen(out=ROWS.half()), "out must have the dtype"),
    (varlen(out=torch.zeros(9, 16, 4).transpose(1, 2)), "out must have a contiguous last"),
    (varlen(key=KV.half()), "key must have the dtype"),
    (varlen(key=KV[..., :8]), "key must have shape"),
    (varlen(key=torch.ones(9, 3, 16), value=torch.ones(9, 3, 16)), "divides the 4 heads"),
    (varlen(value=KV[:4]), "value must have the shape"),
    (varlen(seqlen_q=OFFSETS.float()), "seqlen_q must have dtype"),
    (varlen(seqlen_q=OFFSETS[None]), "seqlen_q must be 1-D"),
    (varlen(seqlen_q=OFFSETS[:0]), "seqlen_q must have size"),
    (varlen(seqlen_k=OFFSETS[:2]), "seqlen_k must have size sequences \\+ 1 = 3, got 2"),
    (varlen(alibi_slopes=torch.ones(3, 4)), "alibi_slopes must have shape"),
    (varlen(pdropout=0.1), "pdropout must be 0, got 0.1"),
    (varlen(return_softmax=True), "return_softmax must be False, got True"),
    (varlen(softcap=math.nan), "softcap must be a finite number, got nan"),
    (paged(key_cache=CACHE.half(), value_cache=CACHE.half()), "key_cache must have the dtype"),
    (paged(value_cache=CACHE[:2]), "value_cache must have the shape"),
    (paged(key_cache=CACHE[..., :8], value_cache=CACHE[..., :8]), "key_cache must have shape"),
    (paged(key_cache=CACHE[:, :, :0], value_cache=CACHE[:, :, :0]), "key_cache must have shape"),
    (paged(block_table=TABLE[:1]), "block_table must have 2 rows, got 1"),
    (paged(block_table=TABLE.float()), "block_table must have dtype"),
    (paged(block_table=TABLE[0]), "block_table must be 2-D"),
    (
        paged(kv_cache_dtype="fp4"),
        "kv_cache_dtype must be one of auto, fp8, fp8_e5m2, fp8_e4m3, int8",
    ),
    (paged(kv_cache_dtype="fp8"), "must have dtype float8_e5m2 for kv_cache_dtype fp8"),
    (paged(kv_cache_dtype="int8"), "must have dtype int8 for kv_cache_dtype int8, got float32"),
    (paged(k_scale=0.0), "k_scale must be positive and finite, got 0"),
    (paged(v_scale=math.inf), "v_scale must be positive and finite, got inf"),
    (paged(key_scales=torch.ones(3, 2, 8)), "key_scales must be None unless the cache is int8"),
    (paged(sinks=torch.ones(2)), "sinks must have shape"),
]
# Found only by looking at the numbers, which fakes cannot.
BAD_DATA = [
    (
        varlen(seqlen_q=torch.tensor([0, 5, 4])),
        r"seqlen_q must hold non-decreasing .*\[0, 9\], got 4",
    ),
    (varlen(seqlen_q=torch.tensor([-1, 5, 9])), "seqlen_q must hold non-decreasing .* got -1"),
    (varlen(seqlen_k=torch.tensor([0, 5, 10])), "seqlen_k must hold non-decreasing .* got 10"),
    (paged(cu_seqlens_q=torch.tensor([0, 5, 10])), "cu_seqlens_q must hold non-decreasing"),
    (paged(cu_seqlens_kv=torch.tensor([3, 2, 20])), "cu_seqlens_kv must hold non-decreasing"),
    (paged(cu_seqlens_kv=torch.tensor([0, 17, 20])), "capacity of block_table = 16, got 17"),
    (
        paged(block_table=torch.tensor([[0, 3], [2, 0]])),
        r"block_table must hold numbers of blocks in \[0, 3\), got 3",
    ),
    (
        paged(block_table=torch.tensor([[0, -1], [2, 0]])),
        r"block_table must hold numbers of blocks in \[0, 3\), got -1",
    ),
]


@pytest.mark.parametrize(("call", "text"), BAD + BAD_DATA)
def test_wrong_arguments_raise(call, text):
    op, kwargs = call
    refusals.assert_refused(op, (), text, **kwargs)


def test_unused_table_entries_and_rows_may_hold_anything():
    name, kwargs = paged(block_table=torch.tensor([[0, 1, 999], [2, -5, -9]]))
    poison = CACHE.clone()
    poison[1, :, 4:] = math.nan  # behind the 12 keys of the first sequence
    getattr(ops, name)(**kwargs | {"key_cache": poison, "value_cache": poison})
    assert kwargs["out"].isfinite().all()
    _, clean = paged()
    getattr(ops, name)(**clean)
    assert torch.equal(kwargs["out"], clean["out"])


def check_against_reference(name, kwargs, written="out"):
    spec = specs()[name]
    wide = {
        k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v.clone()
        for k, v in kwargs.items()
        if isinstance(v, torch.Tensor)
    }
    spec.reference(**{**kwargs, **wide})
    spec.op(**kwargs)
    got = kwargs[written]
    torch.testing.assert_close(got, wide[written].to(got.dtype), rtol=1e-4, atol=1e-4)


@FUZZ
@given(data=st.data())
def test_random_sequences(level, data):
    lengths = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300)), min_size=0, max_size=4)
    chosen = data.draw(lengths)
    kv_heads, group = data.draw(st.sampled_from([(1, 1), (2, 3), (1, 5), (3, 1)]))
    size = data.draw(st.sampled_from([1, 8, 17, 32, 40]))
    first_q, first_k = data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))
    queries = torch.tensor([first_q, *(q for q, _ in chosen)]).cumsum(0)
    keys = torch.tensor([first_k, *(k for _, k in chosen)]).cumsum(0)
    rows = int(queries[-1]) + data.draw(st.integers(0, 2)), int(keys[-1])
    heads = kv_heads * group
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    _, kwargs = varlen(
        query=randn(rows[0], heads, size),
        key=randn(rows[1], kv_heads, size),
        value=randn(rows[1], kv_heads, size),
        out=randn(rows[0], heads, size),
        seqlen_q=queries,
        seqlen_k=keys,
        is_causal=data.draw(st.booleans()),
        zero_tensors=data.draw(st.booleans()),
        window_size_left=data.draw(st.sampled_from([-1, 0, 3, 40, 1 << 50])),
        window_size_right=data.draw(st.sampled_from([-1, 0, 5])),
        softcap=data.draw(st.sampled_from([-1.0, 0.0, 2.0])),
        alibi_slopes=randn(heads) if data.draw(st.booleans()) else None,
        sinks=randn(heads) if data.draw(st.booleans()) else None,
    )
    check_against_reference("varlen_attention", kwargs)


@FUZZ
@given(data=st.data())
def test_random_pages(level, data):
    lengths = data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), min_size=1, max_size=4)
    )
    block_size = data.draw(st.sampled_from([1, 3, 16, 32]))
    blocks = data.draw(st.integers(1, 9))
    columns = 90 // block_size + 1
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    queries = torch.tensor([0, *(q for q, _ in lengths)]).cumsum(0).int()
    _, kwargs = paged(
        out=randn(int(queries[-1]), 4, 24),
        query=randn(int(queries[-1]), 4, 24),
        key_cache=randn(blocks, 2, block_size, 24),
        value_cache=randn(blocks, 2, block_size, 24),
        cu_seqlens_q=queries,
        cu_seqlens_kv=torch.tensor([5, *(k for _, k in lengths)]).cumsum(0),
        block_table=torch.randint(blocks, (len(lengths), columns), generator=generator),
        is_causal=data.draw(st.booleans()),
        window_left=data.draw(st.sampled_from([-1, 0, 30])),
        window_right=data.draw(st.sampled_from([-1, 2])),
        softcap=data.draw(st.sampled_from([-1.0, 1.5])),
        alibi_slopes=randn(len(lengths), 4) if data.draw(st.booleans()) else None,
        sinks=randn(4) if data.draw(st.booleans()) else None,
    )
    check_against_reference("flash_attn_varlen_func", kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_queries_that_see_nothing_give_zeros(level, dtype):
    q, k = torch.randn(1, 2, 40, 32).to(dtype), torch.randn(1, 2, 20, 32).to(dtype)
    for sinks in (None, torch.ones(2)):
        out = ops.attention(q, k, k, None, 0.0, True, sinks=sinks, bottom_right=True)
        assert (out[:, :, :20] == 0).all()
        assert (out[:, :, 20:] != 0).any(-1).all()
        out = ops.attention(q, k, k, torch.zeros(40, 20, dtype=torch.bool), sinks=sinks)
        assert (out == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_reach_exactly_the_queries_that_see_them(level, dtype, bad):
    q, k, v = (torch.randn(1, 2, 600, 32).to(dtype) for _ in range(3))
    k[0, 1, 300, 5] = bad
    q[0, 1, :, 5] = 1.0
    out = ops.attention(q, k, v, None, 0.0, True)
    assert out[0, 0].isfinite().all()
    assert out[0, 1, :300].isfinite().all()
    assert out[0, 1, 300:].isnan().all()
    out = ops.attention(q, k, v, None, 0.0, True, window_left=10)
    seen = torch.arange(600)
    seen = (seen >= 300) & (seen <= 310)
    assert torch.equal(out[0, 1].isnan().all(-1), seen)
    # Pages and blocks of keys that the window hides are not read.
    v[0, 0, :32] = math.nan
    assert ops.attention(q, k, v, None, 0.0, True, window_left=10)[0, 0, 400:].isfinite().all()


def test_more_threads_more_sequences(level):
    """The result of a sequence does not depend on what else is in the batch."""
    for spec, sample in samples("varlen_attention", torch.bfloat16):
        if not sample.id.startswith("mixed"):
            continue
        whole = reference_result(spec, sample)[0]
        query, key, value, out, from_q, from_k, *rest = sample.args
        together = out.clone()
        spec.op(query, key, value, together, from_q, from_k, *rest)
        torch.testing.assert_close(together, whole.to(out.dtype), rtol=1.6e-2, atol=2e-2)
        for b in range(len(from_q) - 1):
            alone = out.clone()
            spec.op(query, key, value, alone, from_q[b : b + 2], from_k[b : b + 2], *rest)
            rows = slice(int(from_q[b]), int(from_q[b + 1]))
            assert torch.equal(alone[rows], together[rows])

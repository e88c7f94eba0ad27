# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embeddings, attention over caches, Mamba, and the look-up of modules."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_llm import functional as fn
from ipex_llm import modules as M
from ipex_llm._cache import CACHE_DTYPES
from ipex_llm.modules.utils import IPEXCustomOpType, IPEXRuntimeCustomOps

pytestmark = pytest.mark.usefixtures("no_gradients")

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def close(got, want, dtype=torch.float32):
    assert got.dtype == dtype
    torch.testing.assert_close(
        got.float(), want.float(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_names_are_complete():
    names = """LinearSilu LinearRelu LinearGelu LinearNewGelu LinearSiluMul Linear2SiluMul LinearMul LinearAdd
    LinearAddAdd GatedMLPMOE RotaryEmbedding RMSNorm FastLayerNorm VarlenAttention IndirectAccessKVCacheAttention
    PagedAttention MambaMixer"""
    assert set(names.split()) <= set(M.__all__)
    assert all(inspect.isclass(getattr(M, name)) for name in M.__all__ if name != "utils")


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, weight, bias = (torch.randn(*s).to(dtype) for s in ((3, 48), (48,), (48,)))
    shared = nn.Parameter(weight)
    module = M.RMSNorm(48, 1e-5, shared)
    assert module.weight is shared and list(module.state_dict()) == ["weight"]
    assert torch.equal(module(x), fn.rms_norm(x, weight, 1e-5))
    assert torch.equal(M.RMSNorm.apply_function(x, weight, 1e-5), module(x))
    close(M.RMSNorm(48).to(dtype)(x), F.rms_norm(x.float(), (48,), eps=1e-6), dtype)
    module = M.FastLayerNorm((48,), 1e-5, weight, bias)
    want = F.layer_norm(x.float(), (48,), weight.float(), bias.float())
    close(module(x), want, dtype)
    close(M.FastLayerNorm.apply_function(x, (48,), weight, bias, 1e-5), want, dtype)
    close(M.FastLayerNorm(48, 1e-5, None)(x), F.layer_norm(x.float(), (48,)), dtype)
    assert sorted(module.state_dict()) == ["bias", "weight"]


def test_norm_errors():
    with pytest.raises(OpArgumentError, match=r"RMSNorm: weight must have shape \[8\], got \[7\]"):
        M.RMSNorm(8, 1e-6, torch.ones(7))
    with pytest.raises(OpArgumentError, match=r"FastLayerNorm: bias must have shape \[8\]"):
        M.FastLayerNorm((8,), 1e-6, torch.ones(8), torch.ones(7))


# -- rotary embedding -------------------------------------------------------------------------------------------------


def rotated(x, positions, dim, half, frequencies=None, factor=1.0):
    """Rotate ``[batch, positions, heads, head_dim]`` in float64."""
    if frequencies is None:
        frequencies = 10000.0 ** -(torch.arange(0, dim, 2).double() / dim)
    angles = positions.double()[..., None, None] * frequencies
    cos, sin = angles.cos() * factor, angles.sin() * factor
    y = x[..., :dim].double()
    one, two = y.chunk(2, -1) if half else (y[..., ::2], y[..., 1::2])
    parts = one * cos - two * sin, two * cos + one * sin
    y = torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)
    return torch.cat([y, x[..., dim:].double()], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [1, 8])
def test_rotary_embedding(dtype, offset):
    rope = M.RotaryEmbedding(64, 16, backbone="GPTJForCausalLM")
    x, positions = torch.randn(2, 5, 3, 24).to(dtype), torch.randint(0, 64, (2, 5))
    kept, want = x.clone(), rotated(x, positions, 16, offset != 1)
    close(rope(x, positions, 3, 24, offset, 16), want, dtype)
    close(rope(x.flatten(2), positions, 3, 24, offset, 16), want, dtype)
    close(rope.to(dtype)(x, positions, 3, 24, offset, 16), want, dtype)  # the tables stay float32
    assert torch.equal(x, kept) and not rope.state_dict()
    close(rope(x, positions[:1], 3, 24, offset, 16)[0], want[0], dtype)
    want = rotated(x, torch.arange(7, 12).expand(2, 5), 16, offset != 1)
    close(rope(x, torch.tensor(7), 3, 24, offset, 16), want, dtype)  # the length of the history
    close(copy.deepcopy(rope)(x[:, :1], torch.tensor([7]), 3, 24, offset, 16), want[:, :1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_rotary_embedding_of_a_fused_projection(dtype, kv_heads):
    rope = M.RotaryEmbedding(64, 16)
    x = torch.randn(2, 5, (4 + 2 * kv_heads) * 16).to(dtype)
    positions = torch.arange(5).expand(2, 5)
    query, key, value = x.view(2, 5, -1, 16).split([4, kv_heads, kv_heads], 2)
    got = rope(x, positions, 4, 16, 8, 16, 5, 3)
    close(got[0], rotated(query, positions, 16, True), dtype)
    close(got[1], rotated(key, positions, 16, True), dtype)
    assert torch.equal(got[2], value)


def test_tables_grow():
    rope, x = M.RotaryEmbedding(8, 16), torch.randn(1, 2, 1, 16)
    positions = torch.tensor([[30, 31]])
    with pytest.raises(
        RuntimeError, match=r"position_ids must hold rows of sin and cos in \[0, 8\)"
    ):
        rope(x, positions, 1, 16, 8, 16)
    close(rope(x, positions, 1, 16, 8, 16, 32), rotated(x, positions, 16, True).float())


@pytest.mark.parametrize("key", ["rope_type", "type", None])
def test_llama3_and_longrope(key):
    from ipex_core.nn.rope import rope_frequencies

    llama = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    long = {
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 16,
    }
    x = torch.randn(1, 4, 1, 16)
    for kind, scaling in (("llama3", llama), ("longrope", long)):
        given = scaling if key is None else {**scaling, key: kind}
        nested = {"rope_scaling": given, "rope_theta": 500.0}
        rope = M.RotaryEmbedding(64, 16, 500.0, "LlamaForCausalLM", given)
        other = M.RotaryEmbedding(64, 16, extra_rope_config=nested)
        for start in (0, 40):
            positions = torch.arange(start, start + 4)[None]
            frequencies, factor = rope_frequencies(
                *(kind, 16, 500.0, scaling), positions=start + 4, max_position_embeddings=64
            )
            want = rotated(x, positions, 16, True, frequencies, factor).float()
            close(rope(x, positions, 1, 16, 8, 16), want)
            close(other(x, positions, 1, 16, 8, 16, start + 4), want)
    short = rope(x, positions - 40, 1, 16, 8, 16, 4)
    assert not torch.equal(short, rope(x, positions - 40, 1, 16, 8, 16, 44))


def test_dynamic_scaling_and_ratio_of_the_base():
    from ipex_core.nn.rope import rope_frequencies

    scaling, x = {"rope_type": "dynamic", "factor": 2.0}, torch.randn(1, 4, 1, 16)
    rope = M.RotaryEmbedding(16, 16, extra_rope_config=scaling)
    for start in (0, 40, 20, 3):
        positions = torch.arange(start, start + 4)[None]
        frequencies, _ = rope_frequencies(
            *("dynamic", 16, 10000.0, scaling),
            positions=max(start + 4, 16),
            max_position_embeddings=16,
        )
        want = rotated(x, positions, 16, True, frequencies).float()
        close(rope(x, positions, 1, 16, 8, 16), want)
    wide = M.RotaryEmbedding(16, 16, 100.0, extra_rope_config={"rope_ratio": 5.0})
    same = M.RotaryEmbedding(16, 16, 500.0)
    assert torch.equal(wide(x, positions, 1, 16, 8, 16), same(x, positions, 1, 16, 8, 16))


def test_rotary_errors():
    for arguments, error, text in (
        ((16, 16, 1e4, 5), TypeError, "backbone must be a string, got int"),
        ((16, 16, 1e4, None, [1]), TypeError, "extra_rope_config must be a dictionary, got list"),
        ((16, 16, 1e4, None, {"type": "no"}), ValueError, "kind must be one of"),
        ((16, 16, 1e4, None, {"rope_type": "linear"}), ValueError, "scaling must have 'factor'"),
        ((0, 16), ValueError, "max_position_embeddings must be positive, got 0"),
        ((16, 15), ValueError, "dim must be even and positive, got 15"),
    ):
        with pytest.raises(error, match=text):
            M.RotaryEmbedding(*arguments)
    rope, x, positions = M.RotaryEmbedding(16, 16), torch.randn(1, 4, 2, 16), torch.arange(4)[None]
    for arguments, text in (
        ((x, positions, 2, 16, 8, 8), "rotary_ndims must be 16, the pos_embd_dim of the module"),
        ((x, positions, 2, 16, 4, 16), "offset must be 1 or rotary_ndims / 2 = 8, got 4"),
        ((x, positions, 3, 16, 8, 16), "x must have num_head [*] head_dim = 48 elements"),
        ((x[0, 0], positions, 2, 16, 8, 16), "x must be 3-D or 4-D, got 2-D"),
        ((x, positions, 1, 16, 8, 16, 4, 3), "x must hold 1 heads of 16 elements, then as many"),
    ):
        with pytest.raises(OpArgumentError, match="RotaryEmbedding: " + text):
            rope(*arguments)


def test_apply_function_works_in_place():
    query, key, angles = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(3, 4)
    want = fn.rotary_embedding(query.clone(), key.clone(), angles.sin(), angles.cos(), 8, True)
    got = M.RotaryEmbedding.apply_function(query, key, angles.sin(), angles.cos(), 8, True)
    assert got[0] is query and torch.equal(query, want[0]) and torch.equal(key, want[1])


# -- attention --------------------------------------------------------------------------------------------------------


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


# -- Mamba ------------------------------------------------------------------------------------------------------------


def test_mamba_steps_continue_a_scan():
    batch, width, state, length, taps = 2, 6, 4, 5, 3
    x, weight, bias = (
        torch.randn(batch, width, length + 1),
        torch.randn(width, taps),
        torch.randn(width),
    )
    whole = M.MambaMixer.causal_conv1d_fn(x, weight, bias)
    want = F.silu(
        F.conv1d(x, weight[:, None], bias, padding=taps - 1, groups=width)[..., : length + 1]
    )
    close(whole, want)
    first, conv = M.MambaMixer.causal_conv1d_fn(
        x[..., :length], weight, bias, return_final_states=True
    )
    close(first, want[..., :length])
    last = M.MambaMixer.causal_conv1d_update(x[..., length], conv, weight, bias, "silu")
    close(last, want[..., length])
    assert torch.equal(conv, x[..., -(taps - 1) :])

    A, D, dt_bias = -torch.rand(width, state), torch.randn(width), torch.randn(width)
    dt, z = torch.randn(2, batch, width, length + 1)
    B, C = torch.randn(2, batch, state, length + 1)
    h, rows = torch.zeros(batch, width, state), []
    for t in range(length + 1):
        step = F.softplus(dt[..., t] + dt_bias)
        h = h * torch.exp(step[..., None] * A) + (step * x[..., t])[..., None] * B[:, None, :, t]
        rows.append(((h * C[:, None, :, t]).sum(-1) + D * x[..., t]) * F.silu(z[..., t]))
    want = torch.stack(rows, -1)
    parts = [t[..., :length].contiguous() for t in (x, dt)]
    more = [t[..., :length].contiguous() for t in (B, C)]
    y, carried = M.MambaMixer.selective_scan_fn(
        *parts, A, *more, D, z[..., :length].contiguous(), dt_bias, True, True
    )
    close(y, want[..., :length])
    got = M.MambaMixer.selective_state_update(
        carried,
        x[..., length],
        dt[..., length],
        A,
        B[..., length],
        C[..., length],
        D,
        z[..., length],
        dt_bias,
        True,
    )
    close(got, want[..., length])
    close(carried, h)
    with pytest.raises(OpArgumentError, match="activation must be None, 'silu' or 'swish'"):
        M.MambaMixer.causal_conv1d_fn(x, weight, activation="relu")


# -- look-up ----------------------------------------------------------------------------------------------------------


def test_every_kind_is_found():
    find = IPEXRuntimeCustomOps().get_module_from_device
    for kind in IPEXCustomOpType:
        assert getattr(M, find("cpu", kind, False).__name__) is find("xpu", kind, False)
    norm = find("cpu", IPEXCustomOpType.RMS_NORM, True, 8, eps=1e-3)
    assert isinstance(norm, M.RMSNorm) and norm.eps == 1e-3
    with pytest.raises(OpArgumentError, match="device_type must be one of cpu, xpu, got cuda"):
        find("cuda", IPEXCustomOpType.ROPE, False)
    with pytest.raises(TypeError, match="ops must be an IPEXCustomOpType, got int"):
        find("cpu", 9, False)


def test_names_of_the_facade():
    ipex = pytest.importorskip("ipex")
    assert ipex.llm.functional.rms_norm is fn.rms_norm
    assert ipex.llm.modules.RMSNorm is M.RMSNorm
    import intel_extension_for_pytorch as old
    from intel_extension_for_pytorch.llm.modules.utils import IPEXCustomOpType as Kind

    assert Kind is IPEXCustomOpType and old.llm.modules.PagedAttention is M.PagedAttention


def test_compiles_without_graph_break():
    rope, norm = M.RotaryEmbedding(64, 16), M.RMSNorm(16)
    caches = [torch.zeros(5, 2, BLOCK, 16) for _ in range(2)]

    def function(x, positions, key_cache, value_cache, where):
        query, key, value = rope(x, positions, 2, 16, 8, 16, None, 3)
        M.PagedAttention.reshape_and_cache(key[0], value[0], key_cache, value_cache, where)
        return norm(query)

    x, positions, where = torch.randn(1, 3, 6 * 16), torch.arange(3)[None], torch.tensor([1, 2, 8])
    want = function(x, positions, *caches, where)
    mine = [torch.zeros_like(c) for c in caches]
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(x, positions, *mine, where)
    close(got, want)
    assert torch.equal(mine[0], caches[0]) and torch.equal(mine[1], caches[1])

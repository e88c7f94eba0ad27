# SPDX-License-Identifier: Apache-2.0
"""Norms, rotary embeddings, Mamba, and the look-up of modules."""

import copy
import inspect

import pytest
import torch
from accuracy import DTYPES, close
from torch import nn
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_llm import functional as fn
from ipex_llm import modules as M
from ipex_llm.modules.utils import IPEXCustomOpType, IPEXRuntimeCustomOps

pytestmark = pytest.mark.usefixtures("no_gradients")


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
    caches = [torch.zeros(5, 2, 4, 16) for _ in range(2)]

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

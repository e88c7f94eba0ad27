# SPDX-License-Identifier: Apache-2.0
"""The functions against plain PyTorch, what they write in place, and what they refuse."""

import inspect

import pytest
import torch
from accuracy import DTYPES, close
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_llm import functional as fn

pytestmark = pytest.mark.usefixtures("no_gradients")


def test_names_are_complete():
    names = """rotary_embedding rms_norm fast_layer_norm add_rms_norm add_layer_norm silu_mul gelu_mul
    indirect_access_kv_cache_attention varlen_attention bgmv_shrink bgmv_expand bgmv_expand_slice sgmv_shrink
    sgmv_expand sgmv_expand_slice rotary_embedding_batched varlen_fwd gelu_quick silu_and_mul gelu_and_mul"""
    assert sorted(names.split()) == sorted(fn.__all__)
    assert all(callable(getattr(fn, name)) for name in fn.__all__)


@pytest.mark.parametrize(
    ("name", "arguments"),
    {
        "rotary_embedding": "query key sin cos rotary_dim rotary_half position_ids",
        "rms_norm": "hidden_states weight eps",
        "fast_layer_norm": "hidden_states normalized_shape weight bias eps",
        "add_rms_norm": "residual x weight bias eps add_back",
        "add_layer_norm": "residual x weight bias eps add_back",
        "silu_mul": "x y out",
        "gelu_mul": "x y out approximate",
        "indirect_access_kv_cache_attention": "query key value scale_attn layer_past head_mask attention_mask alibi "
        "add_casual_mask seq_info text_max_length",
        "varlen_attention": "query key value out seqlen_q seqlen_k alibi_slopes max_seqlen_q max_seqlen_k pdropout "
        "softmax_scale zero_tensors is_causal return_softmax gen_ window_size_left window_size_right softcap",
        "bgmv_shrink": "input lora_weights output token_lora_mapping scaling",
        "bgmv_expand": "input lora_weights output token_lora_mapping add_inputs",
        "bgmv_expand_slice": "input lora_weights output token_lora_mapping slice_offset slice_size add_inputs",
        "sgmv_shrink": "inputs lora_a_weights output_tensor b_seq_start_loc seq_len_tensor lora_indices_tensor batches "
        "max_seq_length scaling",
        "sgmv_expand": "inputs lora_b_weights output_tensor b_seq_start_loc seq_len_tensor lora_indices_tensor batches "
        "max_seq_length add_inputs",
    }.items(),
)
def test_order_of_arguments(name, arguments):
    assert " ".join(inspect.signature(getattr(fn, name)).parameters) == arguments


# -- norms ------------------------------------------------------------------------------------------------------------


def rms(x, weight, eps=1e-6):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, residual = (torch.randn(3, 5, 48).to(dtype) for _ in range(2))
    weight, bias = (torch.randn(48).to(dtype) for _ in range(2))
    kept = x.clone(), residual.clone()
    close(fn.rms_norm(x, weight, 1e-6), rms(x, weight), dtype)
    close(fn.rms_norm(x, None, 1e-6), rms(x, torch.ones(48)), dtype)
    close(
        fn.fast_layer_norm(x, (48,), weight, bias, 1e-5),
        F.layer_norm(x.float(), (48,), weight.float(), bias.float()),
        dtype,
    )
    close(fn.fast_layer_norm(x, 48, None, None, 1e-5), F.layer_norm(x.float(), (48,)), dtype)
    total = x.float() + residual.float()
    close(fn.add_rms_norm(residual, x, weight, None, 1e-6), rms(total, weight), dtype)
    close(
        fn.add_layer_norm(residual, x, weight, bias, 1e-5),
        F.layer_norm(total, (48,), weight.float(), bias.float()),
        dtype,
    )
    close(fn.add_rms_norm(None, x, weight, None, 1e-6), rms(x, weight), dtype)
    close(
        fn.add_layer_norm(None, x, weight, None, 1e-5),
        F.layer_norm(x.float(), (48,), weight.float()),
        dtype,
    )
    assert torch.equal(x, kept[0]) and torch.equal(residual, kept[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_back_writes_the_sum(dtype):
    x, residual = (torch.randn(3, 48).to(dtype) for _ in range(2))
    weight, total = torch.randn(48).to(dtype), x + residual
    for function in (fn.add_rms_norm, fn.add_layer_norm):
        mine, given = residual.clone(), x.clone()
        want = function(mine, x, weight, None, 1e-6)
        close(function(mine, x, weight, None, 1e-6, add_back=True), want, dtype)
        assert torch.equal(mine, total) and torch.equal(x, given)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_rms_norm_with_weights_of_any_shape(dtype):
    near = {"rtol": 1e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-5, "atol": 1e-6}
    x, residual = torch.randn(3, 5, 8).to(dtype), torch.randn(3, 5, 8).to(dtype)
    for weight in (torch.rand(5, 8), torch.rand(3, 1, 1), torch.rand(8).to(dtype)):
        want = torch.nn.functional.rms_norm((x + residual).double(), (8,), None, 1e-6) * weight
        for add_back in (False, True):
            base = residual.clone()
            got = fn.add_rms_norm(base, x, weight, None, 1e-6, add_back)
            torch.testing.assert_close(got, want.to(dtype), **near)
            assert torch.equal(base, x + residual if add_back else residual)
        got = fn.rms_norm(x + residual, weight, 1e-6)
        torch.testing.assert_close(got, want.to(dtype), **near)
    with pytest.raises(OpArgumentError, match=r"^rms_norm: weight must be broadcastable to x"):
        fn.rms_norm(x, torch.rand(2, 8), 1e-6)
    with pytest.raises(OpArgumentError, match=r"^add_rms_norm: residual must have the shape of x"):
        fn.add_rms_norm(residual[0], x, torch.rand(5, 8), None, 1e-6)


def test_layer_norm_over_two_dimensions():
    x, weight, bias = torch.randn(3, 4, 6), torch.randn(4, 6), torch.randn(4, 6)
    got = fn.fast_layer_norm(x, (4, 6), weight, bias, 1e-5)
    close(got, F.layer_norm(x, (4, 6), weight, bias))
    close(fn.fast_layer_norm(x, [4, 6], None, None, 1e-5), F.layer_norm(x, (4, 6)))


def test_norm_errors():
    x, weight = torch.randn(3, 8), torch.ones(8)
    with pytest.raises(OpArgumentError, match="add_rms_norm: bias must be None, got a tensor"):
        fn.add_rms_norm(x, x, weight, weight, 1e-6)
    with pytest.raises(RuntimeError, match="weight must"):
        fn.rms_norm(x, torch.ones(7), 1e-6)
    with pytest.raises(RuntimeError, match="residual must"):
        fn.add_rms_norm(x[:1], x, weight, None, 1e-6, True)
    with pytest.raises(ValueError, match="normalized_shape must be the shape of the last dim"):
        fn.fast_layer_norm(x, (7,), None, None, 1e-5)
    with pytest.raises(ValueError, match="normalized_shape must name at least one"):
        fn.fast_layer_norm(x, (), None, None, 1e-5)
    with pytest.raises(ValueError, match=r"bias must have shape \[8\], got \[7\]"):
        fn.fast_layer_norm(x, (8,), weight, torch.ones(7), 1e-5)
    with torch.enable_grad(), pytest.raises(RuntimeError, match="a leaf Variable that requires"):
        fn.add_rms_norm(x.clone().requires_grad_(), x, weight, None, 1e-6, True)


def test_norms_in_place_with_parameters():
    """torch's rules for operations in place hold: a parameter that is only read is no error."""
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    for name, plain in (("add_rms_norm", rms), ("add_layer_norm", layer_norm)):
        with torch.enable_grad():
            weight = torch.nn.Parameter(torch.randn(8))
            scale = torch.ones(8, requires_grad=True)
            total = residual.clone()
            y = getattr(fn, name)(total, x * scale, weight, None, 1e-6, True)
            got = torch.autograd.grad(y.sum() + total.square().sum(), (weight, scale))
            both = residual + x * scale
            loss = plain(both, weight).sum() + both.square().sum()
            want = torch.autograd.grad(loss, (weight, scale))
            same = x.clone()
            getattr(fn, name)(same, same, weight, None, 1e-6, True)
        close(total, residual + x)
        close(same, 2 * x)
        for a, b in zip(got, want, strict=True):
            close(a, b)
    with torch.enable_grad():
        total = residual.clone()
        y = fn.add_rms_norm(total, x * scale, weight, None, 1e-6, True)
        fn.add_rms_norm(total, x, weight, None, 1e-6, True)  # its derivative needs what was there
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def layer_norm(x, weight):
    return torch.nn.functional.layer_norm(x, (8,), weight, None, 1e-6)


def test_cached_attention_with_parameters():
    """Outside of no_grad the cached steps run; only a backward pass through them is an error."""

    def steps():
        torch.manual_seed(3)
        past, out = None, None
        for offset, tokens in ((0, 3), (3, 1), (4, 1)):
            q, k, v = (torch.nn.Parameter(torch.randn(1, tokens, 2, 4)) for _ in range(3))
            mask = torch.zeros(1, 1, tokens, offset + tokens)
            out, _, past = fn.indirect_access_kv_cache_attention(
                q, k, v, 2.0, past, None, mask, text_max_length=8
            )
        return out, past

    with torch.no_grad():
        want, _ = steps()
    with torch.enable_grad():
        got, past = steps()
        close(got.detach(), want)
        for value in (got, past[1]):
            with pytest.raises(RuntimeError, match="is not differentiable"):
                value.sum().backward()


def test_norms_have_gradients():
    with torch.enable_grad():
        x = torch.randn(3, 8, requires_grad=True)
        weight = torch.randn(8, requires_grad=True)
        residual = torch.randn(3, 8)
        got = torch.autograd.grad(
            fn.add_rms_norm(residual, x, weight, None, 1e-6).sum(), (x, weight)
        )
        want = torch.autograd.grad(rms(residual + x, weight).sum(), (x, weight))
    for a, b in zip(got, want, strict=True):
        close(a, b)


# -- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_activations(dtype):
    x, y = (torch.randn(3, 5, 48).to(dtype) for _ in range(2))
    wide, both = (x.float(), y.float()), torch.cat([x, y], -1)
    close(fn.silu_mul(x, y), F.silu(wide[0]) * wide[1], dtype)
    close(fn.silu_and_mul(both), F.silu(wide[0]) * wide[1], dtype)
    for approximate in ("none", "tanh"):
        want = F.gelu(wide[0], approximate=approximate) * wide[1]
        close(fn.gelu_mul(x, y, approximate=approximate), want, dtype)
        close(fn.gelu_and_mul(both, approximate=approximate), want, dtype)
    close(fn.gelu_quick(x), wide[0] * torch.sigmoid(1.702 * wide[0]), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_what_is_returned(dtype):
    x, y = (torch.randn(3, 48).to(dtype) for _ in range(2))
    for function, arguments in (
        (fn.silu_mul, (x, y)),
        (fn.gelu_mul, (x, y)),
        (fn.silu_and_mul, (torch.cat([x, y], -1),)),
        (fn.gelu_and_mul, (torch.cat([x, y], -1),)),
        (fn.gelu_quick, (x,)),
    ):
        out = torch.full((3, 48), 7.0, dtype=dtype)
        assert function(*arguments, out=out) is out
        assert torch.equal(out, function(*arguments))
    want = fn.silu_mul(x, y)
    assert fn.silu_mul(x, y, x) is x and torch.equal(x, want)


def test_products_with_other_shapes_and_dtypes():
    x, y = torch.randn(3, 5), torch.randn(5)
    close(fn.silu_mul(x, y), F.silu(x) * y)
    close(fn.gelu_mul(y, x, approximate="tanh"), F.gelu(y, approximate="tanh") * x)
    close(fn.silu_mul(x.bfloat16(), x), F.silu(x.bfloat16()) * x)
    close(fn.silu_mul(x[0, 0], y[0]), F.silu(x[0, 0]) * y[0])


def test_activation_errors():
    x = torch.randn(3, 8)
    for out, text in (
        (torch.empty(3, 7), r"out must have shape \[3, 8\], got \[3, 7\]"),
        (torch.empty(3, 8, dtype=torch.bfloat16), "out must have dtype float32, got bfloat16"),
        (torch.empty(3, 8, device="meta"), "out must be on the device of x = cpu, got meta"),
    ):
        with pytest.raises(OpArgumentError, match="silu_mul: " + text):
            fn.silu_mul(x, x, out)
    with pytest.raises(OpArgumentError, match="gelu_mul: approximate must be one of none, tanh"):
        fn.gelu_mul(x, x, approximate="erf")
    with pytest.raises(RuntimeError, match="last dimension of even size"):
        fn.silu_and_mul(torch.randn(3, 7))
    with pytest.raises(RuntimeError):
        fn.silu_mul(x, torch.randn(2, 8))


# -- rotary embedding -------------------------------------------------------------------------------------------------


def rotate(x, cos, sin, half):
    """Rotate ``[..., positions, heads, dim]`` with ``[positions, dim / 2]``."""
    cos, sin, x = cos[:, None], sin[:, None], x.float()
    one, two = x.chunk(2, -1) if half else (x[..., ::2], x[..., 1::2])
    parts = one * cos - two * sin, two * cos + one * sin
    return torch.cat(parts, -1) if half else torch.stack(parts, -1).flatten(-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("half", "full"),
    [(True, "twice"), (True, None), (False, "twice"), (False, "interleaved"), (False, None)],
)
def test_rotary_embedding(dtype, half, full):
    angles = torch.randn(16, 4)
    cos, sin = angles.cos(), angles.sin()
    positions = torch.tensor([[3, 4, 5], [0, 1, 2]])
    query, key = torch.randn(2, 3, 4, 10).to(dtype), torch.randn(2, 3, 2, 10).to(dtype)
    want = []
    for x in (query, key):
        turned = [rotate(x[b, ..., :8], cos[positions[b]], sin[positions[b]], half) for b in (0, 1)]
        want.append(torch.cat([torch.stack(turned), x[..., 8:].float()], -1))
    tables = sin, cos
    if full == "twice":
        tables = [torch.cat([t, t], -1) for t in (sin, cos)]
    elif full == "interleaved":
        tables = [t.repeat_interleave(2, -1) for t in (sin, cos)]
    got = fn.rotary_embedding(query, key, *tables, 8, half, positions)
    assert got[0] is query and got[1] is key
    for a, b in zip(got, want, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("half", [True, False])
def test_rotary_embedding_batched(half):
    angles = torch.randn(16, 4)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat([cos, sin], -1)
    positions = torch.tensor([3, 0, 9])
    query, key = torch.randn(3, 4 * 8), torch.randn(3, 2 * 8)
    want = [rotate(x.view(3, -1, 8), cos[positions], sin[positions], half) for x in (query, key)]
    again = query.clone(), key.clone()
    got = fn.rotary_embedding_batched(positions, query, key, 8, table, half, 8)
    assert got[0] is query and got[1] is key
    for a, b in zip(got, want, strict=True):
        close(a, b.flatten(1))
    fn.rotary_embedding_batched(
        positions - 0,
        again[0],
        again[1],
        head_size=8,
        cos_sin_cache=table,
        is_nexo_style=half,
        rotary_dim=8,
        offsets=torch.zeros(3, dtype=torch.int64),
    )
    assert torch.equal(again[0], query) and torch.equal(again[1], key)


def test_rotary_errors_write_nothing():
    query, key, sin = torch.randn(3, 2, 8), torch.randn(3, 1, 8), torch.randn(4, 4)
    kept = query.clone()
    for position in (4, -1):
        with pytest.raises(RuntimeError, match="position_ids must hold rows of sin and cos"):
            fn.rotary_embedding(query, key, sin, sin, 8, True, torch.tensor([0, 1, position]))
    with pytest.raises(RuntimeError, match="rotary_dim must be an even number"):
        fn.rotary_embedding(query, key, sin, sin, 7, True)
    with pytest.raises(RuntimeError, match="key must"):
        fn.rotary_embedding(query, key[:2], sin, sin, 8, True)
    with pytest.raises(RuntimeError, match="rows of cos_sin_cache"):
        table = torch.randn(4, 8)
        fn.rotary_embedding_batched(torch.tensor([0, 1, 4]), query, key, 8, table, True, 8)
    assert torch.equal(query, kept)
    with pytest.raises(TypeError, match="is_nexo_style must not be given beside is_neox_style"):
        fn.rotary_embedding_batched(
            torch.zeros(3, dtype=torch.int64),
            query,
            key,
            8,
            torch.randn(4, 8),
            rotary_dim=8,
            is_neox_style=True,
            is_nexo_style=True,
        )


# -- adapters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_lora(dtype):
    rank, features, rows = 4, 16, 6
    x = torch.randn(rows, features).to(dtype)
    a, b = (torch.randn(3, 1, *s).to(dtype) for s in ((rank, features), (features, rank)))
    of = torch.tensor([0, 2, 2, -1, 1, 1])
    low = torch.zeros(rows, rank)
    assert fn.bgmv_shrink(x, a, low, of, 0.5) is low
    want = torch.stack(
        [
            0.5 * a[i, 0].float() @ r.float() if i >= 0 else low[3]
            for i, r in zip(of, x, strict=True)
        ]
    )
    close(low, want)
    base = torch.randn(rows, features).to(dtype)
    delta = torch.stack(
        [b[i, 0].float() @ r if i >= 0 else 0 * x[0].float() for i, r in zip(of, low, strict=True)]
    )
    added, written = base.clone(), base.clone()
    assert fn.bgmv_expand(low, b, added, of) is added  # as on XPU, adding is the default
    fn.bgmv_expand(
        inputs=low,
        lora_b_weights=b,
        output_tensor=written,
        lora_indices_tensor=of,
        add_inputs=False,
    )
    close(added, base.float() + delta, dtype)
    want = torch.where((of >= 0)[:, None], delta, base.float())
    close(written, want, dtype)
    wide = torch.randn(rows, features + 8).to(dtype)
    want = wide.float()
    want[:, 5 : 5 + features] += delta
    assert fn.bgmv_expand_slice(low, b, wide, of, 5, features, True) is wide
    close(wide, want, dtype)
    starts, lengths, which = (
        torch.tensor([0, 1, 4, 0]),
        torch.tensor([1, 2, 2, 9]),
        torch.tensor([0, 2, 1, 0]),
    )
    again = torch.zeros(rows, rank)
    assert fn.sgmv_shrink(x, a, again, starts, lengths, which, 3, 2, 0.5) is again
    close(again, low)
    again = base.clone()
    assert fn.sgmv_expand(low, b, again, starts, lengths, which, 3, 2, True) is again
    close(again, added, dtype)
    again = torch.zeros(rows, features + 8).to(dtype)
    assert fn.sgmv_expand_slice(low, b, again, starts, lengths, which, 3, 2, 5, features) is again
    close(again[:, 5 : 5 + features], delta, dtype)
    for batches in (-1, 5):
        with pytest.raises(OpArgumentError, match="sgmv_expand: batches must be between 0 and 4"):
            fn.sgmv_expand(low, b, again, starts, lengths, which, batches, 2, True)
    with pytest.raises(RuntimeError, match="sgmv_shrink"):
        fn.sgmv_shrink(x, a, low, starts, lengths, which, 4, 9, 1.0)  # the fourth leaves the rows
    with pytest.raises(RuntimeError, match="bgmv_shrink"):
        fn.bgmv_shrink(x, a, low, torch.tensor([0, 0, 0, 0, 0, 3]), 1.0)
    with pytest.raises(TypeError, match="bgmv_shrink: inputs must not be given beside input"):
        fn.bgmv_shrink(inputs=x, input=x, lora_weights=a, output=low, token_lora_mapping=of)


# -- compiled ---------------------------------------------------------------------------------------------------------


def test_compiles_without_graph_break():
    def function(x, residual, weight, query, key, sin, cos):
        y = fn.add_rms_norm(residual, x, weight, None, 1e-6, True)
        y = fn.silu_mul(y, x)
        query, key = fn.rotary_embedding(query, key, sin, cos, 8, True)
        low = y.new_zeros(3, 4)
        fn.bgmv_shrink(
            input=y,
            lora_weights=weight.view(1, 1, 8).expand(1, 4, 8).contiguous(),
            output=low,
            token_lora_mapping=torch.zeros(3, dtype=torch.int64),
        )
        return y, residual, query + 1, fn.fast_layer_norm(key, (8,), weight, None, 1e-5), low

    arguments = [
        torch.randn(3, 8),
        torch.randn(3, 8),
        torch.randn(8),
        torch.randn(3, 2, 8),
        torch.randn(3, 2, 8),
        torch.randn(3, 4),
        torch.randn(3, 4),
    ]
    mine = [t.clone() for t in arguments]
    want = function(*arguments)
    got = torch.compile(function, backend="aot_eager", fullgraph=True)(*mine)
    for a, b in zip((*got, *mine), (*want, *arguments), strict=True):
        close(a, b)


def test_meta_tensors_are_computed_by_shape():
    x = torch.empty(3, 8, device="meta")
    assert fn.silu_mul(x, x).shape == (3, 8)
    assert fn.rms_norm(x, None, 1e-6).device.type == "meta"

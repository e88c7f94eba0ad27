# SPDX-License-Identifier: Apache-2.0
"""The op namespaces of Intel Extension for PyTorch: same names, argument order and results."""

from __future__ import annotations

import pytest
import torch

from ipex.compat.torch_ops import alias_names
from ipex_core.errors import OpArgumentError
from ipex_core.packing import woq

pytestmark = pytest.mark.usefixtures("no_gradients")

OPS = torch.ops.torch_ipex
PREPACK = torch.ops.ipex_prepack

#: Raw ops that other projects, or the Python layers they use, call by name.
WANTED = (
    "ipex_prepack::woq_linear_pack_weight",
    "ipex_prepack::woq_linear_unpack_weight",
    *(
        f"torch_ipex::{name}"
        for name in (
            "ROIAlign_backward",
            "ROIAlign_forward",
            "adagrad_fused_step",
            "adam_fused_step",
            "add_layernorm",
            "add_rmsnorm",
            "add_softmax_",
            "batch_score_nms",
            "bmm",
            "bmm_add",
            "box_head_nms",
            "cast_from_fp8",
            "cast_to_fp8",
            "cat_bfloat16_float",
            "causal_conv1d_fn",
            "causal_conv1d_update",
            "cumsum",
            "cumsum_",
            "dequantize_4bit",
            "dequantize_nf4",
            "dynamic_scaled_fp8_quant",
            "flash_attn_varlen_func",
            "embedding_bag",
            "fp8_gemm",
            "fp8_gemm_w8a16",
            "fp8_linear",
            "frozen_batch_norm",
            "ipex_lstm",
            "lamb_fused_step",
            "lars_fused_step",
            "locations_to_boxes",
            "masked_multihead_self_attention",
            "nms",
            "packed_add",
            "parallel_scale_back_batch",
            "punica_bgmv_expand",
            "punica_bgmv_expand_slice",
            "punica_bgmv_shrink",
            "punica_sgmv_expand",
            "punica_sgmv_expand_slice",
            "punica_sgmv_shrink",
            "reshape_and_cache",
            "rmsnorm",
            "rnnt_embedding",
            "rnnt_update_batch",
            "rpn_nms",
            "selective_scan_fn",
            "selective_state_update",
            "sgd_fused_step",
            "single_query_cached_kv_attention",
            "split_float_bfloat16",
            "static_scaled_fp8_quant",
            "sync_master_weight_to_bf16",
            "sync_master_weight_to_fp16",
            "woq_linear",
        )
    ),
)


@pytest.mark.parametrize("name", WANTED)
def test_name_is_registered(name):
    assert name in alias_names()
    namespace, _, op = name.partition("::")
    assert callable(getattr(getattr(torch.ops, namespace), op))


def test_norms():
    x, y, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8) + 0.5
    want = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    torch.testing.assert_close(OPS.rmsnorm(x, weight, 1e-6), want)

    want = torch.nn.functional.rms_norm(x + y, (8,), weight, 1e-6)
    for add_back in (False, True):
        first, into = x.clone(), y.clone()
        torch.testing.assert_close(OPS.add_rmsnorm(first, into, weight, 1e-6, add_back), want)
        torch.testing.assert_close(into, x + y if add_back else y)
        torch.testing.assert_close(first, x)

    bias = torch.randn(8)
    want = torch.nn.functional.layer_norm(x + 2 * y, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(OPS.add_layernorm(x, y, 2, [8], weight, bias, 1e-5), want)
    want = torch.nn.functional.layer_norm(x + y, (3, 8))
    torch.testing.assert_close(OPS.add_layernorm(x, y, 1, [3, 8], None, None, 1e-5), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_with_weights_of_any_shape_and_dtype(dtype):
    x, y = torch.randn(3, 5, 8).to(dtype), torch.randn(3, 5, 8).to(dtype)
    near = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-6}
    for weight in (torch.rand(3, 5, 8), torch.rand(5, 8), torch.rand(8).half()):
        for total, got in (
            (x, OPS.rmsnorm(x, weight, 1e-6)),
            (x + y, OPS.add_rmsnorm(x, y, weight, 1e-6, False)),
        ):
            want = torch.nn.functional.rms_norm(total.float(), (8,), None, 1e-6) * weight.float()
            torch.testing.assert_close(got, want.to(dtype), **near)
    for weight in (torch.rand(7), torch.rand(3, 7), torch.rand(2, 3, 5, 8)):
        with pytest.raises(OpArgumentError, match=r"^rmsnorm: weight must be broadcastable to x"):
            OPS.rmsnorm(x, weight.half(), 1e-6)


@pytest.mark.parametrize("shape", [(8,), (5, 8)])
def test_rms_norm_in_float64(shape):
    x, y, weight = (torch.randn(s, dtype=torch.float64) for s in ((3, 5, 8), (3, 5, 8), shape))
    for total, got in (
        (x, OPS.rmsnorm(x, weight, 1e-6)),
        (x + y, OPS.add_rmsnorm(x, y, weight, 1e-6, False)),
    ):
        want = torch.nn.functional.rms_norm(total, (8,), None, 1e-6) * weight
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_add_softmax_writes_to_its_first_argument():
    a, b = torch.randn(2, 4, 8), torch.randn(2, 1, 8)
    want = (a + b).softmax(-1)
    result = OPS.add_softmax_(a, b)
    assert result.data_ptr() == a.data_ptr()
    torch.testing.assert_close(a, want)


def test_norm_differentiates_and_compiles():
    x, weight = torch.randn(3, 8), torch.rand(8)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        OPS.rmsnorm(leaf, weight, 1e-6).sum().backward()
    assert leaf.grad is not None
    compiled = torch.compile(
        lambda t: OPS.rmsnorm(t, weight, 1e-6), fullgraph=True, backend="aot_eager"
    )
    torch.testing.assert_close(compiled(x), OPS.rmsnorm(x, weight, 1e-6))


@pytest.mark.parametrize("lowp_mode", [0, 2, 3])
@pytest.mark.parametrize("form", ["nf4", "int8", "int4"])
def test_woq(form, lowp_mode):
    n, k, group = 48, 64, 32
    weight, x, bias = torch.randn(n, k) * 0.1, torch.randn(5, k), torch.randn(n)
    qweight, scales, _ = woq.quantize(weight, form, group, True)
    packed, scale_list, zeros, biases, compensation = PREPACK.woq_linear_pack_weight(
        qweight, form, [n, k], scales, None, bias, None, group, lowp_mode
    )
    assert torch.equal(PREPACK.woq_linear_unpack_weight(packed, form, [n, k], lowp_mode), qweight)
    got = OPS.woq_linear(
        x, packed, form, [n, k], scale_list, zeros, biases, None, group, lowp_mode, 1, compensation
    )
    plain = torch.ops.ipex.pack_woq_weight(qweight, scales, None, form, k, group)
    exact = torch.ops.ipex.dequantize_woq_weight(plain, n, k, torch.float32)
    torch.testing.assert_close(
        got, torch.nn.functional.linear(x, exact, bias), rtol=5e-2, atol=5e-2
    )
    unpacked = OPS.woq_linear(
        x, qweight, form, [n, k], scale_list, zeros, biases, None, group, lowp_mode, 1
    )
    torch.testing.assert_close(unpacked, got)


def test_woq_bad_arguments():
    qweight, scales = torch.zeros(32, 32, dtype=torch.uint8), torch.ones(32, 1)
    with pytest.raises(RuntimeError, match="weight_dtype must be one of"):
        PREPACK.woq_linear_pack_weight(qweight, "int3", [32, 64], scales, None, None, None, -1, 0)
    with pytest.raises(RuntimeError, match=r"lowp_mode must be in 0\.\.3, got 9"):
        PREPACK.woq_linear_pack_weight(qweight, "nf4", [32, 64], scales, None, None, None, -1, 9)
    with pytest.raises(RuntimeError, match="packed by woq_linear_pack_weight"):
        PREPACK.woq_linear_unpack_weight(qweight.view(-1), "nf4", [32, 64], 0)


def test_dequantize():
    weight = torch.randn(32, 64)
    qweight, scales, _ = woq.quantize(weight, "nf4", 64, True)
    got = OPS.dequantize_nf4(qweight, scales, 64, torch.float32)
    assert (got - weight).abs().max() < 0.16 * scales.max()
    again = OPS.dequantize_4bit(qweight.view(-1, 1), "nf4", [32, 64], scales.view(-1), None, 64)
    assert torch.equal(got, again)


@pytest.mark.parametrize("lowp_mode", [0, 3])
def test_woq_of_public_quantizers(lowp_mode):
    """What `quantize_per_block` and `quantize_per_channel` return fits the ops as it is, lists included."""
    from ipex_quant import (
        WoqWeightDtype,
        dequantize_per_block,
        quantize_per_block,
        quantize_per_channel,
    )

    n, k = 48, 64
    weight, x = torch.randn(n, k) * 0.1 + 0.02, torch.randn(5, k)
    codes, scales, zeros = quantize_per_block(weight, WoqWeightDtype.INT4, 32)
    assert zeros.dtype == torch.int32
    exact = dequantize_per_block(codes, scales, zeros, WoqWeightDtype.INT4, 32, [n, k])
    rest = (None, None, 32, lowp_mode)
    packed, scale_list, zero_list, _, other = PREPACK.woq_linear_pack_weight(
        codes, "int4", [n, k], scales, zeros, *rest
    )
    again = PREPACK.woq_linear_pack_weight(codes, "int4", [n, k], scale_list, zero_list, *rest)[0]
    assert torch.equal(again, packed)
    for qweight in (packed, codes):
        got = OPS.woq_linear(x, qweight, "int4", [n, k], scale_list, zero_list, *rest, 7, other)
        want, near = x @ exact.T, 5e-2 if lowp_mode else 1e-4
        torch.testing.assert_close(got, want, rtol=near, atol=near)
    codes, scales, zeros = quantize_per_channel(weight, WoqWeightDtype.INT4)
    rest = (None, None, -1, lowp_mode)
    packed = PREPACK.woq_linear_pack_weight(codes, "int4", [n, k], scales, zeros, *rest)[0]
    assert torch.equal(PREPACK.woq_linear_unpack_weight(packed, "int4", [n, k], lowp_mode), codes)


def test_dequantize_nf4_with_scales_per_channel():
    from ipex_quant import WoqWeightDtype, dequantize_per_channel, quantize_per_channel

    weight = torch.randn(32, 64)
    codes, scales, _ = quantize_per_channel(weight, WoqWeightDtype.NF4, sym_quant=True)
    assert scales.shape == (32,)
    want = dequantize_per_channel(codes, scales, None, WoqWeightDtype.NF4, [32, 64])
    assert torch.equal(OPS.dequantize_nf4(codes, scales, -1, torch.float32), want)


def test_caches():
    blocks, heads, size, block_size = 4, 2, 32, 16
    key_cache = torch.zeros(blocks, heads, block_size, size)
    value_cache = torch.zeros_like(key_cache)
    key, value = torch.randn(20, heads, size), torch.randn(20, heads, size)
    slots = torch.arange(20, dtype=torch.int32)
    OPS.reshape_and_cache(key, value, key_cache, value_cache, slots, "auto", 1.0, 1.0)
    query = torch.randn(1, 4, size)
    tables = torch.arange(2, dtype=torch.int32)[None]
    lens = torch.tensor([20], dtype=torch.int32)
    want = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        key.transpose(0, 1)[None],
        value.transpose(0, 1)[None],
        enable_gqa=True,
    )[0].transpose(0, 1)

    out = torch.empty_like(query)
    mapping = torch.arange(heads, dtype=torch.int32).repeat_interleave(2)
    OPS.single_query_cached_kv_attention(
        out, query, key_cache, value_cache, mapping, size**-0.5, tables, lens, block_size, 20,
        None, -1, 1.0, 1.0, -1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, want)

    out = torch.empty_like(query)
    starts_q = torch.tensor([0, 1], dtype=torch.int32)
    starts_kv = torch.tensor([0, 20], dtype=torch.int32)
    OPS.flash_attn_varlen_func(
        out, query, key_cache, value_cache, starts_q, starts_kv, 1, 20, size**-0.5, True, tables,
        None, -1, -1, "auto", 1.0, 1.0, -1.0,
    )  # fmt: skip
    torch.testing.assert_close(out, want)


def test_indirect_access_cache():
    batch, heads, size, prompt, room = 2, 4, 32, 5, 16
    query, key, value = (torch.randn(batch, prompt, heads, size) for _ in range(3))
    caches = [torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)]
    beams = torch.zeros(1, batch, dtype=torch.int64)
    mask = torch.zeros(batch, 1, prompt, prompt)
    seq_info = torch.zeros(1, dtype=torch.int64)
    out, _, *caches, beams = OPS.masked_multihead_self_attention(
        query, key, value, *caches, beams, seq_info, size**0.5, room, None, mask, True
    )
    want = torch.nn.functional.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True
    )
    torch.testing.assert_close(out, want)

    step = [torch.randn(batch, 1, heads, size) for _ in range(3)]
    beams[prompt - 1] = torch.arange(batch)  # as _reorder_cache writes it
    plain = [c.clone() for c in caches], torch.arange(batch).expand(caches[0].shape[0], -1)
    out, _, *caches, beams = OPS.masked_multihead_self_attention(
        *step, *caches, beams, seq_info + prompt, size**0.5, room, None,
        torch.zeros(batch, 1, 1, prompt + 1), True,
    )  # fmt: skip
    want = torch.nn.functional.scaled_dot_product_attention(
        step[0].transpose(1, 2),
        torch.cat([key, step[1]], 1).transpose(1, 2),
        torch.cat([value, step[2]], 1).transpose(1, 2),
    )
    torch.testing.assert_close(out, want)
    # Indices of a caller without what the first call notes of the prompts: [positions, sequences].
    out, *_ = OPS.masked_multihead_self_attention(
        *step, *plain[0], plain[1], seq_info + prompt, size**0.5, room, None,
        torch.zeros(batch, 1, 1, prompt + 1), True,
    )  # fmt: skip
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_history_of_beams_without_the_rows_of_prompts(dtype):
    beams, heads, size, past, room = 4, 2, 16, 6, 9
    query, key, value = (torch.randn(beams, 1, heads, size).to(dtype) for _ in range(3))
    caches = [torch.randn(room, beams, heads, size).to(dtype) for _ in range(2)]
    index = torch.randint(0, beams, (room, beams))  # [max_positions, n]
    keys, values = ([t] for t in (key[:, 0], value[:, 0]))
    row = torch.arange(beams)
    for position in reversed(range(past)):
        row = index[position, row]
        keys.insert(0, caches[0][position, row])
        values.insert(0, caches[1][position, row])
    want = torch.nn.functional.scaled_dot_product_attention(
        query.transpose(1, 2), torch.stack(keys, 2), torch.stack(values, 2)
    )
    mask = torch.zeros(beams, 1, 1, past + 1, dtype=dtype)
    length = torch.tensor([past])
    out, _, new, _, found = OPS.masked_multihead_self_attention(
        query, key, value, *caches, index, length, size**0.5, room, None, mask, False
    )
    near = {"rtol": 2e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out, want, **near)
    assert torch.equal(new[past], key[:, 0]) and torch.equal(found[:past], index[:past])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float8_e5m2])
def test_cross_attention(cache_dtype):
    """A history of -1: the caches are all keys and values, batch first."""
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    caches = key.to(cache_dtype), value.to(cache_dtype)
    mask = torch.zeros(2, 1, 1, 6)
    mask[0, ..., 1], mask[1, ..., 4:] = -1e4, -1e4
    none, beams = torch.empty(2, 3, 2, 8), torch.zeros(6, 2, dtype=torch.long)
    out, _, *kept = OPS.masked_multihead_self_attention(
        query, none, none, *caches, beams, torch.tensor(-1), 3.0, 6, None, mask
    )
    heads = (t.float().transpose(1, 2) for t in (query, *caches))
    want = torch.nn.functional.scaled_dot_product_attention(
        *heads, attn_mask=mask, scale=1 / 3.0, enable_gqa=True
    )
    torch.testing.assert_close(out, want)
    for one, two in zip(kept, (*caches, beams), strict=True):
        assert one.data_ptr() == two.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_quant(dtype):
    x = torch.randn(4, 16)
    out, scale = torch.empty(4, 16, dtype=dtype), torch.zeros(1)
    OPS.dynamic_scaled_fp8_quant(out, x, scale)
    torch.testing.assert_close(out.float() * scale, x, rtol=0.13, atol=1e-3)
    again = torch.empty_like(out)
    OPS.static_scaled_fp8_quant(again, x, scale)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))


def test_fp8_linear():
    x, w, bias = torch.randn(3, 16), torch.randn(4, 16), torch.randn(4)
    scale, scale_inv = torch.tensor([1.0, 32.0, 1.0, 64.0]), torch.zeros(4)
    history = torch.zeros(2, 4)
    a = OPS.cast_to_fp8(x, scale, history, scale_inv, 1, 24)
    b = OPS.cast_to_fp8(w, scale, history, scale_inv, 3, 23)
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn, torch.float8_e5m2)
    assert torch.equal(history[0, [1, 3]], torch.stack([x.abs().max(), w.abs().max()]))
    assert scale_inv.tolist() == [0.0, 1 / 32, 0.0, 1 / 64]
    back = OPS.cast_from_fp8(a, scale_inv, 1, 24, torch.bfloat16)
    assert back.dtype == torch.bfloat16 and torch.equal(
        back.float(), (x * 32).to(a.dtype).float() / 32
    )
    out = torch.empty(3, 4)
    y = OPS.fp8_linear(a, scale_inv, 1, 24, b, scale_inv, 3, 23, bias, out)
    want = back.float() @ (b.float() / 64).t() + bias
    torch.testing.assert_close(out, want)
    assert torch.equal(y, out)
    with pytest.raises(RuntimeError, match="itype must be 24"):
        OPS.cast_from_fp8(a, scale_inv, 1, 2, torch.float32)


def test_bmm():
    a, b, c = torch.randn(3, 4, 8), torch.randn(3, 8, 5), torch.randn(3, 4, 5)
    torch.testing.assert_close(OPS.bmm_add(c, a, b, 2), c + 2 * (a @ b))
    out = torch.empty(3, 4, 5)
    OPS.bmm(out, a, b.transpose(1, 2).contiguous(), False, None)
    torch.testing.assert_close(out, a @ b)
    packed = OPS.convert_weight_packed(b.transpose(1, 2).contiguous(), False)
    torch.testing.assert_close(OPS.bmm(torch.empty(3, 4, 5), a, packed, True, None), a @ b)
    with pytest.raises(RuntimeError, match="scale must be None"):
        OPS.bmm(out, a, packed, False, torch.ones(()))


def test_lora():
    rows, hidden, rank, out_features = 5, 32, 8, 16
    x = torch.randn(rows, hidden)
    shrink, expand = torch.randn(3, rank, hidden), torch.randn(3, out_features, rank)
    indices = torch.tensor([0, 2, 1, 1, 0])
    low = torch.zeros(rows, rank)
    OPS.punica_bgmv_shrink(low, x, shrink, indices, 0.5)
    torch.testing.assert_close(low, 0.5 * torch.einsum("th,trh->tr", x, shrink[indices]))
    y = torch.ones(rows, out_features)
    OPS.punica_bgmv_expand(y, low, expand, indices, True)
    want = 1 + torch.einsum("tr,tor->to", low, expand[indices])
    torch.testing.assert_close(y, want)
    wide = torch.zeros(rows, 2 * out_features)
    OPS.punica_bgmv_expand_slice(wide, low, expand, indices, out_features, out_features, True)
    torch.testing.assert_close(wide[:, out_features:], want - 1)
    assert not wide[:, :out_features].any()

    lens, adapters = torch.tensor([2, 3]), torch.tensor([2, 0])
    each = adapters.repeat_interleave(lens)
    OPS.punica_sgmv_shrink(low, x, shrink, adapters, lens, 1.0)
    torch.testing.assert_close(low, torch.einsum("th,trh->tr", x, shrink[each]))
    y = torch.zeros(rows, out_features)
    OPS.punica_sgmv_expand(y, low, expand, adapters, lens, False)
    torch.testing.assert_close(y, torch.einsum("tr,tor->to", low, expand[each]))


def test_state_space():
    batch, dim, steps, width, n = 2, 8, 6, 4, 16
    x, weight, bias = torch.randn(batch, dim, steps), torch.randn(dim, width), torch.randn(dim)
    y, _ = OPS.causal_conv1d_fn(x, weight, bias, None, None, True)
    padded = torch.nn.functional.pad(x, (width - 1, 0))
    want = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=dim)
    torch.testing.assert_close(y, torch.nn.functional.silu(want))
    last = torch.empty(batch, dim, width - 1)
    OPS.causal_conv1d_fn(x[..., :-1], weight, bias, None, last, True)
    step, states = OPS.causal_conv1d_update(x[..., -1], last, weight, bias, True)
    torch.testing.assert_close(step, y[..., -1])
    assert states.data_ptr() == last.data_ptr()

    delta, a = torch.rand(batch, dim, steps), -torch.rand(dim, n)
    b, c = torch.randn(batch, n, steps), torch.randn(batch, n, steps)
    whole, state = OPS.selective_scan_fn(x, delta, a, b, c, None, None, None, False, True)
    _, before = OPS.selective_scan_fn(
        *(t[..., :-1] if t.dim() == 3 else t for t in (x, delta, a, b, c)),
        None, None, None, False, True,
    )  # fmt: skip
    ends = (t[..., -1] for t in (x, delta))
    out = OPS.selective_state_update(
        before, *ends, a, b[..., -1], c[..., -1], None, None, None, False
    )
    torch.testing.assert_close(out, whole[..., -1], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(before, state, rtol=1e-4, atol=1e-4)

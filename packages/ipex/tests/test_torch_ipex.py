# SPDX-License-Identifier: Apache-2.0
"""The op namespaces of Intel Extension for PyTorch: same names, argument order and results."""

from __future__ import annotations

import pytest
import torch

import ipex
from ipex._torch_ipex._alias_op import alias_names
from ipex_core import _woq

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


@pytest.fixture(autouse=True)
def no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


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
        into = x.clone()
        torch.testing.assert_close(OPS.add_rmsnorm(into, y, weight, 1e-6, add_back), want)
        torch.testing.assert_close(into, x + y if add_back else x)

    bias = torch.randn(8)
    want = torch.nn.functional.layer_norm(x + 2 * y, (8,), weight, bias, 1e-5)
    torch.testing.assert_close(OPS.add_layernorm(x, y, 2, [8], weight, bias, 1e-5), want)
    want = torch.nn.functional.layer_norm(x + y, (3, 8))
    torch.testing.assert_close(OPS.add_layernorm(x, y, 1, [3, 8], None, None, 1e-5), want)


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
    qweight, scales, _ = _woq.quantize(weight, form, group, True)
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
    qweight, scales, _ = _woq.quantize(weight, "nf4", 64, True)
    got = OPS.dequantize_nf4(qweight, scales, 64, torch.float32)
    assert (got - weight).abs().max() < 0.16 * scales.max()
    again = OPS.dequantize_4bit(qweight.view(-1, 1), "nf4", [32, 64], scales.view(-1), None, 64)
    assert torch.equal(got, again)


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
    with pytest.raises(RuntimeError, match="is_vnni must be False"):
        OPS.bmm(out, a, b, True, None)


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


def test_detection():
    x, rois = torch.randn(2, 3, 8, 8), torch.tensor([[0, 1, 1, 6, 6.0], [1, 0, 2, 5, 5]])
    y = OPS.ROIAlign_forward(x, rois, 1.0, 2, 2, 2, True)
    torch.testing.assert_close(y, torch.ops.ipex.roi_align(x, rois, 1.0, 2, 2, 2, True))
    grad = OPS.ROIAlign_backward(y, rois, 1.0, 2, 2, 2, 3, 8, 8, 2, True, False)
    torch.testing.assert_close((grad * x).sum(), (y * y).sum())
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        OPS.ROIAlign_forward(leaf, rois, 1.0, 2, 2, 2, True).backward(y)
    torch.testing.assert_close(leaf.grad, grad)
    ones, zeros = torch.ones(3), torch.zeros(3)
    torch.testing.assert_close(OPS.frozen_batch_norm(x, ones, zeros, zeros, ones, 0.0), x)
    dets = torch.tensor([[0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30.0]])
    scores = torch.tensor([0.9, 0.7, 0.5])
    assert OPS.nms(dets, scores, 0.5, True).tolist() == [0, 2]
    boxes, kept = OPS.rpn_nms(dets[None], scores[None], [(40, 40)], 1, 0.5, 1)
    assert boxes[0].tolist() == [[0, 0, 10, 10]]
    assert kept[0].numel() == 1
    both = torch.stack([zeros, scores], 1)
    _, labels, values, counts = OPS.batch_score_nms(dets[None] / 40, both[None], 0.5, 5)
    assert labels.tolist() == [1.0, 1.0]
    assert labels.dtype == torch.float32  # as there
    torch.testing.assert_close(values, torch.tensor([0.5, 0.9]))
    assert counts.tolist() == [2]
    _, _, labels = OPS.box_head_nms([dets.repeat(1, 2)], [both], [(40, 40)], 0.1, 0.5, 5, 2)
    assert labels[0].tolist() == [1, 1]
    where, prior = torch.randn(1, 3, 4), torch.rand(3, 4)
    corners = OPS.locations_to_boxes(where, prior, 0.1, 0.2)
    same, probability = OPS.parallel_scale_back_batch(where, both[None], prior, 0.1, 0.2)
    torch.testing.assert_close(same, corners)
    torch.testing.assert_close(probability.sum(-1), torch.ones(1, 3))


def test_recurrent():
    lstm = torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True, batch_first=True).eval()
    x, state = torch.randn(2, 5, 4), [torch.zeros(4, 2, 3), torch.zeros(4, 2, 3)]
    got = OPS.ipex_lstm(x, state, lstm._flat_weights, True, 2, 0.0, False, True, True)
    y, (h, c) = lstm(x)
    for mine, stock in zip(got, (y, h, c), strict=True):
        torch.testing.assert_close(mine, stock)
    torch.testing.assert_close(OPS.cumsum(x, 1), x.cumsum(1))
    assert OPS.cumsum(x, 1, dtype=torch.float64).dtype == torch.float64
    out = torch.empty_like(x)
    assert OPS.cumsum(x, 1, out=out) is out
    torch.testing.assert_close(out, x.cumsum(1))
    table, out = torch.randn(5, 3), torch.ones(2, 3)
    OPS.rnnt_embedding(table, torch.tensor([[-1], [4]]), out, -1, 2, 3)
    torch.testing.assert_close(out, torch.stack([torch.zeros(3), table[4]]))


def test_rnnt_decoding():
    """Two sequences, labels of a script: blanks, a frame that is full, ends at different times."""
    blank, sos = 9, -1
    zeros = torch.zeros(2, dtype=torch.int32)
    counters = [zeros.clone() for _ in range(6)]
    put, last = torch.zeros(2, dtype=torch.int64), torch.full((2,), sos)
    labels = torch.full((2, 6), sos)
    hidden = [torch.zeros(1, 2, 3) for _ in range(2)]
    x = torch.randn(3, 2, 4).transpose(0, 1)
    f = x[:, :1].clone()
    script = [[5, blank], [6, 1], [7, 2], [blank, 3], [4, 4], [blank, 4]]
    ended = False
    for step, k in enumerate(script):
        assert not ended
        new = [torch.full((1, 2, 3), float(step + 1)) for _ in range(2)]
        ended = OPS.rnnt_update_batch(
            torch.tensor(k),
            torch.tensor([3, 2]),
            *counters,
            put,
            labels,
            last,
            *hidden,
            *new,
            x,
            f,
            2,
            blank,
            2,
            sos,
            3,
        )
    assert ended is True
    assert labels[:, 1:5].tolist() == [[5, 6, 7, 4], [1, 2, sos, sos]]
    assert hidden[0][0, :, 0].tolist() == [5.0, 3.0]


def test_recommendation():
    x = [torch.randn(3, 4) for _ in range(3)]
    out = OPS.interaction_forward(x)
    assert torch.equal(out, torch.ops.ipex.interaction(x))
    assert [g.shape for g in OPS.interaction_backward(out, x)] == [t.shape for t in x]

    none = [torch.empty(0, dtype=torch.bfloat16)] * 2
    tables, squares = ([torch.ones(n, 4) * value for n in (5, 6)] for value in (1, 0))
    lookups = ([torch.tensor([1, 1, 2])] * 2, [torch.tensor([0, 2])] * 2)
    bags = OPS.merged_embeddingbag_forward(tables, *lookups, 0, False)
    assert [b[:, 0].tolist() for b in bags] == [[2.0, 1.0]] * 2
    means = OPS.merged_embeddingbag_forward(tables, *lookups, 1, False)
    assert [b[:, 0].tolist() for b in means] == [[1.0, 1.0]] * 2
    assert OPS.merged_embeddingbag_cat_forward(tables, *lookups, x[0][:2]).shape == (2, 12)
    one = [value[0] for value in lookups]
    assert torch.equal(OPS.embedding_bag(tables[0], *one, False, False), bags[0])
    table = tables[0].clone().requires_grad_()
    with torch.enable_grad():
        OPS.embedding_bag(table, *one, False, False).sum().backward()
    ones = [torch.ones_like(value) for value in bags]
    dense = OPS.merged_embeddingbag_backward_cpu(ones, tables, *lookups, 0, False)
    torch.testing.assert_close(dense[0], table.grad)
    grads = [torch.ones(2, 4)] * 2
    OPS.merged_embeddingbag_backward_sgd(grads, tables, *lookups, 0, False, none, 0.0, 0.25)
    assert tables[0][:, 0].tolist() == [1.0, 0.5, 0.75, 1.0, 1.0]
    OPS.merged_embeddingbag_backward_adagrad(
        grads, tables, *lookups, 0, False, squares, none, 0.0, 0.25
    )
    assert squares[1][:, 0].tolist() == [0.0, 4.0, 1.0, 0.0, 0.0, 0.0]
    assert tables[0][:, 0].tolist() == [1.0, 0.25, 0.5, 1.0, 1.0]


def test_steps_of_optimizers() -> None:
    """Each step equals that of the op below; an empty second parameter stands for none."""
    none = torch.empty(0)
    start, grad = torch.randn(4, 3), torch.randn(4, 3)

    p = start.clone()
    buffer = OPS.sgd_fused_step(p, grad, None, none, 0.9, 0.1, 0.0, 0.0, False)
    assert torch.equal(buffer, grad)
    again = OPS.sgd_fused_step(p, grad, buffer, none, 0.9, 0.1, 0.0, 0.0, False)
    torch.testing.assert_close(p, start - 0.1 * grad - 0.1 * 1.9 * grad)
    assert again.data_ptr() == buffer.data_ptr()
    assert OPS.sgd_fused_step(p, grad, None, none, 0.0, 0.1, 0.0, 0.0, False) is None

    p, total = start.clone(), torch.zeros(4, 3)
    out = OPS.adagrad_fused_step(p, grad, total, none, 1.0, 0.1, 0.0, 0.0, 1e-10)
    assert out[0] is p or out[0].data_ptr() == p.data_ptr()
    torch.testing.assert_close(p, start - 0.1 * grad.sign(), rtol=1e-4, atol=1e-4)

    p, states = start.clone(), [torch.zeros(4, 3) for _ in range(2)]
    OPS.adam_fused_step(p, *states, none, grad, none, False, 1.0, 0.9, 0.999, 0.1, 0.0, 1e-8)
    torch.testing.assert_close(p, start - 0.1 * grad.sign(), rtol=1e-4, atol=1e-4)

    p, states = start.clone(), [torch.zeros(4, 3) for _ in range(2)]
    OPS.lamb_fused_step(p, *states, grad, none, 1, 0.9, 0.999, 0.1, 0.0, 1e-8)
    assert not torch.equal(p, start)
    p = start.clone()
    assert (
        OPS.lars_fused_step(p, grad, None, none, 0.9, 0.1, 1e-3, 0.0, 0.0, 0.0, False) is not None
    )
    assert not torch.equal(p, start)


@pytest.mark.parametrize("sparse", [False, True])
def test_packed_add(sparse: bool) -> None:
    value = torch.randn(5, 4)
    top, bottom = OPS.split_float_bfloat16(value)
    assert torch.equal(OPS.cat_bfloat16_float(top, bottom), value)
    grad = torch.randn(5, 4).bfloat16()
    want = value + -0.1 * grad.float()
    OPS.packed_add(top, bottom, grad.to_sparse() if sparse else grad, -0.1)
    torch.testing.assert_close(OPS.cat_bfloat16_float(top, bottom), want)


def test_copies_of_master_weights() -> None:
    master = torch.randn(7)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        low = torch.zeros(7, dtype=dtype)
        getattr(OPS, f"sync_master_weight_to_{name}")(master, low)
        assert torch.equal(low, master.to(dtype))


def test_names_of_tpp() -> None:
    import intel_extension_for_pytorch as old
    from intel_extension_for_pytorch.cpu.tpp.fused_bert import fast_bert
    from intel_extension_for_pytorch.cpu.tpp.optim import AdamW, DistLamb, clip_grad_norm_
    from intel_extension_for_pytorch.optim._functional import adam_step
    from intel_extension_for_pytorch.optim._lamb import Lamb
    from intel_extension_for_pytorch.optim._optimizer_utils import optimizer_fusion

    assert fast_bert is ipex.fast_bert and old.tpp is ipex.cpu.tpp and ipex.tpp.optim.AdamW is AdamW
    assert all(map(callable, (DistLamb, clip_grad_norm_, adam_step, Lamb, optimizer_fusion)))


def test_products_of_8_bit_operands_as_on_xpu():
    torch.manual_seed(0)
    x, w, bias = torch.randn(3, 16), torch.randn(5, 16), torch.randn(5)
    dtype = torch.float8_e4m3fn
    scale = torch.tensor([4.0])
    q, largest = OPS.cast_to_fp8(x, scale, False, True, dtype, None)
    assert q.dtype == dtype and largest == x.abs().max()
    torch.testing.assert_close(OPS.cast_from_fp8(q, 1 / scale, torch.float32), q.float() / 4)
    qw, _ = OPS.cast_to_fp8(w, None, False, False, dtype, None)
    y = OPS.fp8_gemm(q, False, qw, True, None, torch.float32, 1 / scale, None, bias, False)
    expected = torch.nn.functional.linear(q.float() / 4, qw.float(), bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, w, bias), rtol=0.2, atol=0.5)
    again = OPS.fp8_gemm(q, False, qw, True, y, torch.float32, 1 / scale, None, bias, True)
    torch.testing.assert_close(again, expected + y)
    y = OPS.fp8_gemm_w8a16(x.bfloat16(), qw, True, torch.ones(5, 1), bias.bfloat16())
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(
        y.float(), torch.nn.functional.linear(x, qw.float(), bias), rtol=0.05, atol=0.1
    )
    with pytest.raises(ValueError, match="D must be a tensor"):
        OPS.fp8_gemm(q, False, qw, True, None, torch.float32, accumulate=True)
    with pytest.raises(ValueError, match="stochastic"):
        OPS.cast_to_fp8(x, scale, True, True, dtype, None)

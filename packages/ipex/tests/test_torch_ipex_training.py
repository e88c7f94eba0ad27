# SPDX-License-Identifier: Apache-2.0
"""The op namespaces of Intel Extension for PyTorch: detection, recommendation, steps of optimizers."""

from __future__ import annotations

import pytest
import torch

import ipex

pytestmark = pytest.mark.usefixtures("no_gradients")

OPS = torch.ops.torch_ipex


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
    with pytest.raises(
        RuntimeError, match="rnnt_embedding: out must hold a row of table for each idx"
    ):
        OPS.rnnt_embedding(table, torch.tensor([[-1], [4]]), out, -1, 2, 4)


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


def test_rnnt_as_ipex_calls_it() -> None:
    """Frames are ``[B, H]``; a sequence may have ended before it begins, or be longer than ``x``."""
    batch, frames, layers, sos, blank = 4, 6, 2, -1, 1
    x = torch.randn(batch, frames, 3)
    state = [torch.zeros(layers, batch, 5) for _ in range(2)]
    new = [torch.randn(layers, batch, 5) for _ in range(2)]
    counters = [torch.zeros(batch, dtype=torch.int32) for _ in range(6)]
    labels = torch.full((batch, 20), sos)
    put, last = torch.zeros(batch, dtype=torch.int64), torch.full((batch,), sos)
    k, lengths = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 3, 1, frames + 9], dtype=torch.int32)
    f = x[:, 0].clone()
    assert not OPS.rnnt_update_batch(
        *(k, lengths, *counters, put, labels, last, *state, *new, x, f),
        *(30, blank, batch, sos, frames),
    )
    label_col, _, time_idxs, blankness, ended, stored = (c.tolist() for c in counters)
    assert stored == [0, 0, 1, 1] == label_col  # the first has no frame, the second is a blank
    assert (time_idxs, blankness, ended) == ([0, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0])
    assert labels[:, 1].tolist() == [sos, sos, 2, 3]
    assert torch.equal(f[1], x[1, 1]) and torch.equal(f[3], x[3, 0])
    assert torch.equal(state[0][:, 2:], new[0][:, 2:]) and not state[0][:, :2].any()


def test_split_keeps_strides() -> None:
    for x in (
        torch.randn(5, 7).t(),
        torch.randn(9, 9)[2:5, 2:5],
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(8, 4, 1, 1).to(memory_format=torch.channels_last),
    ):
        top, low = OPS.split_float_bfloat16(x)
        assert top.stride() == low.stride() == x.stride()
        joined = OPS.cat_bfloat16_float(top, low)
        assert torch.equal(joined, x) and joined.stride() == x.stride()
    expanded = torch.randn(5, 1).expand(5, 3)
    top, low = OPS.split_float_bfloat16(expanded)
    assert torch.equal(OPS.cat_bfloat16_float(top, low), expanded)


def test_detection_in_float64() -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    rois = torch.tensor([[0, 1, 1, 6, 6.0], [1, 0, 2, 5, 5]], dtype=torch.float64)
    rest = (1.0, 2, 2, 2, True)
    y = OPS.ROIAlign_forward(x, rois, *rest)
    want = torch.ops.ipex.roi_align(x.float(), rois.float(), *rest)
    torch.testing.assert_close(y, want.double(), rtol=1e-5, atol=1e-6)
    with torch.enable_grad():
        leaf = x.clone().requires_grad_()
        align = ipex.nn.functional._roi_align_helper.roi_align
        torch.testing.assert_close(align(leaf, rois, 2, 1.0, 2, True), y)
        OPS.ROIAlign_forward(leaf, rois, *rest).backward(y)
    back = OPS.ROIAlign_backward(y, rois, 1.0, 2, 2, 2, 3, 8, 8, 2, True, False)
    torch.testing.assert_close(leaf.grad, back)
    boxes, scores, priors = torch.randn(2, 5, 4), torch.randn(2, 5, 3), torch.rand(1, 5, 4)
    want, _ = OPS.parallel_scale_back_batch(boxes, scores, priors, 0.1, 0.2)
    got, _ = OPS.parallel_scale_back_batch(boxes.double(), scores, priors.double(), 0.1, 0.2)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-6)


def test_steps_of_optimizers_in_float64() -> None:
    """float64 has no kernel, and keeps all its digits."""
    w, g = torch.randn(31, 7, dtype=torch.float64), torch.randn(31, 7, dtype=torch.float64)
    none = torch.empty(0)
    for decay in (0.0, 0.1):
        for make, step in (
            (
                lambda p, d=decay: torch.optim.Adam([p], 0.01, weight_decay=d),
                lambda p, a, b, d=decay: OPS.adam_fused_step(
                    *(p, a, b, none, g, none, False, 1.0, 0.9, 0.999, 0.01, d, 1e-8)
                ),
            ),
            (
                lambda p, d=decay: torch.optim.Adagrad([p], 0.01, weight_decay=d),
                lambda p, a, b, d=decay: OPS.adagrad_fused_step(
                    *(p, g, a, none, 1.0, 0.01, d, 0.0, 1e-10)
                ),
            ),
            (
                lambda p, d=decay: torch.optim.SGD([p], 0.01, 0.9, weight_decay=d),
                lambda p, a, b, d=decay: OPS.sgd_fused_step(
                    *(p, g, None, none, 0.9, 0.01, d, 0.0, False)
                ),
            ),
        ):
            want = torch.nn.Parameter(w.clone())
            want.grad = g.clone()
            make(want).step()
            got = w.clone()
            step(got, torch.zeros_like(w), torch.zeros_like(w))
            torch.testing.assert_close(got, want.detach(), rtol=1e-13, atol=1e-13)
    got, single = w.clone(), w.float()
    states = [torch.zeros_like(w), torch.zeros_like(w)]
    others = [s.float() for s in states]
    rest = (1, 0.9, 0.999, 0.01, 0.1, 1e-6)
    OPS.lamb_fused_step(got, *states, g, none, *rest)
    OPS.lamb_fused_step(single, *others, g.float(), none, *rest)
    assert got.dtype == torch.float64 and not torch.equal(got, w)
    torch.testing.assert_close(got.float(), single, rtol=1e-4, atol=1e-5)


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


def test_linear_with_what_follows() -> None:
    x, w, b = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    y, z, none = torch.randn(3, 8), torch.randn(3, 8), torch.empty(0)
    f = torch.nn.functional
    plain = f.linear(x, w, b)
    for got, want in (
        (OPS.tpp_linear(x, w, 8), f.linear(x, w)),
        (OPS.tpp_linear_bias(x, w, b), plain),
        (OPS.tpp_linear_bias(x, w, none), f.linear(x, w)),
        (OPS.tpp_linear_gelu(x, w, b), f.gelu(plain)),
        (OPS.tpp_linear_gelu_tanh(x, w, b), f.gelu(plain, approximate="tanh")),
        (OPS.tpp_linear_relu(x, w, b), plain.relu()),
        (OPS.tpp_linear_silu(x, w, b), f.silu(plain)),
        (OPS.tpp_linear_mul(x, y, w, b), plain * y),
        (OPS.tpp_linear_add(x, y, w, b, 1.0), plain + y),
        (OPS.tpp_linear_add(x, y, w, b, 0.5), 0.5 * plain + y),
        (OPS.tpp_linear_add_add(x, y, z, w, b, 0.5), 0.5 * plain + y + z),
        (OPS.tpp_fused_gate_up_proj(x, w, b, -w, none), f.silu(plain) * f.linear(x, -w)),
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    packed = torch.ops.ipex.pack_linear_weight(w)
    got = OPS.tpp_linear_add(x, y, packed, b, 1.0, 8)
    torch.testing.assert_close(got, plain + y, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"t_wt must be a plain weight \[N, K\].*got 4-D"):
        OPS.tpp_linear_relu(x, w.view(2, 4, 2, 8), b)


def test_casts_from_8_bit_floats() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for kind, targets in (("e4m3", ("bf16", "fp16", "fp32")), ("e5m2", ("fp16",))):
        source = codes.view(torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2)
        options = (True, True) if kind == "e4m3" else ()
        for name in targets:
            dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]
            op, to = getattr(OPS, f"convert_{kind}_to_{name}"), torch.full((256,), 7.0, dtype=dtype)
            assert op(source, to, 250, *options) is to
            want = source.to(dtype)
            torch.testing.assert_close(to[:250], want[:250], rtol=0, atol=0, equal_nan=True)
            assert to[250:].tolist() == [7.0] * 6
            with pytest.raises(RuntimeError, match="at least len = 257"):
                op(source, to, 257, *options)

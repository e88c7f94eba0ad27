# SPDX-License-Identifier: Apache-2.0
"""Layers and functions of detectors: against stock layers and plain loops, gradients, bad input. No kernels needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ipex_core.library.kernels import specs
from ipex_core.nn import FrozenBatchNorm2d, functional, modules
from ipex_core.nn.ipex_api.detection import intrinsic_nms
from ipex_core.nn.ipex_api.roi_align_helper import roi_align
from ipex_core.nn.modules._roi_align import RoIAlign


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fmt", [torch.contiguous_format, torch.channels_last])
def test_frozen_batch_norm_is_batch_norm_in_evaluation(dtype, fmt):
    torch.manual_seed(0)
    stock = nn.BatchNorm2d(6)
    stock(torch.randn(4, 6, 5, 5))
    stock.weight.data.uniform_(0.5, 2)
    stock.eval()
    layer = FrozenBatchNorm2d(6)
    layer.load_state_dict(stock.state_dict())  # its counter of batches is ignored
    assert "num_batches_tracked" not in layer.state_dict()
    assert not list(layer.parameters())
    x = torch.randn(2, 6, 7, 8).to(dtype).contiguous(memory_format=fmt).requires_grad_()
    ref = x.detach().float().requires_grad_()
    got, want = layer(x), stock(ref)
    assert got.dtype == dtype
    assert got.stride() == x.stride()
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(got.float(), want, **tolerance)
    grad = torch.randn_like(want)
    got.backward(grad.to(dtype))
    want.backward(grad.to(dtype).float())
    torch.testing.assert_close(x.grad.float(), ref.grad, **tolerance)
    assert repr(layer) == "FrozenBatchNorm2d(6, eps=1e-05)"
    assert modules.FrozenBatchNorm2d is FrozenBatchNorm2d


def test_frozen_batch_norm_gradients_of_all_arguments():
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    vectors = [torch.rand(3, dtype=torch.float64) + 0.5 for _ in range(4)]
    args = [value.requires_grad_() for value in (x, *vectors)]
    reference = specs()["frozen_batch_norm"].reference
    assert torch.autograd.gradcheck(lambda *a: reference(*a, 1e-5), args)
    single = [value.detach().float().requires_grad_() for value in args]
    torch.ops.ipex.frozen_batch_norm(*single, 1e-5).square().sum().backward()
    reference(*args, 1e-5).square().sum().backward()
    for mine, theirs in zip(single, args, strict=True):
        torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-3, atol=1e-3)


def plain_roi_align(x, rois, size, scale, ratio, aligned):
    """One sample after the other, as the paper says."""
    out = torch.zeros(len(rois), x.shape[1], *size)
    height, width = x.shape[2:]
    for k, (image, *corners) in enumerate(rois.tolist()):
        left, top, right, bottom = (c * scale - (0.5 if aligned else 0) for c in corners)
        w, h = right - left, bottom - top
        if not aligned:
            w, h = max(w, 1), max(h, 1)
        step = (h / size[0], w / size[1])
        grid = [ratio if ratio > 0 else math.ceil(s) for s in step]
        for p in range(size[0]):
            for q in range(size[1]):
                for i in range(grid[0]):
                    for j in range(grid[1]):
                        y = top + p * step[0] + (i + 0.5) * step[0] / grid[0]
                        z = left + q * step[1] + (j + 0.5) * step[1] / grid[1]
                        if not (-1 <= y <= height and -1 <= z <= width):
                            continue
                        y, z = min(max(y, 0), height - 1), min(max(z, 0), width - 1)
                        y0, z0 = int(y), int(z)
                        y1, z1 = min(y0 + 1, height - 1), min(z0 + 1, width - 1)
                        v = x[int(image)]
                        upper = v[:, y0, z0] * (1 - z + z0) + v[:, y0, z1] * (z - z0)
                        lower = v[:, y1, z0] * (1 - z + z0) + v[:, y1, z1] * (z - z0)
                        out[k, :, p, q] += upper * (1 - y + y0) + lower * (y - y0)
                out[k, :, p, q] /= max(grid[0] * grid[1], 1)
    return out


ROIS = torch.tensor([[0, 2, 3, 17.5, 21], [1, -6, -9, 9, 30], [0, 5, 5, 5, 5], [1, 60, 60, 70, 70]])


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("ratio", [-1, 2])
def test_roi_align_against_a_plain_loop(ratio, aligned):
    x = torch.randn(2, 5, 8, 7)
    got = roi_align(x, ROIS, (3, 2), 0.5, ratio, aligned)
    want = plain_roi_align(x, ROIS, (3, 2), 0.5, ratio, aligned)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_roi_align_gradients():
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64, requires_grad=True)
    reference = specs()["roi_align"].reference
    assert torch.autograd.gradcheck(lambda a: reference(a, ROIS, 0.5, 2, 3, 2, True), (x,))
    single = x.detach().float().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(4, 3, 2, 3)
    (roi_align(single, ROIS, (2, 3), 0.5, 2, True) * weight).sum().backward()
    (reference(x, ROIS, 0.5, 2, 3, 2, True) * weight).sum().backward()
    torch.testing.assert_close(single.grad.double(), x.grad, rtol=1e-4, atol=1e-4)
    assert single.grad.stride() == single.stride()


def test_roi_align_in_float64_keeps_channels_last():
    x = torch.randn(2, 3, 6, 7, dtype=torch.float64).to(memory_format=torch.channels_last)
    y = roi_align(x, ROIS, (2, 3), 0.5, 2, True)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y, roi_align(x.contiguous(), ROIS, (2, 3), 0.5, 2, True))


def test_roi_align_module_and_lists():
    x = torch.randn(2, 5, 8, 7)
    layer = RoIAlign(3, 0.5, 2, aligned=True)
    want = layer(x, ROIS)
    by_image = ROIS[ROIS[:, 0].argsort(stable=True)]
    boxes = [by_image[:2, 1:], by_image[2:, 1:]]
    torch.testing.assert_close(layer(x, boxes), layer(x, by_image))
    torch.testing.assert_close(want, roi_align(x, ROIS, 3, 0.5, 2, True))
    assert layer(x.bfloat16(), boxes).dtype == torch.bfloat16
    assert layer(x, []).shape == (0, 5, 3, 3)
    assert "sampling_ratio=2" in repr(layer)
    assert modules._roi_align.RoIAlign is RoIAlign
    assert functional._roi_align_helper.roi_align is roi_align
    for wrong in (ROIS[:, :4], ROIS[0], [ROIS]):
        with pytest.raises(ValueError, match="roi_align: boxes must be a tensor of shape"):
            layer(x, wrong)
    with pytest.raises(ValueError, match="output_size must be one or two numbers, got 3"):
        roi_align(x, ROIS, (1, 2, 3))


DETS = torch.tensor([[0, 0, 10, 10], [1, 1, 11, 11], [20, 20, 30, 30], [0, 0, 10, 5.0]])


def test_nms():
    scores = torch.tensor([0.5, 0.9, 0.3, 0.8])
    assert functional.nms(DETS, scores, 0.5).tolist() == [1, 2, 3]
    assert functional.nms(DETS, scores, 0.5, sorted=True).tolist() == [0, 2]
    pair = torch.tensor([[0, 0, 10, 10], [0, 0, 10, 5.0]])
    assert functional.nms(pair, scores[:2], 0.5, offset=0.0).tolist() == [1]


def test_nms_of_the_device_has_the_conventions_of_torchvision():
    boxes = torch.tensor([[0, 0, 10, 10], [0, 0, 10, 5], [0, 0, 10, 6], [20, 20, 30, 30.0]])
    scores = torch.tensor([0.5, 0.9, 0.1, 0.8])
    # The first has exactly 0.5 of the second, the third more.
    assert intrinsic_nms(boxes, scores, iou_threshold=0.5).tolist() == [1, 3, 0]
    assert intrinsic_nms(boxes, scores, 0.0).tolist() == [1, 3]
    assert intrinsic_nms(boxes, scores, 0.49).tolist() == [1, 3]


def test_rpn_nms():
    boxes = torch.stack([DETS, DETS + 5])
    scores = torch.tensor([[0.9, 0.8, 0.7, 0.6]] * 2)
    kept, values = functional.rpn_nms(boxes, scores, [(25, 22), (40, 40)], 4, 0.5, 10)
    assert kept[0].tolist() == [[0, 0, 10, 10]]  # the third is cut to 5 x 2 pixels
    torch.testing.assert_close(values[1], torch.tensor([0.9, 0.7]))
    first, _ = functional.rpn_nms(list(boxes), list(scores), [(40, 40)] * 2, 1, 0.5, 1)
    assert [len(b) for b in first] == [1, 1]
    with pytest.raises(ValueError, match="rpn_nms: arguments must be of as many images each"):
        functional.rpn_nms(boxes, scores, [(25, 22)], 4, 0.5, 10)


def test_batch_score_nms():
    boxes = DETS[None] / 30
    scores = torch.tensor([[[0.9, 0.1, 0.3], [0.9, 0.6, 0.05], [0.9, 0.2, 0.04], [0.9, 0.01, 0.4]]])
    kept, labels, values, counts = functional.batch_score_nms(boxes, scores, 0.45, 3)
    torch.testing.assert_close(values, torch.tensor([0.2, 0.4, 0.6]))
    assert labels.tolist() == [1, 2, 1]
    torch.testing.assert_close(kept, boxes[0][[2, 3, 1]])
    assert counts.tolist() == [3]
    assert functional.batch_score_nms(boxes[:0], scores[:0], 0.5, 3)[0].shape == (0, 4)
    with pytest.raises(ValueError, match="batch_score_nms: scores must have shape"):
        functional.batch_score_nms(boxes, scores[:, :2], 0.5, 3)


def test_box_head_nms():
    boxes = DETS.repeat(1, 3)
    scores = torch.tensor([[0, 0.9, 0.1], [0, 0.8, 0.7], [0, 0.3, 0.6], [0, 0.01, 0.2]])
    args = ([boxes], [scores], [(25, 40)], 0.05, 0.5)
    kept, values, labels = functional.box_head_nms(*args, 0, 3)
    assert labels[0].tolist() == [1, 1, 2, 2, 2]
    torch.testing.assert_close(values[0], torch.tensor([0.9, 0.3, 0.7, 0.6, 0.2]))
    assert kept[0][1].tolist() == [20, 20, 24, 30]
    _, values, labels = functional.box_head_nms(*args, 2, 3)
    assert labels[0].tolist() == [1, 2]
    with pytest.raises(ValueError, match="batch_scores must have shape \\[4, 4\\], got \\[4, 3\\]"):
        functional.box_head_nms(*args, 2, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_errors_are_the_same_without_a_kernel(dtype):
    boxes, scores = DETS.to(dtype), torch.rand(4, dtype=dtype)
    with pytest.raises(RuntimeError, match=r"nms_mask: scores must have shape \[4\], got \[5\]"):
        functional.nms(boxes, torch.rand(5, dtype=dtype), 0.5)
    with pytest.raises(RuntimeError, match=r"boxes must have shape \[..., N, 4\], got \[4, 3\]"):
        functional.nms(boxes[:, :3], scores, 0.5)  # was computed in float64
    with pytest.raises(ValueError, match=r"each image, got \[4, 4\] and \[3\]"):
        functional.rpn_nms(boxes[None], scores[None, :3], [(25, 22)], 1, 0.5, 10)
    with pytest.raises(RuntimeError, match=r"locations must have shape \[..., 4\]"):
        functional.parallel_scale_back_batch(boxes[None, :, :3], scores, boxes, 0.1, 0.2)
    x = torch.rand(1, 3, 6, 6, dtype=dtype)
    with pytest.raises(RuntimeError, match="roi_align: pooled_height must be from 1 to"):
        roi_align(x, torch.zeros(1, 5, dtype=dtype), (0, 2))
    vectors = [torch.rand(2, d, dtype=dtype) for d in (3, 4)]
    with pytest.raises(RuntimeError, match=r"inputs\[1\] must have the shape of inputs\[0\]"):
        functional.interaction(*vectors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_selections_are_float32_in_autocast(dtype):
    boxes = (DETS / 2)[None].to(dtype)
    scores = torch.tensor([[[0.9, 0.5], [0.9, 0.25], [0.9, 0.75], [0.9, 0.125]]], dtype=dtype)
    calls = [lambda: functional.rpn_nms(boxes, scores[..., 1], [(25, 22)], 1, 0.5, 10)]
    calls += [
        lambda: functional.batch_score_nms(boxes, scores, 0.45, 3),
        lambda: functional.box_head_nms(boxes.repeat(1, 1, 2), scores, [(25, 40)], 0.05, 0.5, 0, 2),
    ]
    wanted = torch.float32 if dtype == torch.bfloat16 else dtype
    assert functional.nms(boxes[0], scores[0, :, 1], 0.5).tolist() == [0, 2]
    for call in calls:
        plain = call()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = call()
        for p, g in zip(plain, got, strict=True):
            for x, y in zip(p, g, strict=True):
                if x.is_floating_point():
                    assert y.dtype == wanted and x.dtype == dtype
                assert torch.equal(x.to(y.dtype), y)


def test_ssd_decoding():
    where, prior = torch.randn(2, 5, 4), torch.rand(5, 4)
    boxes = functional.locations_to_boxes(where, prior, 0.1, 0.2)
    center = (boxes[..., 2:] + boxes[..., :2]) / 2
    torch.testing.assert_close(center, where[..., :2] * 0.1 * prior[:, 2:] + prior[:, :2])
    size = boxes[..., 2:] - boxes[..., :2]
    torch.testing.assert_close(size, (where[..., 2:] * 0.2).exp() * prior[:, 2:])
    logits = torch.randn(2, 5, 3)
    same, probability = functional.parallel_scale_back_batch(
        where, logits, prior.double()[None], 0.1, 0.2
    )
    torch.testing.assert_close(same, boxes)
    torch.testing.assert_close(probability, logits.softmax(-1))
    exact = where.double().requires_grad_()
    reference = specs()["locations_to_boxes"].reference
    assert torch.autograd.gradcheck(lambda a: reference(a, prior.double(), 0.1, 0.2), (exact,))

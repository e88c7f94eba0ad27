# SPDX-License-Identifier: Apache-2.0
"""Detection ops: bad input, boxes of all kinds, the selection against a plain loop."""

from __future__ import annotations

import pytest
import refusals
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
X = torch.randn(2, 3, 8, 9)
C = torch.ones(3)
ROIS = torch.tensor([[0, 1, 1, 6, 6.0], [1, 0, 2, 5, 5]])
BOXES = torch.tensor([[0, 0, 9, 9.0], [1, 1, 9, 9], [20, 20, 30, 30]])
SCORES = torch.tensor([0.3, 0.9, 0.5])


def bad_calls():
    norm = "frozen_batch_norm"
    yield norm, (X.double(), C, C, C, C, 1e-5), "x must have dtype"
    yield norm, (X[0, 0, 0], C, C, C, C, 1e-5), "x must have at least 2 dimension"
    yield norm, (X, C[:2], C, C, C, 1e-5), "weight must have shape \\[3\\], got \\[2\\]"
    yield norm, (X, C, C.half(), C, C, 1e-5), "bias must have the dtype of x = float32 or float32"
    yield norm, (X, C, C, C[None], C, 1e-5), "running_mean must have shape \\[3\\], got \\[1, 3\\]"
    yield norm, (X, C, C, C, C.long(), 1e-5), "running_var must have the dtype"
    align = "roi_align"
    yield align, (X.long(), ROIS, 1.0, 2, 2), "x must have dtype"
    yield align, (X[0], ROIS, 1.0, 2, 2), "x must be 4-D \\[N, C, H, W\\], got 3-D"
    yield align, (X, ROIS[:, :4], 1.0, 2, 2), "rois must have shape \\[K, 5\\], got \\[2, 4\\]"
    yield align, (X, ROIS.double(), 1.0, 2, 2), "rois must have the dtype of x"
    yield align, (X, ROIS, 0.0, 2, 2), "spatial_scale must be positive and below 1e\\+30, got 0"
    yield align, (X, ROIS, float("nan"), 2, 2), "spatial_scale must be positive"
    yield align, (X, ROIS, 1.0, 0, 2), "pooled_height must be from 1 to 4096, got 0"
    yield align, (X, ROIS, 1.0, 2, -1), "pooled_width must be from 1 to 4096, got -1"
    yield align, (X, ROIS, 1.0, 2, 2, 5000), "sampling_ratio must be at most 4096, got 5000"
    for index, text in ((2.0, "one of 2 images, got 2"), (-1.0, "got -1"), (0.5, "got 0.5")):
        rois = ROIS.clone()
        rois[1, 0] = index
        yield align, (X, rois, 1.0, 2, 2), f"rois must begin with the index of .*{text}"
    rois = ROIS.clone()
    rois[1, 3] = float("inf")
    yield align, (X, rois, 1.0, 2, 2), "rois must be finite, got inf"
    yield align, (X[:0], ROIS, 1.0, 2, 2), "one of 0 images, got 0"
    back, grad, size = "roi_align_backward", torch.randn(2, 3, 2, 2), (2, 3, 8, 9)
    rest = (-1, False, False)
    yield back, (grad.double(), ROIS, 1.0, 2, 2, *size, *rest), "grad must have dtype"
    yield back, (grad, ROIS, 1.0, 2, 3, *size, *rest), "grad must have shape \\[2, 3, 2, 3\\]"
    yield back, (grad, ROIS, 1.0, 2, 2, 2, 4, 8, 9, *rest), "grad must have shape \\[2, 4, 2, 2\\]"
    yield (
        back,
        (grad, ROIS, 1.0, 2, 2, 2, 3, -8, 9, *rest),
        "height must be from 0 to 65536, got -8",
    )
    yield back, (grad, ROIS, 1.0, 2, 2, 1, 3, 8, 9, *rest), "one of 1 images, got 1"
    nms = "nms_mask"
    yield nms, (BOXES.long(), SCORES, 0.5), "boxes must have dtype"
    yield nms, (BOXES[0], SCORES, 0.5), "boxes must have at least 2 dimension"
    yield nms, (BOXES[:, :3], SCORES, 0.5), "boxes must have shape \\[..., N, 4\\], got \\[3, 3\\]"
    yield nms, (BOXES, SCORES[:2], 0.5), "scores must have shape \\[3\\], got \\[2\\]"
    yield nms, (BOXES[None], SCORES, 0.5), "scores must have shape \\[1, 3\\], got \\[3\\]"
    yield nms, (BOXES, SCORES.half(), 0.5), "scores must have the dtype of boxes"
    yield nms, (BOXES, SCORES, float("nan")), "threshold must be finite, got nan"
    yield nms, (BOXES, SCORES, 0.5, False, float("inf")), "offset must be finite, got inf"
    where = "locations_to_boxes"
    yield where, (BOXES.long(), BOXES, 0.1, 0.2), "locations must have dtype"
    yield where, (BOXES[:, :3], BOXES, 0.1, 0.2), "locations must have shape \\[..., 4\\]"
    yield where, (BOXES, BOXES.half(), 0.1, 0.2), "priors must have the dtype of locations"
    yield where, (BOXES, BOXES[:, :1], 0.1, 0.2), "priors must have shape \\[..., 4\\]"
    yield where, (BOXES, BOXES[:2], 0.1, 0.2), "priors must be broadcastable to locations of shape"
    yield where, (BOXES, BOXES[None], 0.1, 0.2), "priors must be broadcastable to locations"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(*[st.integers(1, 12)] * 2),
    channels=st.sampled_from([1, 7, 16, 70]),
    bins=st.tuples(*[st.integers(1, 4)] * 2),
    corners=st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=8),
    ratio=st.integers(-1, 3),
    aligned=st.booleans(),
)
def test_any_box(size, channels, bins, corners, ratio, aligned):
    """Boxes outside the map, of no size, and of negative size; forward and backward."""
    x = torch.randn(1, channels, *size)
    count = len(corners) // 4
    rois = torch.tensor(corners[: 4 * count]).view(count, 4)
    rois = torch.cat([torch.zeros(count, 1), rois], 1)
    args = (rois, 0.7, *bins, ratio, aligned)
    want = specs()["roi_align"].reference(x, *args)
    torch.testing.assert_close(ops.roi_align(x, *args), want, rtol=1e-4, atol=1e-4)
    rest = (rois, 0.7, *bins, *x.shape, ratio, aligned, False)
    want = specs()["roi_align_backward"].reference(want, *rest)
    got = ops.roi_align_backward(ops.roi_align(x, *args), *rest)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_huge_boxes_take_no_time_and_no_memory():
    x = torch.ones(1, 20, 6, 5)
    rois = torch.tensor([[0, -3e38, -3e38, 3e38, 3e38], [0, -1e7, 0, 1e7, 6]])
    y = ops.roi_align(x, rois, 1.0, 3, 3)
    assert torch.isfinite(y).all()
    assert (y >= 0).all()
    assert y.max() <= 1


@settings(max_examples=60, deadline=None)
@given(
    boxes=st.lists(st.tuples(*[st.integers(0, 12)] * 4), min_size=1, max_size=60),
    threshold=st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    offset=st.sampled_from([0.0, 1.0]),
    limit=st.integers(0, 5),
    data=st.data(),
)
def test_selection(boxes, threshold, offset, limit, data):
    """Whole numbers, so that overlaps are often exactly the threshold and scores are often equal."""
    count = len(boxes)
    dets = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in boxes]).float()
    scores = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    got = ops.nms_mask(dets, torch.tensor(scores).float(), threshold, False, offset, None, 0, limit)
    kept = []
    for i in sorted(range(count), key=lambda i: (-scores[i], i)):
        if (limit and len(kept) == limit) or any(
            _goes(dets[i], dets[j], threshold, offset) for j in kept
        ):
            continue
        kept.append(i)
    assert got.nonzero().squeeze(1).tolist() == sorted(kept)


def many_boxes():
    """More than a thousand boxes, which lie in a grid: of like and unlike sizes, far apart, of no size, not finite."""
    whole = torch.randint(0, 60, (1100, 2)).float()
    sides = torch.randint(0, 5, (1100, 2)).float()
    yield "whole", torch.cat([whole, whole + sides], 1)
    yield "reversed", torch.cat([whole, whole - sides + 2], 1)
    yield "points", torch.cat([whole, whole], 1)
    yield "one place", torch.tensor([[3.0, 4, 5, 6]]).expand(1100, 4)
    yield (
        "a column",
        torch.cat([torch.zeros(1100, 1), whole[:, :1], torch.ones(1100, 1), whole[:, 1:]], 1),
    )
    corner = torch.randn(1100, 2).exp() * 100
    yield "unlike", torch.cat([corner, corner + torch.randn(1100, 2).mul(2).exp()], 1)
    boxes = torch.cat([whole, whole + sides], 1)
    boxes[::150] = torch.tensor([-1e6, -1e6, 1e6, 1e6])
    yield "huge", boxes
    boxes = torch.cat([whole, whole + sides], 1)
    for i, value in enumerate((float("nan"), float("inf"), -float("inf"), 3e38, -3e38)):
        boxes[i * 4 : i * 4 + 4].fill_diagonal_(value)
    boxes[40:44] = torch.tensor([-3e38, -3e38, 3e38, 3e38])
    yield "not finite", boxes
    yield "rounded", torch.cat([whole, whole + sides], 1) * 8 + 1e8
    yield "tiny", torch.cat([whole, whole + sides], 1) * 1e-41


@pytest.mark.parametrize(
    ("name", "boxes"), list(many_boxes()), ids=lambda v: v if isinstance(v, str) else ""
)
def test_selection_of_many(name, boxes):
    scores = torch.randint(0, 50, (boxes.shape[0],)).float()
    # The definition takes 0.2 s where most boxes stay.
    for threshold, offset, limit in (
        (0.5, 0.0, 0),
        (1e-6, 9.0, 0),
        (0.2, -1.0, 300),
        (0.0, 0.0, 0),
    ):
        args = (boxes, scores, threshold, False, offset, None, 0, limit)
        assert torch.equal(ops.nms_mask(*args), specs()["nms_mask"].reference(*args))


def _goes(a, b, threshold, offset):
    a, b = a.tolist(), b.tolist()
    width = max(min(a[2], b[2]) - max(a[0], b[0]) + offset, 0)
    height = max(min(a[3], b[3]) - max(a[1], b[1]) + offset, 0)
    areas = [(c[2] - c[0] + offset) * (c[3] - c[1] + offset) for c in (a, b)]
    union = sum(areas) - width * height
    return union > 0 and width * height / union >= threshold

# SPDX-License-Identifier: Apache-2.0
"""Object detection: non-maximum suppression, and the boxes of an SSD head from offsets and prior boxes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_kind,
    check_shape,
    check_tensor,
    fake_like,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample


def _one_group(
    boxes: Tensor,
    scores: Tensor,
    threshold: float,
    is_sorted: bool,
    offset: float,
    min_score: float | None,
    max_candidates: int,
    max_output: int,
) -> Tensor:
    scores = acc(scores)
    fine = ~scores.isnan() if min_score is None else scores > min_score
    order = fine.nonzero().squeeze(1)
    if not is_sorted:
        order = order[scores[order].sort(descending=True, stable=True).indices]
    if max_candidates > 0:
        order = order[:max_candidates]
    corners = acc(boxes)[order]
    sides = corners[:, 2:] - corners[:, :2] + offset
    area = sides[:, 0] * sides[:, 1]
    keep = torch.zeros(boxes.shape[0], dtype=torch.bool, device=boxes.device)
    left = torch.arange(order.numel(), device=boxes.device)
    count = 0
    while left.numel() and (max_output <= 0 or count < max_output):
        best, rest = left[0], left[1:]
        keep[order[best]] = True
        count += 1
        low = torch.maximum(corners[best, :2], corners[rest, :2])
        high = torch.minimum(corners[best, 2:], corners[rest, 2:])
        overlap = (high - low + offset).clamp_min(0).prod(1)
        ratio = overlap / (area[best] + area[rest] - overlap)
        left = rest[~(ratio >= threshold)]
    return keep


def _nms_mask(
    boxes: Tensor,
    scores: Tensor,
    threshold: float,
    is_sorted: bool = False,
    offset: float = 1.0,
    min_score: float | None = None,
    max_candidates: int = 0,
    max_output: int = 0,
) -> Tensor:
    """Say which boxes stay when those that overlap a better one go, in each of several groups.

    Boxes are visited from the highest score to the lowest, of equal scores the first one first. A box stays unless its
    intersection over union with a box that stays is ``threshold`` or more. Everything is float32. The result has a
    fixed shape, so the op compiles; `ipex.nn.functional.nms` returns indices.

    Args:
        boxes: ``[..., N, 4]``, float32, bfloat16 or float16: left, top, right, bottom. Groups may share boxes by a
            stride of 0 (`Tensor.expand`).
        scores: ``[..., N]`` in the dtype of ``boxes`` or float32. Boxes whose score is NaN do not stay.
        threshold: Least intersection over union at which the worse box goes.
        is_sorted: Whether the boxes are in the order to visit them in.
        offset: Added to the sides of boxes and of intersections: 1 for boxes that include their last pixel, else 0.
        min_score: Only boxes with a larger score can stay; None: all.
        max_candidates: Only that many of the best boxes can stay; 0: all.
        max_output: Most boxes of a group that stay; 0: all.

    Returns:
        bool ``[..., N]``, contiguous.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, or a threshold or offset that is not finite.
    """
    groups = boxes.flatten(0, -3) if boxes.dim() > 2 else boxes.unsqueeze(0)
    values = scores.flatten(0, -2) if scores.dim() > 1 else scores.unsqueeze(0)
    rest = (threshold, is_sorted, offset, min_score, max_candidates, max_output)
    masks = [_one_group(b, s, *rest) for b, s in zip(groups, values, strict=True)]
    return torch.stack(masks).view(scores.shape) if masks else scores.new_empty(scores.shape).bool()


def _check(a: Arguments) -> None:
    check_tensor(a.op, "boxes", a.boxes, min_dim=2)
    a.require(a.boxes.shape[-1] == 4, "boxes", "have shape [..., N, 4]", list(a.boxes.shape))
    check_kind(a.op, "scores", a.scores, a.boxes, "boxes", or_float32=True)
    shape = list(a.boxes.shape[:-1])
    check_shape(a.op, "scores", a.scores, shape)
    a.require(math.isfinite(a.threshold), "threshold", "be finite", f"{a.threshold:g}")
    a.require(math.isfinite(a.offset), "offset", "be finite", f"{a.offset:g}")


def random_boxes(*shape: int, dtype: torch.dtype, seed: int, size: float = 300.0) -> Tensor:
    """Return ``[..., 4]`` boxes of many sizes in an image of ``size`` pixels."""
    generator = torch.Generator().manual_seed(seed)
    center = torch.rand(*shape, 2, generator=generator) * size
    half = torch.rand(*shape, 2, generator=generator).square() * size * 0.2
    return torch.cat([center - half, center + half], -1).to(dtype)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for count in (1, 2, 17, 64, 300):
        boxes = random_boxes(count, dtype=dtype, seed=count, size=120.0)
        scores = randn(count, seed=51)
        yield Sample((boxes, scores, 0.5), id=f"{count}")
        yield Sample((boxes, scores, 0.3, True, 0.0), id=f"{count}-sorted")
    boxes = random_boxes(2, 3, 90, dtype=dtype, seed=52, size=100.0)
    scores = randn(2, 3, 90, dtype=dtype, seed=53)  # 16-bit scores have ties
    yield Sample((boxes, scores, 0.4), id="groups")
    yield Sample((boxes, scores, 0.4, False, 1.0, 0.2, 20, 7), id="limits")
    shared = boxes[:, :1].expand(2, 3, 90, 4)
    yield Sample((shared, scores, 0.4, False, 0.0, 0.0), id="shared_boxes")
    yield Sample((boxes[:, :, ::2], scores[:, :, ::2], 0.4), id="strided")
    square = torch.tensor([[0, 0, 9, 9], [0, 0, 9, 4], [0, 0, 9, 9], [20, 20, 20, 20.0]])
    same = torch.tensor([0.5, 0.5, 0.5, 0.5])
    yield Sample((square.to(dtype), same, 0.5), id="exactly_the_threshold")
    yield Sample((square.to(dtype), same, 0.0), id="threshold_0")
    yield Sample((square.to(dtype), same, 0.5, False, 0.0), id="empty_box")
    special = boxes[0, 0, :20].clone()
    special[3, 1] = float("nan")
    special[4, 2] = float("inf")
    worst = scores[0, 0, :20].clone()
    worst[5], worst[6], worst[7] = float("nan"), float("inf"), -float("inf")
    yield Sample((special, worst, 0.3), id="special_values")
    yield Sample((boxes[:, :, :0], scores[:, :, :0], 0.3), id="no_boxes")
    yield Sample((boxes[:0], scores[:0], 0.3), id="no_groups")


def _stock(
    boxes: Tensor, scores: Tensor, threshold: float, is_sorted: bool, offset: float
) -> Tensor:
    """Compare all pairs at once, then visit the boxes: the fastest way we know in stock PyTorch."""
    if boxes.dim() > 2:
        rest = (threshold, is_sorted, offset)
        return torch.stack([_stock(b, s, *rest) for b, s in zip(boxes, scores, strict=True)])
    order = scores.sort(descending=True, stable=True).indices
    corners = boxes[order].float()
    area = (corners[:, 2:] - corners[:, :2] + offset).prod(1)
    low = torch.maximum(corners[:, None, :2], corners[:, :2])
    high = torch.minimum(corners[:, None, 2:], corners[:, 2:])
    overlap = (high - low + offset).clamp_min(0).prod(2)
    goes = overlap / (area[:, None] + area - overlap) >= threshold
    stays = torch.ones(order.numel(), dtype=torch.bool)
    for i in range(order.numel()):
        if stays[i]:
            stays[i + 1 :] &= ~goes[i, i + 1 :]
    keep = torch.zeros_like(stays)
    keep[order[stays]] = True
    return keep


def _bench() -> Iterator[BenchCase]:
    def make(count: int, groups: int, dtype: torch.dtype) -> tuple[Any, ...]:
        shape = (groups, count) if groups > 1 else (count,)
        boxes = random_boxes(*shape, dtype=dtype, seed=54, size=800.0)
        return (
            boxes,
            torch.rand(shape, generator=torch.Generator().manual_seed(55)),
            0.5,
            False,
            0.0,
        )

    for count, groups in ((200, 1), (1000, 1), (6000, 1), (200, 80)):
        yield BenchCase(
            f"{groups}x{count}" if groups > 1 else f"{count}",
            lambda dtype, c=count, g=groups: make(c, g, dtype),
            lambda dtype, n=count * groups: n * (4 * dtype.itemsize + 5),
        )


register_op(
    reference=_nms_mask,
    check=_check,
    fake=lambda a: torch.empty(a.scores.shape, dtype=torch.bool, device=a.scores.device),
    samples=_samples,
    stock=_stock,
    backward=None,
    lift=False,
    bench=_bench,
    summary="Which boxes stay in non-maximum suppression, for many groups at once",
)


# --- boxes of an SSD head ---------------------------------------------------------------------------------------------


def _locations_to_boxes(
    locations: Tensor, priors: Tensor, center_variance: float, size_variance: float
) -> Tensor:
    """Turn what an SSD head predicts for each prior box into the corners of a box.

    ``center = locations[..., :2] * center_variance * priors[..., 2:] + priors[..., :2]`` and
    ``size = exp(locations[..., 2:] * size_variance) * priors[..., 2:]``; the result is ``center - size / 2`` and
    ``center + size / 2``. Computed in float32 and rounded once.

    Args:
        locations: ``[..., 4]``, float32, bfloat16 or float16.
        priors: Prior boxes as center and size, in the dtype of ``locations`` or float32; of the shape of
            ``locations`` or of one that broadcasts to it.
        center_variance: Factor on the predicted centers.
        size_variance: Factor on the predicted sizes.

    Returns:
        Left, top, right, bottom: a contiguous tensor like ``locations``.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.

    Source: Liu et al., "SSD: Single Shot MultiBox Detector", 2016.
    """
    where, prior = acc(locations), acc(priors)
    center = where[..., :2] * center_variance * prior[..., 2:] + prior[..., :2]
    size = torch.exp(where[..., 2:] * size_variance) * prior[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1).to(locations.dtype)


def _boxes_check(a: Arguments) -> None:
    check_tensor(a.op, "locations", a.locations)
    shape = list(a.locations.shape)
    a.require(shape[-1] == 4, "locations", "have shape [..., 4]", shape)
    check_kind(a.op, "priors", a.priors, a.locations, "locations", or_float32=True)
    fine = a.priors.dim() > 0 and a.priors.shape[-1] == 4
    a.require(fine, "priors", "have shape [..., 4]", list(a.priors.shape))
    check_broadcastable(a.op, "priors", a.priors, shape, "locations")


def _priors(*shape: int, dtype: torch.dtype) -> Tensor:
    return randn(*shape, 4, seed=62).abs().clamp(0.05, 2.0).to(dtype)


def _boxes_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for shape in ((1,), (7,), (16,), (2, 33), (3, 5, 21), (2, 300)):
        name = "x".join(map(str, shape))
        where = randn(*shape, 4, dtype=dtype, seed=61)
        yield Sample((where, _priors(*shape, dtype=dtype), 0.1, 0.2), id=name)
        yield Sample(
            (where, _priors(shape[-1], dtype=torch.float32), 0.1, 0.2), id=f"{name}-shared"
        )
    where = randn(4, 3, 4, dtype=dtype, seed=63)
    yield Sample((where, _priors(4, 1, dtype=dtype), 0.3, 0.1), id="broadcast")
    yield Sample((where.transpose(0, 1), _priors(4, dtype=dtype), 0.3, 0.1), id="transposed")
    yield Sample((where[:0], _priors(3, dtype=dtype), 0.3, 0.1), id="empty")
    special = where.clone()
    special[0, 0, 0], special[1, 0, 2], special[2, 0, 3] = torch.tensor(
        [float("nan"), float("inf"), -float("inf")]
    ).to(dtype)
    yield Sample((special, _priors(3, dtype=dtype), 0.1, 0.2), id="special_values")


def _boxes_bench() -> Iterator[BenchCase]:
    for batch, count in ((1, 3000), (32, 3000), (8, 15130)):

        def make(dtype: torch.dtype, b: int = batch, n: int = count) -> tuple[Any, ...]:
            return randn(b, n, 4, dtype=dtype), _priors(n, dtype=dtype), 0.1, 0.2

        yield BenchCase(
            f"{batch}x{count}",
            make,
            lambda dtype, n=(2 * batch + 1) * count: n * 4 * dtype.itemsize,
        )


def _boxes_stock(
    locations: Tensor, priors: Tensor, center_variance: float, size_variance: float
) -> Tensor:
    center = locations[..., :2] * center_variance * priors[..., 2:] + priors[..., :2]
    size = torch.exp(locations[..., 2:] * size_variance) * priors[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


register_op(
    reference=_locations_to_boxes,
    check=_boxes_check,
    fake=lambda a: fake_like(a.locations),
    samples=_boxes_samples,
    stock=_boxes_stock,
    tolerance={
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (1.6e-2, 1.6e-2),
        torch.float16: (2e-3, 2e-3),
    },
    bench=_boxes_bench,
    summary="Corners of boxes from the output of an SSD head",
)

# SPDX-License-Identifier: Apache-2.0
"""Selection of boxes in detectors, with the names, arguments and conventions of IPEX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.kernels import run_op

_OPS = torch.ops.ipex

#: What the SSD models of MLPerf use: least score of a box, and boxes per class that are looked at.
_SSD_MIN_SCORE = 0.05
_SSD_CANDIDATES = 200


def _mask(boxes: Tensor, *args: Any) -> Tensor:
    return run_op("nms_mask", boxes.dtype, boxes, *args)


def nms(
    dets: Tensor, scores: Tensor, threshold: float, sorted: bool = False, offset: float = 1.0
) -> Tensor:
    """Return the boxes that stay when those that overlap a better one go.

    Args:
        dets: ``[N, 4]``, float32, bfloat16 or float16, or float64 without a kernel: left, top, right, bottom.
        scores: ``[N]``, in the dtype of ``dets`` or float32.
        threshold: A box goes if its intersection over union with a better one that stays is this or more.
        sorted: Whether the boxes are in descending order of their scores.
        offset: Added to all sides. 1 is for boxes that include their last pixel, as in maskrcnn-benchmark; 0 for boxes
            of real numbers, as in torchvision (which keeps a box of exactly the threshold).

    Returns:
        int64 indices in ascending order.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.
    """
    return _mask(dets, scores, threshold, sorted, offset).nonzero().squeeze(1)


def intrinsic_nms(dets: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """`nms` as ``ipex.xpu.intrinsic`` and torchvision have it.

    Args:
        dets: ``[N, 4]`` as for `nms`, real numbers.
        scores: ``[N]``, in the dtype of ``dets`` or float32.
        iou_threshold: A box goes if its intersection over union with a better one that stays is more than this.

    Returns:
        int64 indices in descending order of the scores.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.
    """
    # The kernel takes a box of exactly the threshold away, too.
    above = torch.tensor(iou_threshold, dtype=torch.float32).nextafter(torch.tensor(math.inf))
    least = torch.finfo(torch.float32).tiny  # smaller ones may count as 0
    kept = nms(dets, scores, max(above.item(), least), offset=0.0)
    return kept[scores[kept].argsort(descending=True, stable=True)]


def batch_score_nms(
    dets: Tensor, scores: Tensor, threshold: float, max_output: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Select the boxes of an SSD head: non-maximum suppression in each class, then the best of all classes.

    Class 0 is the background. Boxes with a score of 0.05 or less do not take part, nor do any but the 200 best of a
    class.

    Args:
        dets: ``[B, N, 4]``, floating as for `nms`: left, top, right, bottom, real numbers.
        scores: ``[B, N, C]``, in the dtype of ``dets`` or float32.
        threshold: Least intersection over union at which the worse box goes.
        max_output: Most boxes of an image.

    Returns:
        For all images one after the other: boxes ``[K, 4]``, labels ``[K]`` int64 and scores ``[K]``, each
        image in ascending order of the score; and the number of boxes of each image, int32 ``[B]``.

    Raises:
        ValueError: ``dets`` and ``scores`` do not fit together.
        RuntimeError: For wrong dtypes or devices.
    """
    if dets.dim() != 3 or scores.dim() != 3 or dets.shape[:2] != scores.shape[:2]:
        raise ValueError(
            f"batch_score_nms: scores must have shape [B, N, C] for dets [B, N, 4], got {list(scores.shape)}"
            f" for {list(dets.shape)}"
        )
    dets, scores = _wide(dets), _wide(scores)
    by_class = scores.transpose(1, 2)[:, 1:]
    shared = dets.unsqueeze(1).expand(-1, by_class.shape[1], -1, -1)
    mask = _mask(shared, by_class, threshold, False, 0.0, _SSD_MIN_SCORE, _SSD_CANDIDATES, 0)
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for image, values, keep in zip(dets, by_class, mask, strict=True):
        label, index = keep.nonzero().unbind(1)
        value = values[label, index]
        best = value.sort(stable=True).indices[max(0, value.numel() - max_output) :]
        found.append((image[index[best]], label[best] + 1, value[best]))
    counts = torch.tensor([b.shape[0] for b, _, _ in found], dtype=torch.int32, device=dets.device)
    if not found:
        return dets.new_empty(0, 4), counts.long(), scores.new_empty(0), counts
    boxes, labels, kept = (torch.cat(part) for part in zip(*found, strict=True))
    return boxes, labels, kept, counts


def _wide(value: Tensor) -> Tensor:
    """Return boxes or scores in float32 inside ``torch.autocast``, as IPEX's lists have it, and as they are outside."""
    narrow = value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow and torch.is_autocast_enabled(value.device.type) else value


def _clip(boxes: Tensor, shape: Sequence[int]) -> Tensor:
    """Return boxes ``[..., 4]`` inside an image of ``shape = (width, height)`` pixels."""
    width, height = shape
    limit = boxes.new_tensor([width - 1, height - 1, width - 1, height - 1])
    return boxes.clamp_min(0).minimum(limit)


def _check_images(op: str, **arguments: Tensor | Sequence[object]) -> None:
    counts = {name: len(value) for name, value in arguments.items()}
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{name}: {count}" for name, count in counts.items())
        raise ValueError(f"{op}: arguments must be of as many images each, got {text}")


def rpn_nms(
    batch_dets: Tensor | Sequence[Tensor],
    batch_scores: Tensor | Sequence[Tensor],
    image_shapes: Sequence[tuple[int, int]],
    min_size: int,
    threshold: float,
    max_output: int,
) -> tuple[list[Tensor], list[Tensor]]:
    """Select the proposals of a region proposal network, image by image.

    Boxes are cut off at the border of the image; those with a side below ``min_size`` go; then `nms`.

    Args:
        batch_dets: ``[B, N, 4]`` or ``[N, 4]`` for each image, in descending order of their scores; floating as
            for `nms`.
        batch_scores: ``[B, N]`` or ``[N]`` for each image.
        image_shapes: Width and height of each image.
        min_size: Least width and height of a box, its last pixel included.
        threshold: Least intersection over union at which the worse box goes.
        max_output: Most boxes of an image.

    Returns:
        Boxes ``[K, 4]`` and scores ``[K]`` of each image, in the order they came.

    Raises:
        ValueError: The arguments are not of as many images each, or the boxes of an image have not a score each.
        RuntimeError: For wrong dtypes or devices.
    """
    _check_images(
        "rpn_nms", batch_dets=batch_dets, batch_scores=batch_scores, image_shapes=image_shapes
    )
    boxes_out, scores_out = [], []
    for dets, scores, shape in zip(batch_dets, batch_scores, image_shapes, strict=True):
        if dets.dim() != 2 or dets.shape[1] != 4 or scores.shape != dets.shape[:1]:
            raise ValueError(
                "rpn_nms: batch_dets must be [N, 4] and batch_scores [N] for each image, got"
                f" {list(dets.shape)} and {list(scores.shape)}"
            )
        dets, scores = _wide(dets), _wide(scores)
        boxes = _clip(dets, shape)
        sides = boxes[:, 2:] - boxes[:, :2] + 1
        small = (sides < min_size).any(1)
        # A score that is not a number takes a box out.
        valid = scores.masked_fill(small, float("nan"))
        keep = _mask(boxes, valid, threshold, True, 1.0, None, 0, max_output)
        boxes_out.append(boxes[keep])
        scores_out.append(scores[keep])
    return boxes_out, scores_out


def box_head_nms(
    batch_bboxes: Sequence[Tensor],
    batch_scores: Sequence[Tensor],
    image_shapes: Sequence[tuple[int, int]],
    score_thresh: float,
    threshold: float,
    detections_per_img: int,
    num_classes: int,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Select the detections of a box head: `nms` in each class, then the best of all classes.

    Args:
        batch_bboxes: For each image the decoded boxes of each class, ``[N, num_classes * 4]``; floating as for
            `nms`. They are cut off at the border of the image.
        batch_scores: ``[N, num_classes]`` for each image. Class 0 is the background.
        image_shapes: Width and height of each image.
        score_thresh: Only boxes with a larger score stay.
        threshold: Least intersection over union at which the worse box goes.
        detections_per_img: Most boxes of an image, but for equal scores; 0 or less: all.
        num_classes: Classes, the background included.

    Returns:
        Boxes ``[K, 4]``, scores ``[K]`` and labels ``[K]`` (int64) of each image, class by class.

    Raises:
        ValueError: The arguments are not of as many images each, or a shape does not fit ``num_classes``.
        RuntimeError: For wrong dtypes or devices.
    """
    _check_images(
        "box_head_nms",
        batch_bboxes=batch_bboxes,
        batch_scores=batch_scores,
        image_shapes=image_shapes,
    )
    boxes_out, scores_out, labels_out = [], [], []
    for bboxes, scores, shape in zip(batch_bboxes, batch_scores, image_shapes, strict=True):
        count = scores.shape[0]
        for name, value, wanted in (
            ("batch_scores", scores, [count, num_classes]),
            ("batch_bboxes", bboxes, [count, num_classes * 4]),
        ):
            if list(value.shape) != wanted:
                raise ValueError(
                    f"box_head_nms: {name} must have shape {wanted}, got {list(value.shape)}"
                )
        bboxes, scores = _wide(bboxes), _wide(scores)
        boxes = _clip(bboxes.view(count, num_classes, 4), shape).transpose(0, 1)[1:]
        values = scores.t()[1:]
        mask = _mask(boxes, values, threshold, False, 1.0, score_thresh, 0, 0)
        label, index = mask.nonzero().unbind(1)
        kept = values[label, index]
        if 0 < detections_per_img < kept.numel():
            least = kept.float().kthvalue(kept.numel() - detections_per_img + 1).values
            best = kept >= least
            label, index, kept = label[best], index[best], kept[best]
        boxes_out.append(boxes[label, index])
        scores_out.append(kept)
        labels_out.append(label + 1)
    return boxes_out, scores_out, labels_out


def locations_to_boxes(
    locations: Tensor, priors: Tensor, center_variance: float, size_variance: float
) -> Tensor:
    """Turn what an SSD head predicts for each prior box into corners.

    Args:
        locations: ``[..., 4]``, float32, bfloat16 or float16.
        priors: Prior boxes as center and size; broadcasts to ``locations``.
        center_variance: Factor on the predicted centers.
        size_variance: Factor on the predicted sizes.

    Returns:
        Left, top, right, bottom, like ``locations``.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.
    """
    return _OPS.locations_to_boxes(locations, priors, center_variance, size_variance)


def parallel_scale_back_batch(
    bboxes: Tensor, scores: Tensor, dboxes_xywh: Tensor, scale_xy: float, scale_wh: float
) -> tuple[Tensor, Tensor]:
    """Return the boxes and the class probabilities of an SSD head.

    Args:
        bboxes: ``[B, N, 4]``, float32, bfloat16 or float16, or float64 without a kernel.
        scores: ``[B, N, C]``, logits.
        dboxes_xywh: Prior boxes as center and size, ``[1, N, 4]`` or ``[N, 4]``.
        scale_xy: Factor on the predicted centers.
        scale_wh: Factor on the predicted sizes.

    Returns:
        Left, top, right, bottom, ``[B, N, 4]``, and probabilities ``[B, N, C]``.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices.
    """
    wide = torch.float64 if bboxes.dtype == torch.float64 else torch.float32
    priors = dboxes_xywh.to(bboxes.device, wide)
    boxes = run_op("locations_to_boxes", bboxes.dtype, bboxes, priors, scale_xy, scale_wh)
    return boxes, scores.softmax(-1)

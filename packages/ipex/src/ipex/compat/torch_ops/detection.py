# SPDX-License-Identifier: Apache-2.0
"""Second names of the ops of detectors."""

from __future__ import annotations

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op
from ipex_core.library.kernels import run_op

_OPS = torch.ops.ipex


@alias_op(
    "frozen_batch_norm(Tensor input, Tensor weight, Tensor bias, Tensor running_mean,"
    " Tensor running_var, float eps) -> Tensor"
)
def _frozen_batch_norm(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    return _OPS.frozen_batch_norm(input, weight, bias, mean, var, eps)  # type: ignore[no-any-return]


@alias_op(
    "ROIAlign_forward(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, int sampling_ratio, bool aligned) -> Tensor"
)
def _roi_align_forward(
    input: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    size = (pooled_height, pooled_width)
    return run_op(  # type: ignore[no-any-return]
        *("roi_align", input.dtype, input, rois, spatial_scale, *size, sampling_ratio, aligned)
    )


@alias_op(
    "ROIAlign_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width,"
    " int sampling_ratio, bool aligned, bool is_channels_last) -> Tensor"
)
def _roi_align_backward(
    grad: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    batch_size: int,
    channels: int,
    height: int,
    width: int,
    sampling_ratio: int,
    aligned: bool,
    is_channels_last: bool,
) -> Tensor:
    return run_op(  # type: ignore[no-any-return]
        "roi_align_backward",
        grad.dtype,
        grad,
        rois,
        spatial_scale,
        pooled_height,
        pooled_width,
        batch_size,
        channels,
        height,
        width,
        sampling_ratio,
        aligned,
        is_channels_last,
    )


@alias_op("nms")
def _nms(dets: Tensor, scores: Tensor, threshold: float, sorted: bool) -> Tensor:
    from ipex_core.nn import functional

    return functional.nms(dets, scores, threshold, sorted)


@alias_op("batch_score_nms")
def _batch_score_nms(
    dets: Tensor, scores: Tensor, threshold: float, max_output: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from ipex_core.nn import functional

    boxes, labels, values, counts = functional.batch_score_nms(dets, scores, threshold, max_output)
    return boxes, labels.to(values.dtype), values, counts  # labels were floats there


@alias_op(
    "rpn_nms(Tensor batch_dets, Tensor batch_scores, (int, int)[] image_shapes, int min_size,"
    " float threshold, int max_output) -> (Tensor[], Tensor[])"
)
def _rpn_nms(
    batch_dets: Tensor,
    batch_scores: Tensor,
    image_shapes: list[tuple[int, int]],
    min_size: int,
    threshold: float,
    max_output: int,
) -> tuple[list[Tensor], list[Tensor]]:
    from ipex_core.nn import functional

    return functional.rpn_nms(
        batch_dets, batch_scores, image_shapes, min_size, threshold, max_output
    )


@alias_op(
    "box_head_nms(Tensor[] batch_bboxes, Tensor[] batch_scores, (int, int)[] image_shapes,"
    " float score_thresh, float threshold, int detections_per_img, int num_classes)"
    " -> (Tensor[], Tensor[], Tensor[])"
)
def _box_head_nms(
    batch_bboxes: list[Tensor],
    batch_scores: list[Tensor],
    image_shapes: list[tuple[int, int]],
    score_thresh: float,
    threshold: float,
    detections_per_img: int,
    num_classes: int,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    from ipex_core.nn import functional

    return functional.box_head_nms(
        batch_bboxes,
        batch_scores,
        image_shapes,
        score_thresh,
        threshold,
        detections_per_img,
        num_classes,
    )


@alias_op("locations_to_boxes")
def _locations_to_boxes(
    locations: Tensor, priors: Tensor, center_variance: float, size_variance: float
) -> Tensor:
    return _OPS.locations_to_boxes(locations, priors, center_variance, size_variance)  # type: ignore[no-any-return]


@alias_op("parallel_scale_back_batch")
def _parallel_scale_back_batch(
    bboxes: Tensor, scores: Tensor, dboxes_xywh: Tensor, scale_xy: float, scale_wh: float
) -> tuple[Tensor, Tensor]:
    from ipex_core.nn import functional

    return functional.parallel_scale_back_batch(bboxes, scores, dboxes_xywh, scale_xy, scale_wh)

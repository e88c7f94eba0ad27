# SPDX-License-Identifier: Apache-2.0
"""IPEX's function for RoIAlign: `ipex.nn.functional._roi_align_helper.roi_align`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ipex_core.library.kernels import run_op


def _as_rois(boxes: Tensor | Sequence[Tensor]) -> Tensor:
    if isinstance(boxes, Tensor):
        if boxes.dim() != 2 or boxes.shape[1] != 5:
            raise ValueError(
                f"roi_align: boxes must be a tensor of shape [K, 5] or a list of [L, 4], got shape {list(boxes.shape)}"
            )
        return boxes
    for one in boxes:
        if one.dim() != 2 or one.shape[1] != 4:
            raise ValueError(
                f"roi_align: boxes must be a tensor of shape [K, 5] or a list of [L, 4], got a list with"
                f" {list(one.shape)}"
            )
    if not boxes:
        return torch.zeros(0, 5)
    images = [one.new_full((one.shape[0], 1), float(i)) for i, one in enumerate(boxes)]
    return torch.cat([torch.cat(images), torch.cat(list(boxes))], 1)


def roi_align(
    input: Tensor,
    boxes: Tensor | Sequence[Tensor],
    output_size: int | Sequence[int],
    spatial_scale: float = 1.0,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Average bilinear samples of a feature map in a grid over each box.

    Args:
        input: ``[N, C, H, W]``, float32, bfloat16 or float16, or float64 without a kernel; contiguous or channels-last.
        boxes: ``[K, 5]``: index of the image, left, top, right, bottom; or for each image ``[L, 4]``.
        output_size: Rows and columns of the grid, or one number for both.
        spatial_scale: Pixels of the map per unit of the boxes.
        sampling_ratio: Samples of a bin along each axis; 0 or less: as many as it has pixels, rounded up.
        aligned: Whether coordinates are shifted by half a pixel.

    Returns:
        ``[K, C, rows, columns]`` in the dtype and memory format of ``input``; differentiable for ``input``.

    Raises:
        ValueError: ``boxes`` or ``output_size`` has another form.
        RuntimeError: For wrong dtypes or values; see ``torch.ops.ipex.roi_align``.
    """
    size = (output_size, output_size) if isinstance(output_size, int) else tuple(output_size)
    if len(size) != 2:
        raise ValueError(
            f"roi_align: output_size must be one or two numbers, got {len(size)} numbers"
        )
    rois = _as_rois(boxes)
    if input.dtype == torch.float64:
        rois = rois.to(input.device, torch.float64)
        rest = (spatial_scale, *size, sampling_ratio, aligned)
        return run_op("roi_align", torch.float64, input, rois, *rest)
    if rois.dtype != torch.float32:
        rois = rois.to(torch.float32 if rois.dtype == torch.float64 else input.dtype)
    return torch.ops.ipex.roi_align(
        input, rois.to(input.device), spatial_scale, *size, sampling_ratio, aligned
    )

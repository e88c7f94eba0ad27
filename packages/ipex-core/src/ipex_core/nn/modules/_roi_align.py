# SPDX-License-Identifier: Apache-2.0
"""IPEX's module for RoIAlign: `ipex.nn.modules._roi_align.RoIAlign`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ipex_core.nn.ipex_api.roi_align_helper import roi_align

__all__ = ["RoIAlign"]


class RoIAlign(nn.Module):
    """Average bilinear samples of a feature map in a grid over each box.

    Args:
        output_size: Rows and columns of the grid, or one number for both.
        spatial_scale: Pixels of the map per unit of the boxes.
        sampling_ratio: Samples of a bin along each axis; 0 or less: as many as it has pixels, rounded up.
        aligned: Whether coordinates are shifted by half a pixel.
    """

    def __init__(
        self,
        output_size: int | Sequence[int],
        spatial_scale: float,
        sampling_ratio: int,
        aligned: bool = False,
    ) -> None:
        super().__init__()
        self.output_size = output_size
        self.spatial_scale = spatial_scale
        self.sampling_ratio = sampling_ratio
        self.aligned = aligned

    def forward(self, input: Tensor, rois: Tensor | Sequence[Tensor]) -> Tensor:
        """Return ``[K, C, rows, columns]`` for ``input [N, C, H, W]`` and boxes as `roi_align` takes them."""
        return roi_align(
            input, rois, self.output_size, self.spatial_scale, self.sampling_ratio, self.aligned
        )

    def extra_repr(self) -> str:
        """Return the arguments as they were given."""
        return (
            f"output_size={self.output_size}, spatial_scale={self.spatial_scale},"
            f" sampling_ratio={self.sampling_ratio}, aligned={self.aligned}"
        )

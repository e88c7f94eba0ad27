# SPDX-License-Identifier: Apache-2.0
"""RoIAlign: the values of a feature map inside boxes, on a grid of fixed size; and its gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_core.library.checks import (
    SUM_TOLERANCE,
    acc,
    check_kind,
    check_shape,
    check_tensor,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import Arguments, BenchCase, Sample
from ipex_core.ops.conv import channels_last

#: Most samples of a bin along one axis.
MOST_SAMPLES = 4096
#: Limits of sizes that are given as numbers: beyond them the result could not be held anyway.
MOST_BINS, MOST_PIXELS, MOST_IMAGES = 4096, 65536, 1048576
#: Samples of a bin of a box that is far larger than any map.
_MANY = 1e15


def _weights(
    start: Tensor, size: Tensor, bins: int, pixels: int, sampling_ratio: int
) -> tuple[Tensor, Tensor]:
    """Return how much each pixel of one axis counts in each bin, ``[K, bins, pixels]``, and the samples per bin."""
    step = (size / bins)[:, None]
    count = step.ceil() if sampling_ratio <= 0 else torch.full_like(step, sampling_ratio)
    count = count.clamp(0, _MANY)
    distance = step / count.clamp_min(1)
    first = start[:, None] + torch.arange(bins, dtype=start.dtype, device=start.device) * step
    # The samples that can be inside, [begin, end): a box may be far larger than the map.
    bounds = torch.stack([(-1 - first) / distance, (pixels - first) / distance])
    still = distance == 0
    begin = (bounds.amin(0) - 2).floor().masked_fill(still, 0).clamp_min(0).minimum(count)
    end = (bounds.amax(0) + 2).ceil().masked_fill(still, _MANY).clamp_min(0).minimum(count)
    most = int((end - begin).max()) if begin.numel() else 0
    sample = begin[..., None] + torch.arange(most, dtype=start.dtype, device=start.device)
    place = first[..., None] + (sample + 0.5) * distance[..., None]
    inside = (place >= -1) & (place <= pixels) & (sample < end[..., None])
    place = torch.where(inside, place, 0.0).clamp(0, max(pixels - 1, 0))
    # A sample shares its weight between the two pixels around it: max(0, 1 - distance).
    share = 1 - (place[..., None] - torch.arange(pixels, device=start.device)).abs()
    return (share.clamp_min(0) * inside[..., None]).sum(2), count[:, 0]


def _axes(
    rois: Tensor,
    spatial_scale: float,
    bins: tuple[int, int],
    pixels: tuple[int, int],
    sampling_ratio: int,
    aligned: bool,
) -> tuple[Tensor, Tensor]:
    """Return the weights of rows and columns; row weights are divided by the number of samples."""
    corners = rois[:, 1:].detach().double() * spatial_scale - (0.5 if aligned else 0.0)
    left, top, right, bottom = corners.unbind(1)
    width, height = right - left, bottom - top
    if not aligned:
        width, height = width.clamp_min(1), height.clamp_min(1)
    rows, row_samples = _weights(top, height, bins[0], pixels[0], sampling_ratio)
    columns, column_samples = _weights(left, width, bins[1], pixels[1], sampling_ratio)
    samples = (row_samples * column_samples).clamp_min(1)
    return rows / samples[:, None, None], columns


def _check_rois(op: str, rois: Tensor, batch: int) -> None:
    if not rois.numel():
        return
    if not bool(rois.isfinite().all()):
        bad = float(rois[~rois.isfinite()][0])
        raise OpArgumentError(f"{op}: rois must be finite, got {bad:g}")
    image = rois[:, 0]
    wrong = (image < 0) | (image >= batch) | (image != image.floor())
    if bool(wrong.any()):
        raise OpArgumentError(
            f"{op}: rois must begin with the index of one of {batch} images, got {float(image[wrong][0]):g}"
        )


def _roi_align(
    x: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int = -1,
    aligned: bool = False,
) -> Tensor:
    """Average bilinear samples of a feature map in a grid of bins over each box.

    A bin has ``sampling_ratio`` by ``sampling_ratio`` samples at equal distances, or ``ceil(size of the bin)`` per
    axis if ``sampling_ratio`` is not positive. A sample up to one pixel outside the map has the value of the nearest
    pixel on the border, beyond that it counts as 0. Sums are float32 and rounded once; places are float64.

    Args:
        x: ``[N, C, H, W]``, float32, bfloat16 or float16, contiguous or channels-last.
        rois: ``[K, 5]``, in the dtype of ``x`` or float32: index of the image, then left, top, right, bottom.
        spatial_scale: Pixels of the map per unit of the boxes.
        pooled_height: Rows of bins.
        pooled_width: Columns of bins.
        sampling_ratio: Samples of a bin along each axis; 0 or less means as many as the bin has pixels, rounded up.
        aligned: Whether coordinates are shifted by half a pixel, so that pixel centers lie at halves. Without it a box
            has at least 1 x 1 pixels.

    Returns:
        ``[K, C, pooled_height, pooled_width]`` in the dtype of ``x``, channels-last if ``x`` is. The gradient for
        ``x`` is `roi_align_backward`; boxes have none.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, boxes that are not finite, or an index of no image.

    Source: He, Gkioxari, Dollar and Girshick, "Mask R-CNN", 2017.
    """
    _check_rois("roi_align", rois, x.shape[0])
    bins, pixels = (pooled_height, pooled_width), (x.shape[2], x.shape[3])
    rows, columns = _axes(rois, spatial_scale, bins, pixels, sampling_ratio, aligned)
    value = acc(x)
    boxes = value[rois[:, 0].long()]
    y = torch.einsum("kph,kchw,kqw->kcpq", rows.to(value), boxes, columns.to(value))
    return y.to(x.dtype).contiguous(memory_format=_format(channels_last(x)))


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
    """Return the gradient of `roi_align` for its feature map.

    The sums are float32, in the order of the boxes whatever the number of threads, and rounded once.

    Args:
        grad: ``[K, channels, pooled_height, pooled_width]``, float32, bfloat16 or float16.
        rois: ``[K, 5]`` as in `roi_align`.
        spatial_scale: As in `roi_align`.
        pooled_height: As in `roi_align`.
        pooled_width: As in `roi_align`.
        batch_size: Images of the feature map.
        channels: Channels of the feature map.
        height: Rows of the feature map.
        width: Columns of the feature map.
        sampling_ratio: As in `roi_align`.
        aligned: As in `roi_align`.
        is_channels_last: Whether the result is channels-last.

    Returns:
        ``[batch_size, channels, height, width]`` in the dtype of ``grad``.

    Raises:
        RuntimeError: As in `roi_align`.
    """
    _check_rois("roi_align_backward", rois, batch_size)
    bins, pixels = (pooled_height, pooled_width), (height, width)
    rows, columns = _axes(rois, spatial_scale, bins, pixels, sampling_ratio, aligned)
    g = acc(grad)
    parts = torch.einsum("kph,kcpq,kqw->kchw", rows.to(g), g, columns.to(g))
    total = g.new_zeros(batch_size, channels, height, width)
    total.index_add_(0, rois[:, 0].long(), parts)
    return total.to(grad.dtype).contiguous(memory_format=_format(is_channels_last))


def _format(last: bool) -> torch.memory_format:
    return torch.channels_last if last else torch.contiguous_format


def _empty(x: Tensor, shape: Sequence[int], last: bool) -> Tensor:
    # Not new_empty().to(): of one pixel, that keeps the strides of the other format.
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_format(last))


def _backward(grads: tuple[Tensor], *args: Any) -> tuple[Tensor | None, ...]:
    x, rois, *rest = args
    scale, rows, columns, ratio, aligned = (*rest, *(-1, False)[len(rest) - 3 :])
    gradient = torch.ops.ipex.roi_align_backward(
        grads[0], rois, scale, rows, columns, *x.shape, ratio, aligned, channels_last(x)
    )
    return (gradient, *[None] * (len(args) - 1))


def _check_boxes(a: Arguments, of: str) -> None:
    rois, scale = a.rois, a.spatial_scale
    check_kind(a.op, "rois", rois, getattr(a, of), of, or_float32=True)
    fine = rois.dim() == 2 and rois.shape[1] == 5
    a.require(fine, "rois", "have shape [K, 5]", list(rois.shape))
    a.require(0 < scale < 1e30, "spatial_scale", "be positive and below 1e+30", f"{scale:g}")
    a.require(a.sampling_ratio <= MOST_SAMPLES, "sampling_ratio", f"be at most {MOST_SAMPLES}")
    for name in ("pooled_height", "pooled_width"):
        a.require(0 < getattr(a, name) <= MOST_BINS, name, f"be from 1 to {MOST_BINS}")


def _check(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() == 4, "x", "be 4-D [N, C, H, W]", f"{a.x.dim()}-D")
    _check_boxes(a, "x")


def _backward_check(a: Arguments) -> None:
    check_tensor(a.op, "grad", a.grad)
    _check_boxes(a, "grad")
    for name, most in (
        ("batch_size", MOST_IMAGES),
        ("height", MOST_PIXELS),
        ("width", MOST_PIXELS),
    ):
        a.require(0 <= getattr(a, name) <= most, name, f"be from 0 to {most}")
    a.require(a.channels >= 0, "channels", "not be negative")
    shape = [a.rois.shape[0], a.channels, a.pooled_height, a.pooled_width]
    check_shape(a.op, "grad", a.grad, shape)


def _fake(a: Arguments) -> Tensor:
    return _empty(
        a.x, (a.rois.shape[0], a.x.shape[1], a.pooled_height, a.pooled_width), channels_last(a.x)
    )


def _backward_fake(a: Arguments) -> Tensor:
    return _empty(a.grad, (a.batch_size, a.channels, a.height, a.width), a.is_channels_last)


def _boxes(count: int, images: int, width: int, height: int, seed: int = 41) -> Tensor:
    generator = torch.Generator().manual_seed(seed + count)
    center = torch.rand(count, 2, generator=generator) * torch.tensor([width, height])
    half = torch.rand(count, 2, generator=generator) * torch.tensor([width, height]) * 0.4
    image = torch.randint(0, max(images, 1), (count, 1), generator=generator).float()
    boxes = torch.cat([image, center - half, center + half], 1)
    return (boxes * 16).round() / 16 + torch.tensor([0, 0.01, 0.02, 0.03, 0.04])


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
    for n, c, h, w, k, bins, scale, ratio, aligned in (
        (1, 1, 1, 1, 1, (1, 1), 1.0, 1, False),
        (2, 5, 9, 12, 6, (7, 7), 0.5, -1, True),
        (1, 33, 16, 16, 4, (3, 2), 0.25, 2, False),
        (2, 70, 12, 10, 5, (2, 3), 1.0, -1, False),
        (3, 16, 20, 14, 7, (7, 7), 0.125, 2, True),
        (1, 130, 6, 7, 3, (5, 4), 1.0, 3, True),
    ):
        x = randn(n, c, h, w, dtype=dtype, seed=40)
        rois = _boxes(k, n, int(w / scale), int(h / scale))
        name = f"{n}x{c}x{h}x{w}-{k}-{bins[0]}x{bins[1]}"
        args = (rois, scale, *bins, ratio, aligned)
        yield Sample((x, *args), id=name)
        last = x.contiguous(memory_format=torch.channels_last)
        yield Sample((last, *args), id=f"{name}-channels_last")
    x = randn(2, 20, 8, 8, dtype=dtype, seed=42)
    odd = torch.tensor(
        [
            [0, -30.0, -30, -20, -20],
            [1, -3.1, -2.2, 3.3, 12.4],
            [0, 5.1, 5.2, 2.3, 1.4],
            [1, 2.5, 2.5, 2.5, 2.5],
            [0, -1e9, -1e9, 1e9, 1e9],
            [1, 6.1, 6.2, 9.3, 40.4],
        ]
    )
    yield Sample((x, odd, 1.0, 2, 2, 2, False), id="outside")
    yield Sample((x, odd[[0, 1, 2, 3, 5]], 1.0, 3, 3, -1, True), id="outside-aligned")
    yield Sample((x, odd, 1.0, 2, 2, -(2**63), False), id="outside-adaptive")
    yield Sample((x, odd[1:2].to(dtype), 1.0, 3, 3), id="rois_in_dtype")
    yield Sample((x[:, 2:19], odd[1:4], 1.0, 2, 2), id="slice")
    yield Sample((x, odd[:0], 1.0, 2, 2), id="no_boxes")
    yield Sample((x[:, :0], odd[:2], 1.0, 2, 2), id="no_channels")


def _backward_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for sample in _samples(dtype):
        x, rois, scale, rows, columns, *rest = sample.args
        ratio, aligned = (*rest, *(-1, False)[len(rest) :])
        grad = randn(rois.shape[0], x.shape[1], rows, columns, dtype=dtype, seed=43)
        grad = grad.to(memory_format=_format(channels_last(x)))
        args = (grad, rois, scale, rows, columns, *x.shape, ratio, aligned, channels_last(x))
        yield Sample(args, id=sample.id)


def _stock(
    x: Tensor,
    rois: Tensor,
    spatial_scale: float,
    pooled_height: int,
    pooled_width: int,
    sampling_ratio: int,
    aligned: bool,
) -> Tensor:
    """Sample with `grid_sample` image by image and average: the fastest way we know in stock PyTorch."""
    corners = rois[:, 1:] * spatial_scale - (0.5 if aligned else 0.0)
    ratio, (height, width) = sampling_ratio, x.shape[2:]
    ys = (torch.arange(pooled_height * ratio) + 0.5) / (pooled_height * ratio)
    xs = (torch.arange(pooled_width * ratio) + 0.5) / (pooled_width * ratio)
    size = corners[:, 2:] - corners[:, :2]
    size = size if aligned else size.clamp_min(1)
    gx = corners[:, 0, None] + size[:, 0, None] * xs
    gy = corners[:, 1, None] + size[:, 1, None] * ys
    shape = (rois.shape[0], ys.numel(), xs.numel())
    grid = torch.stack(
        [
            (gx[:, None, :].expand(shape) * 2 + 1) / width - 1,
            (gy[:, :, None].expand(shape) * 2 + 1) / height - 1,
        ],
        -1,
    ).to(x.dtype)
    y = x.new_empty(rois.shape[0], x.shape[1], pooled_height, pooled_width)
    for image in range(x.shape[0]):
        mine = (rois[:, 0] == image).nonzero().squeeze(1)
        tall = grid[mine].reshape(1, -1, xs.numel(), 2)
        sampled = F.grid_sample(x[image : image + 1], tall, "bilinear", "border", False)
        sampled = sampled.view(x.shape[1], mine.numel(), ys.numel(), xs.numel()).transpose(0, 1)
        y[mine] = F.avg_pool2d(sampled, ratio)
    return y


def _backward_stock(grad: Tensor, rois: Tensor, *args: Any) -> Tensor:
    scale, rows, columns, n, c, h, w, ratio, aligned, last = args
    with torch.inference_mode(False), torch.enable_grad():
        if grad.is_inference():  # such tensors cannot be part of a graph
            grad, rois = grad.clone(), rois.clone()
        x = _empty(grad, (n, c, h, w), last).zero_().requires_grad_()
        y = _stock(x, rois, scale, rows, columns, ratio, aligned)
        return torch.autograd.grad(y, x, grad)[0]


def _case(shape: tuple[int, ...], last: bool, dtype: torch.dtype) -> Any:
    n, c, h, w, k, bins = shape
    x = randn(n, c, h, w, dtype=dtype, seed=44).to(memory_format=_format(last))
    rois = _boxes(k, n, w, h)
    rois[:, 1::2].clamp_(0, w - 1)  # inside: what stock samples beyond the border differs
    rois[:, 2::2].clamp_(0, h - 1)
    return x, rois, 1.0, bins, bins, 2, True


def _bench() -> Iterator[BenchCase]:
    for shape in ((1, 256, 50, 50, 256, 7), (2, 256, 100, 100, 512, 7), (1, 32, 20, 20, 40, 14)):
        n, c, h, w, k, bins = shape
        for last in (False, True):
            yield BenchCase(
                f"{n}x{c}x{h}x{w}-{k}-{bins}x{bins}" + ("-channels_last" if last else ""),
                lambda dtype, shape=shape, last=last: _case(shape, last, dtype),
                lambda dtype, e=n * c * h * w + k * c * bins * bins: e * dtype.itemsize,
            )


def _backward_bench() -> Iterator[BenchCase]:
    def make(case: BenchCase, dtype: torch.dtype) -> tuple[Any, ...]:
        x, rois, scale, rows, columns, ratio, aligned = case.make(dtype)
        grad = randn(rois.shape[0], x.shape[1], rows, columns, dtype=dtype, seed=45)
        grad = grad.to(memory_format=_format(channels_last(x)))
        return (grad, rois, scale, rows, columns, *x.shape, ratio, aligned, channels_last(x))

    for case in _bench():
        yield BenchCase(case.id, lambda dtype, case=case: make(case, dtype), case.bytes)


register_op(
    reference=_roi_align,
    check=_check,
    fake=_fake,
    samples=_samples,
    stock=_stock,
    backward=_backward,
    tolerance=SUM_TOLERANCE,
    bench=_bench,
    summary="Bilinear samples of a feature map in a grid over each box",
)

register_op(
    reference=_roi_align_backward,
    check=_backward_check,
    fake=_backward_fake,
    samples=_backward_samples,
    stock=_backward_stock,
    backward=None,
    tolerance=SUM_TOLERANCE,
    bench=_backward_bench,
    summary="Gradient of roi_align for its feature map",
)

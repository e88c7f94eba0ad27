# SPDX-License-Identifier: Apache-2.0
"""Decoding of an SSD head: offsets from prior boxes to corners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    check_dtype,
    check_tensor,
    fake_like,
    randn,
)
from ipex_core.library.kernels import register
from ipex_core.library.spec import BenchCase, OpSpec, Sample

Tensor = torch.Tensor


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


def _check(a: Arguments) -> None:
    check_tensor(a.op, "locations", a.locations)
    shape = list(a.locations.shape)
    a.require(shape[-1] == 4, "locations", "have shape [..., 4]", shape)
    check_device(a.op, "priors", a.priors, a.locations, "locations")
    check_dtype(a.op, "priors", a.priors, a.locations, "locations", or_float32=True)
    fine = a.priors.dim() > 0 and a.priors.shape[-1] == 4
    a.require(fine, "priors", "have shape [..., 4]", list(a.priors.shape))
    check_broadcastable(a.op, "priors", a.priors, shape, "locations")


def _fake(a: Arguments) -> Tensor:
    return fake_like(a.locations)


def _priors(*shape: int, dtype: torch.dtype) -> Tensor:
    return randn(*shape, 4, seed=62).abs().clamp(0.05, 2.0).to(dtype)


def _samples(dtype: torch.dtype) -> Iterator[Sample]:
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


def _bench() -> Iterator[BenchCase]:
    for batch, count in ((1, 3000), (32, 3000), (8, 15130)):

        def make(dtype: torch.dtype, b: int = batch, n: int = count) -> tuple[Any, ...]:
            return randn(b, n, 4, dtype=dtype), _priors(n, dtype=dtype), 0.1, 0.2

        yield BenchCase(
            f"{batch}x{count}",
            make,
            lambda dtype, n=(2 * batch + 1) * count: n * 4 * dtype.itemsize,
        )


def _stock(
    locations: Tensor, priors: Tensor, center_variance: float, size_variance: float
) -> Tensor:
    center = locations[..., :2] * center_variance * priors[..., 2:] + priors[..., :2]
    size = torch.exp(locations[..., 2:] * size_variance) * priors[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


register(
    OpSpec(
        name="locations_to_boxes",
        schema=(
            "(Tensor locations, Tensor priors, float center_variance, float size_variance)"
            " -> Tensor"
        ),
        reference=_locations_to_boxes,
        check=_check,
        fake=_fake,
        samples=_samples,
        stock=_stock,
        tolerance={
            torch.float32: (1e-5, 1e-5),
            torch.bfloat16: (1.6e-2, 1.6e-2),
            torch.float16: (2e-3, 2e-3),
        },
        bench=_bench,
        summary="Corners of boxes from the output of an SSD head",
    )
)

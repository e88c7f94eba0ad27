# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: channel scales that move outliers of an activation into the weights that read it."""

from __future__ import annotations

from typing import Any

import torch
from torch.ao.quantization.observer import MinMaxObserver

from ipex_quant.int8.boundary import Scale
from ipex_quant.int8.observe import Watch, scale_of
from ipex_quant.qconfig.static import QConfigSmoothQuant

__all__ = ["rounded", "rounded_weight", "smooth_group"]

Tensor = torch.Tensor

_FLOOR = 1e-6


def smooth_group(
    qconfig: QConfigSmoothQuant,
    watch: Watch,
    weights: list[Tensor],
    name: str,
    alpha: float | None = None,
) -> tuple[Tensor, Scale]:
    """Return what the channels of an activation are multiplied by, and the scale of the result.

    Args:
        qconfig: The configuration of the layers.
        watch: Of the activation, calibrated.
        weights: The float weights ``[N, K]`` of the layers that share the scales.
        name: Of the first layer, for its alpha.
        alpha: Used instead of the alpha of the configuration.
    """
    low, high = watch.channel_range()
    x_peak = torch.maximum(low.abs(), high.abs()).float()
    w_peak = _weight_peak(qconfig, weights)
    wanted = qconfig.alpha_of(name) if alpha is None else alpha
    if wanted == "auto":
        wanted = _best_alpha(qconfig, watch, weights, x_peak, w_peak)
    factor = _factor(x_peak, w_peak, float(wanted))
    return factor, _range_scale(qconfig, low * factor, high * factor, watch.name)


def rounded(x: Tensor, scale: Scale) -> Tensor:
    """Return what the codes of an activation stand for."""
    codes = torch.round(x / scale.scale + scale.zero).clamp(0, 255)
    return (codes - scale.zero) * scale.scale


def rounded_weight(weight: Tensor) -> Tensor:
    """Return what the codes of a weight ``[N, K]`` stand for."""
    step = weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return torch.round(weight / step).clamp(-128, 127) * step


def _factor(x_peak: Tensor, w_peak: Tensor, alpha: float) -> Tensor:
    return (w_peak + _FLOOR).pow(1 - alpha) / (x_peak + _FLOOR).pow(alpha)


def _weight_peak(qconfig: QConfigSmoothQuant, weights: list[Tensor]) -> Tensor:
    if qconfig.wei_ic_observer is None:
        return torch.stack([weight.detach().float().abs().amax(0) for weight in weights]).amax(0)
    observer: Any = qconfig.wei_ic_observer()
    for weight in weights:
        observer(weight.detach().float())
    return torch.maximum(observer.min_val.abs(), observer.max_val.abs())


def _range_scale(qconfig: QConfigSmoothQuant, low: Tensor, high: Tensor, name: str) -> Scale:
    observer: Any = (qconfig.activation or MinMaxObserver)()
    observer(torch.stack([low, high]))
    return scale_of(observer, name)


def _best_alpha(
    qconfig: QConfigSmoothQuant, watch: Watch, weights: list[Tensor], x_peak: Tensor, w_peak: Tensor
) -> float:
    """Return the alpha whose integers give the least squared error on rows that were kept."""
    x = watch.rows
    assert x is not None
    low, high = watch.channel_range()
    grid = qconfig.auto.grid()
    errors: list[list[float]] = []  # by alpha, then layer
    for alpha in grid:
        factor = _factor(x_peak, w_peak, alpha)
        codes = rounded(x * factor, _range_scale(qconfig, low * factor, high * factor, watch.name))
        errors.append([])
        for weight in weights:
            plain = weight.detach().float()
            found = codes @ rounded_weight(plain / factor).T
            errors[-1].append((found - x @ plain.T).square().sum().item())
    if qconfig.auto.shared_criterion == "mean":
        return min(zip(map(sum, errors), grid, strict=True), key=lambda it: it[0])[1]
    own = [
        min(zip((row[i] for row in errors), grid, strict=True), key=lambda it: it[0])[1]
        for i in range(len(weights))
    ]
    return min(own) if qconfig.auto.shared_criterion == "min" else max(own)

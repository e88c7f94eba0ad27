# SPDX-License-Identifier: Apache-2.0
"""Observing activations while a prepared model is calibrated.

SmoothQuant has channel scales that move outliers of an activation into the weights that read it. Alpha of a
configuration may be chosen block by block: one for all layers of a block, by the error of what the block returns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization.observer import MinMaxObserver, PerChannelMinMaxObserver
from torch.utils._pytree import tree_map

from ipex_core.errors import OpArgumentError
from ipex_quant.int8.boundary import Scale
from ipex_quant.int8.dataflow import tensors_of
from ipex_quant.int8.plan import Layer
from ipex_quant.qconfig.static import QConfigSmoothQuant
from ipex_quant.weight_only.convert import stacks

#: Rows of an activation that are kept to choose alpha.
_SAMPLE = 256


@dataclasses.dataclass
class Watch:
    """The observer of one value, called before the module that reads it first, or after the one that makes it.

    Attributes:
        name: Where it is seen, for messages.
        position: Which argument of the module it is; -1 for what it returns.
        observer: Of the value; None if only its channels count.
        channels: Observer of the channels along the last dimension, for SmoothQuant.
        keep: Whether rows are kept.
        scale: From a file, or what the observer last gave; None before calibration.
        smooth: Channel scales from a file.
        runs: How many calls were observed.
        enabled: Whether it observes.
        rows: The rows kept.
    """

    name: str
    position: int
    observer: Any
    channels: Any = None
    keep: bool = False
    scale: Scale | None = None
    smooth: Tensor | None = None
    runs: int = 0
    enabled: bool = True
    rows: Tensor | None = None
    _last: Any = None

    def knows(self, x: Tensor) -> bool:
        """Return whether a tensor is the one seen last, or a view of it."""
        last = None if self._last is None else self._last()
        if last is None:
            return False
        return x is last or x.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what cannot be copied."""
        return {**self.__dict__, "_last": None}

    def put(self, model: nn.Module) -> None:
        """Observe calls of the module from now on."""
        module = model.get_submodule(self.name)
        if self.position < 0:
            module.register_forward_hook(self, with_kwargs=True)
        else:
            module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any = None
    ) -> None:
        """Observe the argument, or the result, of a call."""
        if not self.enabled:
            return
        given = (*args, *kwargs.values())
        self.observe(given[self.position] if self.position >= 0 else result, self.name)

    def observe(self, x: Tensor, name: str, counts: bool = True) -> None:
        """Take a tensor into account; ``name`` is the module that it was seen at."""
        self._last = weakref.ref(x)
        x = x.detach()
        if x.numel() == 0:
            return
        if not bool(x.isfinite().all()):
            what = "NaN" if bool(x.isnan().any()) else "inf"
            must = (
                "get finite inputs"
                if name != self.name or self.position >= 0
                else "give finite results"
            )
            raise OpArgumentError(
                f"calibration: {name} must {must}, got {what} in run {self.runs + 1}"
            )
        self.runs += counts or not self.runs
        self.scale = None
        self.smooth = None
        x = x.float()
        if self.observer is not None:
            self.observer(x)
        if self.channels is not None:
            self.channels(x.reshape(-1, x.shape[-1]))
        if self.keep:
            rows = x.reshape(-1, x.shape[-1])
            step = max(1, rows.shape[0] // 32)
            kept = rows[::step][:32].clone()
            self.rows = kept if self.rows is None else torch.cat([self.rows, kept])[-_SAMPLE:]

    @property
    def ready(self) -> bool:
        """Whether there is a scale."""
        return self.runs > 0 or self.scale is not None

    def get_scale(self) -> Scale:
        """Return the scale from the file, or the scale of the observer."""
        if self.scale is None:
            self.scale = scale_of(self.observer, self.name)
        return self.scale

    def channel_range(self) -> tuple[Tensor, Tensor]:
        """Return least and largest number of each channel."""
        return self.channels.min_val, self.channels.max_val


@dataclasses.dataclass
class Reader:
    """Observes what a layer reads on paths where that is not the value that its watch has seen already."""

    name: str
    watch: Watch

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Observe the argument of a call."""
        x = (*args, *kwargs.values())[0]
        if self.watch.enabled and not self.watch.knows(x):
            self.watch.observe(x, self.name, counts=False)


def channel_observer() -> Any:
    """Return an observer of the last of two dimensions."""
    return PerChannelMinMaxObserver(ch_axis=1, dtype=torch.qint8)


def scale_of(observer: Any, name: str) -> Scale:
    """Return the scale of an observer for uint8 codes."""
    scale, zero = observer.calculate_qparams()
    if scale.numel() != 1:
        raise OpArgumentError(
            f"convert: the observer of {name} must be per tensor, got {scale.numel()} scales"
        )
    shift = 128 if observer.dtype == torch.qint8 else 0  # signed codes are stored with 128 added
    return Scale(max(float(scale), 2.0**-100), int(zero) + shift)


# --- SmoothQuant ------------------------------------------------------------------------------------------------------


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


# --- alpha of a block -----------------------------------------------------------------------------------------------

#: Calls of a block that are kept.
_CALLS = 2


@dataclasses.dataclass
class BlockWatch:
    """Keeps what a block is called with first.

    Attributes:
        calls: Positional and keyword arguments.
        enabled: Whether it keeps any.
    """

    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = dataclasses.field(default_factory=list)
    enabled: bool = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keep the arguments of a call."""
        if self.enabled and len(self.calls) < _CALLS:
            self.calls.append(tree_map(_copy, (args, kwargs)))


@dataclasses.dataclass
class Group:
    """Layers that share channel scales, and how these follow from alpha."""

    layers: Sequence[Layer]
    scales: Callable[[float | None], tuple[Tensor, Scale]]

    @staticmethod
    def of(model: nn.Module, layers: Sequence[Layer], watch: Any) -> Group:
        """Return the group of some layers of a model that read the value of a watch."""
        weights: list[Any] = [model.get_submodule(layer.path).weight for layer in layers]
        first = layers[0]
        scales = functools.partial(smooth_group, first.qconfig, watch, weights, first.path)
        return Group(layers, scales)


def blocks_to_watch(model: nn.Module, layers: Sequence[Layer]) -> list[str]:
    """Return the entries of the model's outermost lists that have layers whose alpha depends on their block."""
    paths = [it.path for it in layers if _by_block(it)]
    entries = [name for stack in stacks(model) for name, _ in stack]
    return [name for name in entries if any(_inside(path, name) for path in paths)]


def best_of_block(
    model: nn.Module, name: str, watch: BlockWatch, groups: Sequence[Group]
) -> dict[str, float]:
    """Return by path the alpha of the layers of a block; nothing if the block was not called."""
    inside = [
        group
        for group in groups
        if all(_by_block(it) and _inside(it.path, name) for it in group.layers)
    ]
    if not inside or not watch.calls:
        return {}
    block = model.get_submodule(name)
    auto = inside[0].layers[0].qconfig.auto
    with torch.no_grad():
        expected = [_first(block(*args, **kwargs)) for args, kwargs in watch.calls]
        best, least = auto.init_alpha, float("inf")
        for alpha in auto.grid():
            error = 0.0
            with _rounding(model, inside, alpha):
                for (args, kwargs), wanted in zip(watch.calls, expected, strict=True):
                    found = _first(block(*args, **kwargs))
                    error += (found - wanted).double().square().sum().item()
            if error < least:
                best, least = alpha, error
    return {layer.path: best for group in inside for layer in group.layers}


@contextlib.contextmanager
def _rounding(model: nn.Module, groups: Sequence[Group], alpha: float) -> Iterator[None]:
    """Let the layers compute with what their codes would stand for."""
    with contextlib.ExitStack() as hooks:
        for group in groups:
            factor, scale = group.scales(alpha)
            for layer in group.layers:
                module: Any = model.get_submodule(layer.path)
                weight = rounded_weight(module.weight.float() / factor)
                hook = functools.partial(_product, factor, scale, weight)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield


def _product(
    factor: Tensor,
    scale: Scale,
    weight: Tensor,
    module: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Tensor,
) -> Tensor:
    x = rounded((*args, *kwargs.values())[0].float() * factor, scale)
    bias = None if module.bias is None else module.bias.float()
    return nn.functional.linear(x, weight, bias).to(result.dtype)


def _by_block(layer: Layer) -> bool:
    if not layer.smooth or layer.qconfig.alpha_of(layer.path) != "auto":
        return False
    return bool(layer.qconfig.auto.enable_blockwise_loss)


def _inside(path: str, name: str) -> bool:
    return not name or path == name or path.startswith(f"{name}.")


def _first(output: Any) -> Tensor:
    return next(iter(tensors_of(output))).float()


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

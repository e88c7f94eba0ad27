# SPDX-License-Identifier: Apache-2.0
"""Observing activations while a prepared model is calibrated."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import torch
from torch import nn
from torch.ao.quantization.observer import PerChannelMinMaxObserver

from ipex_core.errors import OpArgumentError
from ipex_quant.int8.boundary import Scale

__all__ = ["Reader", "Watch", "scale_of"]

Tensor = torch.Tensor

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
            module.register_forward_hook(self)
        else:
            module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], result: Any = None) -> None:
        """Observe the argument, or the result, of a call."""
        if not self.enabled:
            return
        self.observe(args[self.position] if self.position >= 0 else result, self.name)

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

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Observe the argument of a call."""
        if self.watch.enabled and not self.watch.knows(args[0]):
            self.watch.observe(args[0], self.name, counts=False)


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

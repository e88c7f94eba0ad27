# SPDX-License-Identifier: Apache-2.0
"""Where 8-bit operands are on, and how histories of magnitudes become scales."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.packing.quantize import power_of_two_scale
from ipex_quant.fp8.recipe import DelayedScaling, Format
from ipex_quant.fp8.tensors import Float8Format, FP8TensorMeta

__all__ = [
    "amax_and_scale_update",
    "default_amax_and_scale_update",
    "fp8_autocast",
    "get_default_fp8_recipe",
    "get_fp8_device_type",
    "get_fp8_dtype",
    "get_fp8_group",
    "get_fp8_recipe",
    "is_fp8_calibration",
    "is_fp8_enabled",
    "refresh_scales",
    "update_amax_history",
]


class _State(threading.local):
    """What the innermost `fp8_autocast` of this thread asked for."""

    def __init__(self) -> None:
        # Attributes of the instance: Dynamo of torch 2.11 reads the attributes of the class and keeps them.
        self.enabled = False
        self.calibrating = False
        self.recipe: DelayedScaling | None = None
        self.group: Any = None


_state = _State()


def get_default_fp8_recipe() -> DelayedScaling:
    """Return the recipe of a region that names none."""
    return DelayedScaling()


def get_fp8_dtype(fp8_recipe: DelayedScaling, fprop_tensor: bool = True) -> Float8Format:
    """Return the format of inputs and weights, or of gradients of outputs.

    Args:
        fp8_recipe: The recipe.
        fprop_tensor: False: of gradients.
    """
    form = fp8_recipe.fp8_format
    if form is Format.E4M3 or (form is Format.HYBRID and fprop_tensor):
        return Float8Format.kFloat8_E4M3
    return Float8Format.kFloat8_E5M2


def is_fp8_enabled() -> bool:
    """Return whether modules compute with 8-bit operands here."""
    return _state.enabled


def is_fp8_calibration() -> bool:
    """Return whether modules record magnitudes for later here."""
    return _state.calibrating


def get_fp8_recipe() -> DelayedScaling:
    """Return the recipe in force here."""
    return _state.recipe or get_default_fp8_recipe()


def get_fp8_group() -> Any:
    """Return the process group whose ranks share scales here, or None."""
    return _state.group


def get_fp8_device_type() -> str:
    """Return ``"cpu"``."""
    return "cpu"


@contextlib.contextmanager
def fp8_autocast(
    enabled: bool = False,
    calibrating: bool = False,
    fp8_recipe: DelayedScaling | None = None,
    device: str = "cpu",
    *,
    fp8_group: Any = None,
) -> Iterator[None]:
    """Let `FP8Linear` layers compute with 8-bit operands, as a context manager or a decorator.

    Regions nest: the innermost one of the thread counts. Whether a gradient is made of 8-bit numbers is decided by the
    region of the forward pass; the backward pass may lie outside.

    Args:
        enabled: Compute with 8-bit operands. Modules in training mode update their scales at each step; modules in
            evaluation mode use the scales they have.
        calibrating: Record magnitudes in evaluation mode too. Without ``enabled`` products are ordinary ones.
        fp8_recipe: The recipe; None: ``DelayedScaling()``.
        device: ``"cpu"``.
        fp8_group: A process group of ``torch.distributed`` whose ranks take the largest magnitude of all, so that
            they have the same scales; None: each for itself. Backward passes use it too, so with
            ``DistributedDataParallel`` it should be a group of its own.

    Raises:
        ValueError: An argument is not as described.
    """
    op = "fp8_autocast"
    for name, value in (("enabled", enabled), ("calibrating", calibrating)):
        check(isinstance(value, bool), op, name, "be True or False", repr(value))
    fits = fp8_recipe is None or isinstance(fp8_recipe, DelayedScaling)
    check(fits, op, "fp8_recipe", "be a DelayedScaling or None", repr(fp8_recipe))
    check(str(device) == "cpu", op, "device", "be 'cpu'", repr(device))
    former = _state.enabled, _state.calibrating, _state.recipe, _state.group
    _state.enabled, _state.calibrating = enabled, calibrating
    _state.recipe, _state.group = fp8_recipe, fp8_group
    try:
        yield
    finally:
        _state.enabled, _state.calibrating, _state.recipe, _state.group = former


def update_amax_history(amax_history: Tensor) -> Tensor:
    """Return a history with an empty current step: row 0 goes to the end, the oldest row is forgotten.

    Args:
        amax_history: ``[steps, tensors]``.
    """
    if amax_history.shape[0] > 1:
        amax_history = torch.roll(amax_history, -1, 0)
    else:
        amax_history = amax_history.clone()
    amax_history[0] = 0
    return amax_history


def default_amax_and_scale_update(
    amax_history: Tensor, scale: Tensor, fp8_max: float, margin: int, amax_compute_algo: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute scales from a history and begin a new step.

    Args:
        amax_history: ``[steps, tensors]``.
        scale: ``[tensors]``, kept where the magnitude is 0 or not finite.
        fp8_max: Largest number of the format.
        margin: See `DelayedScaling`.
        amax_compute_algo: See `DelayedScaling`.

    Returns:
        New history, scale and inverse of the scale.
    """
    scale = _scale(amax_history, scale, fp8_max, margin, amax_compute_algo)
    return update_amax_history(amax_history), scale, 1.0 / scale


def _scale(history: Tensor, scale: Tensor, fp8_max: float, margin: int, algo: Any) -> Tensor:
    if callable(algo):
        largest = algo(history)
        fits = isinstance(largest, Tensor) and largest.shape == scale.shape
        expected = f"return a tensor of shape {list(scale.shape)}"
        got = list(largest.shape) if isinstance(largest, Tensor) else repr(largest)
        check(fits, "DelayedScaling", "amax_compute_algo", expected, got)
    else:
        largest = history.amax(0) if algo == "max" else history[0]
    return power_of_two_scale(largest, scale, fp8_max, margin)


def amax_and_scale_update(fp8_meta: dict[str, Any], fwd_update: bool, group: Any = None) -> None:
    """Compute the scales of a module from its history and begin a new step.

    Args:
        fp8_meta: Of an `Fp8BaseModule`.
        fwd_update: The scales of forward products; False: of backward products.
        group: Process group that shares scales, or None.
    """
    name = "fwd" if fwd_update else "bwd"
    meta: FP8TensorMeta = fp8_meta[f"scaling_{name}"]
    if meta.recorded:
        refresh_scales(fp8_meta, fwd_update, group)
        meta.amax_history = update_amax_history(meta.amax_history)


def refresh_scales(
    fp8_meta: dict[str, Any], fwd_update: bool, group: Any = None, always: bool = False
) -> None:
    """Compute the scales of a module, the current step included, if the interval is over or ``always``."""
    name = "fwd" if fwd_update else "bwd"
    meta: FP8TensorMeta = fp8_meta[f"scaling_{name}"]
    recipe: DelayedScaling = fp8_meta["recipe"]
    if group is not None:
        row = meta.amax_history[0].clone()
        torch.distributed.all_reduce(row, torch.distributed.ReduceOp.MAX, group=group)
        meta.amax_history[0] = row
    steps = fp8_meta[f"steps_{name}"]
    fp8_meta[f"steps_{name}"] = steps + 1
    if steps % recipe.interval and not always:
        return
    limit = fp8_meta[f"fp8_max_{name}"]
    algo = recipe.amax_compute_algo
    meta.scale = _scale(meta.amax_history, meta.scale, limit, recipe.margin, algo)
    meta.scale_inv = 1.0 / meta.scale

# SPDX-License-Identifier: Apache-2.0
"""What modules with 8-bit operands share: scales, and their place in the state dict."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ipex_core.library.spec import check
from ipex_core.packing.quantize import DTYPES, amax, power_of_two_scale, to_fp8
from ipex_quant.fp8 import fp8 as _fp8
from ipex_quant.fp8.recipe import DelayedScaling, Format
from ipex_quant.fp8.tensors import FP8TensorMeta

__all__ = ["Fp8BaseModule", "prepare_backward", "rounded"]


class Fp8BaseModule(torch.nn.Module):
    """A module whose products have 8-bit operands inside `fp8_autocast`.

    Attributes:
        fp8_meta: Scales of the forward operands (``"scaling_fwd"``) and of gradients (``"scaling_bwd"``), the recipe
            (``"recipe"``) and what else belongs to them; before the first region the recipe only.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.fp8_meta: dict[str, Any] = {"recipe": DelayedScaling()}

    def set_meta_tensor(self, fwd: bool) -> None:
        """Make scales, all 1, or fit their history to the recipe.

        Args:
            fwd: Those of forward products; False: of backward products.
        """
        name = "scaling_fwd" if fwd else "scaling_bwd"
        history = self.fp8_meta["recipe"].amax_history_len
        if name in self.fp8_meta:
            self.fp8_meta[name].resize(history)
        else:  # input, weight and output; gradients of output and input
            count = self.fp8_meta["num_gemms"] * (3 if fwd else 2)
            self.fp8_meta[name] = FP8TensorMeta(count, history)
            self.fp8_meta["steps_fwd" if fwd else "steps_bwd"] = 0

    def init_fp8_meta_tensors(self) -> None:
        """Make all scales."""
        self.set_meta_tensor(True)
        self.set_meta_tensor(False)

    def fp8_init(self, num_gemms: int = 1) -> None:
        """Take the recipe that is in force.

        Args:
            num_gemms: Number of products of the module.
        """
        meta, recipe = self.fp8_meta, _fp8.get_fp8_recipe()
        if meta.get("recipe") == recipe and "scaling_fwd" in meta:
            return
        meta["recipe"] = recipe
        meta.setdefault("num_gemms", num_gemms)
        meta["fp8_max_fwd"] = recipe.fp8_format.value.max_fwd
        meta["fp8_max_bwd"] = recipe.fp8_format.value.max_bwd
        self.init_fp8_meta_tensors()
        for forward in (True, False):  # scales of another recipe
            if meta["scaling_fwd" if forward else "scaling_bwd"].recorded:
                _fp8.refresh_scales(meta, forward, always=True)

    @contextlib.contextmanager
    def prepare_forward(self, num_gemms: int = 1) -> Iterator[None]:
        """Begin a step inside `fp8_autocast`: ``with self.prepare_forward(): ...`` around the products of a forward.

        Args:
            num_gemms: Number of products of the module.
        """
        self.begin_step(num_gemms)
        yield

    def begin_step(self, num_gemms: int = 1) -> None:
        """Make scales current, inside `fp8_autocast`."""
        if not (_fp8.is_fp8_enabled() or _fp8.is_fp8_calibration()):
            return
        self.fp8_init(num_gemms)
        records = _fp8.is_fp8_calibration() or self.training
        if records and _fp8.is_fp8_enabled():
            _fp8.amax_and_scale_update(self.fp8_meta, True, _fp8.get_fp8_group())
        elif records:  # `calibrate` makes the scales behind the step
            meta = self.fp8_meta["scaling_fwd"]
            if meta.recorded:
                meta.amax_history = _fp8.update_amax_history(meta.amax_history)

    def calibrate(self, tensors: dict[int, Tensor]) -> None:
        """Record the magnitudes of operands, by number, and compute scales that are valid from now on."""
        meta = self.fp8_meta["scaling_fwd"]
        for index, tensor in tensors.items():
            meta.record(index, amax(tensor))
        meta.recorded = True
        _fp8.refresh_scales(self.fp8_meta, True, _fp8.get_fp8_group(), always=True)

    # ------------------------------------------------------------------------------------------------------- state dict

    def get_extra_state(self) -> Tensor:
        """Return scales and histories as bytes, a uint8 tensor; empty before the first region."""
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        meta = self.fp8_meta
        state: dict[str, Any] = {"num_gemms": meta["num_gemms"]}
        for name in ("fwd", "bwd"):
            part = meta[f"scaling_{name}"]
            state[f"steps_{name}"] = meta[f"steps_{name}"]
            state[f"recorded_{name}"] = part.recorded
            state[f"scale_{name}"] = part.scale
            state[f"amax_history_{name}"] = part.amax_history
        state["recipe"] = _values(meta["recipe"])
        buffer = io.BytesIO()
        torch.save(state, buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Take scales and histories from `get_extra_state`.

        Raises:
            ValueError: It is something else.
        """
        self.fp8_meta = {"recipe": DelayedScaling()}
        if state is None or not state.numel():
            return
        try:
            found = torch.load(io.BytesIO(state.cpu().numpy().tobytes()), weights_only=True)
            self._take(found)
        except Exception as error:
            self.fp8_meta = {"recipe": DelayedScaling()}
            op = type(self).__name__
            check(False, op, "the extra state", "be a result of get_extra_state", repr(error))

    def _take(self, found: dict[str, Any]) -> None:
        values = found["recipe"]
        recipe = DelayedScaling(
            values["margin"],
            values["interval"],
            Format[values["fp8_format"]],
            values["amax_history_len"],
            values["amax_compute_algo"],
        )
        meta = self.fp8_meta
        meta.update(recipe=recipe, num_gemms=int(found["num_gemms"]))
        meta["fp8_max_fwd"] = recipe.fp8_format.value.max_fwd
        meta["fp8_max_bwd"] = recipe.fp8_format.value.max_bwd
        self.init_fp8_meta_tensors()
        for name in ("fwd", "bwd"):
            part = meta[f"scaling_{name}"]
            scale, history = found[f"scale_{name}"], found[f"amax_history_{name}"]
            if scale.shape != part.scale.shape or history.shape != part.amax_history.shape:
                raise ValueError(
                    f"scale_{name} must have shape {tuple(part.scale.shape)}, got {tuple(scale.shape)}"
                )
            meta[f"steps_{name}"] = int(found[f"steps_{name}"])
            part.scale, part.amax_history = scale.float(), history.float()
            part.scale_inv = 1.0 / part.scale
            part.recorded = bool(found[f"recorded_{name}"])

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, strict: bool, *lists: Any
    ) -> None:
        # The state dict of an ordinary layer has no extra state: not an error, there are no scales yet.
        missing = lists[0]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)
        key = f"{prefix}_extra_state"
        if key in missing:
            missing.remove(key)


def _values(recipe: DelayedScaling) -> dict[str, Any]:
    """Return a recipe as plain values; a function becomes ``"max"``, since it cannot be stored."""
    algo = recipe.amax_compute_algo
    return {
        "margin": recipe.margin,
        "interval": recipe.interval,
        "fp8_format": recipe.fp8_format.name,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": algo if isinstance(algo, str) else "max",
    }


@contextlib.contextmanager
def prepare_backward(fp8_meta: dict[str, Any], num_gemms: int = 1) -> Iterator[None]:
    """Begin the backward step of a module: its gradients are scaled by what was recorded before.

    Args:
        fp8_meta: Of the module.
        num_gemms: Number of its products.
    """
    _fp8.amax_and_scale_update(fp8_meta, False)
    yield


def rounded(
    fp8_meta: dict[str, Any], forward: bool, index: int, x: Tensor, record: bool
) -> tuple[Tensor, Tensor]:
    """Return an operand as 8-bit numbers, and the inverse of its scale.

    An operand that was never recorded is scaled by its own magnitude.

    Args:
        fp8_meta: Of the module.
        forward: An operand of a forward product; False: a gradient.
        index: Its number, of `FP8FwdTensors` or `FP8BwdTensors`.
        x: The operand, of any shape.
        record: Enter its magnitude into the history.
    """
    meta: FP8TensorMeta = fp8_meta["scaling_fwd" if forward else "scaling_bwd"]
    recipe: DelayedScaling = fp8_meta["recipe"]
    dtype = DTYPES[_fp8.get_fp8_dtype(recipe, forward)]
    scale = meta.scale[index]
    if record or not meta.recorded:
        largest = amax(x)
        if not meta.recorded:
            limit = fp8_meta["fp8_max_fwd" if forward else "fp8_max_bwd"]
            scale = power_of_two_scale(largest, scale, limit, recipe.margin)
            if record:  # valid until the first update
                meta.scale[index], meta.scale_inv[index] = scale, 1.0 / scale
        if record:
            meta.record(index, largest)
    return to_fp8(x, scale, dtype), 1.0 / scale

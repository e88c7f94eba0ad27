# SPDX-License-Identifier: Apache-2.0
"""The float weight of a layer that has codes: models read its dtype and shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ipex_core.packing.parameter import PackedWeight, hollow

__all__ = ["ShowsFloatWeight"]

Tensor = torch.Tensor


class _FloatWeight(PackedWeight):
    """Has shape and dtype of the float weight, and is dequantized when somebody computes with it."""

    layer: ShowsFloatWeight

    @staticmethod
    def __new__(cls, layer: ShowsFloatWeight) -> _FloatWeight:  # type: ignore[override]
        """Show the weight of a layer."""
        self: _FloatWeight = hollow(cls, layer.weight_shape(), layer.float_dtype)
        self.layer, self.form = layer, "int8"
        return self

    def _plain(self) -> Tensor:
        return self.layer.dequantize()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _KEEP and type(args[0]) is _FloatWeight:
            return _FloatWeight(args[0].layer)
        return super().__torch_dispatch__(func, types, args, kwargs)


_KEEP = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class ShowsFloatWeight(nn.Module):
    """A module whose buffer ``weight`` has codes, and whose attribute ``weight`` is the float weight.

    Models cast activations to its dtype, as CLIP does with images.
    """

    #: The dtype that ``weight`` shows; it follows casts of the model.
    float_dtype: torch.dtype = torch.float32

    @property
    def weight(self) -> Tensor:
        """The float weight; its values are computed when they are read."""
        # Graphs leave out what nobody computes with, and cannot make the stand-in.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.dequantize()
        return _FloatWeight(self)

    def weight_shape(self) -> torch.Size:
        """Return the shape of the float weight."""
        raise NotImplementedError

    def dequantize(self) -> Tensor:
        """Return the float weight that the codes stand for."""
        raise NotImplementedError

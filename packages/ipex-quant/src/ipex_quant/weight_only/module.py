# SPDX-License-Identifier: Apache-2.0
"""The module that computes with a packed quantised weight; `ipex_quant.weight_only.linear` has the ways to make one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.nn.call import call
from ipex_core.nn.fusable import finish, fits
from ipex_core.packing.parameter import PackedWeight
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
    _member,
    woq_qconfig,
)
from ipex_quant.weight import saved
from ipex_quant.weight.tensor import QuantizedWeight, unpack
from ipex_quant.weight_only.build import dtype_of

__all__ = ["WoqLinearModule"]

Tensor = torch.Tensor


class WoqLinearModule(nn.Module):
    """A linear layer on a quantised weight: computing, saving, loading, moving."""

    packed_weight: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias_: bool = True,
        dtype: int = WoqWeightDtype.INT8,
        qconfig: QConfigWoq | None = None,
    ) -> None:
        """Make a layer without a weight.

        Args:
            in_features: K.
            out_features: N.
            bias_: Whether it has a bias.
            dtype: A `WoqWeightDtype`; what is loaded may be another.
            qconfig: How to compute; a `QConfigWoq`, or None for the defaults.
        """
        super().__init__()
        op = type(self).__name__
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            check(value > 0, op, name, "be positive", value)
        self.in_features = in_features
        self.out_features = out_features
        self.register_buffer("packed_weight", None, persistent=False)
        bias = nn.Parameter(torch.zeros(out_features), requires_grad=False) if bias_ else None
        self.register_parameter("bias", bias)
        self.dtype = _member(op, "dtype", WoqWeightDtype, dtype)
        if qconfig is None:
            qconfig = woq_qconfig(weight_dtype=self.dtype)
        self.lowp_mode = qconfig.lowp_mode
        self.act_quant_mode = qconfig.act_quant_mode
        self.group_size: int = qconfig.group_size
        self.weight_qscheme = qconfig.weight_qscheme
        self.cache_weight_for_large_batch: bool = qconfig.cache_weight_for_large_batch
        self.modes = (qconfig.lowp_mode.name.lower(), qconfig.act_quant_mode.name.lower())
        #: The dtype that ``weight`` shows.
        self._float_dtype = torch.float32

    # -- computing ------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``x @ weight.T + bias``; the result has the dtype of ``x``."""
        return self.fused(x)

    def fused(
        self,
        x: Tensor,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        """Compute ``post(x @ weight.T + bias) * mul + residual + residual2``.

        Args:
            x: ``[..., K]``, float32, bfloat16 or float16.
            post: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
            residual: ``[..., N]``, or None.
            mul: ``[..., N]``, or None.
            residual2: ``[..., N]``, or None.

        Returns:
            ``[..., N]`` in the dtype of ``x``; operands of another dtype or shape are combined by torch's rules.

        Raises:
            OpArgumentError: An argument is not as described.
            RuntimeError: The layer has no weight yet.
        """
        packed = self._buffers["packed_weight"]
        if packed is None:
            raise RuntimeError(
                f"{type(self).__name__}: has no weight yet; make it with from_float or from_weight,"
                " or call load_state_dict"
            )
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        bias = self.bias
        if bias is not None and bias.dtype is not x.dtype and bias.dtype is not torch.float32:
            bias = bias.to(x.dtype)
        operands = (residual, mul, residual2)
        if not all(fits(value, x, self.out_features) for value in operands):
            return finish(self._run(x, packed, bias, "none", None, None, None), post, *operands)
        return self._run(x, packed, bias, post, *operands)

    def _run(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        post: str,
        residual: Tensor | None,
        mul: Tensor | None,
        residual2: Tensor | None,
    ) -> Tensor:
        lowp, act = self.modes
        y: Tensor = call(
            torch.ops.ipex.woq_linear.default,
            x,
            packed,
            self.out_features,
            bias,
            residual,
            post,
            mul,
            residual2,
            "none",
            lowp,
            act,
        )
        return y

    # -- the weight -----------------------------------------------------------------------------------------

    @property
    def weight(self) -> Tensor | None:
        """The float weight: it has shape and dtype, and is dequantised when somebody computes with it."""
        packed = self._buffers["packed_weight"]
        if packed is None:
            return None
        shape = torch.Size((self.out_features, self.in_features))
        return PackedWeight(packed, "woq", shape, self._float_dtype)

    def quantized_weight(self) -> QuantizedWeight:
        """Return codes, scales and zero points, unpacked."""
        packed = self._buffers["packed_weight"]
        if packed is None:
            raise RuntimeError(f"{type(self).__name__}: has no weight yet")
        weight = unpack(packed)
        weight.bias = self.bias
        return weight

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the ``[N, K]`` float weight."""
        return self.quantized_weight().dequantize(dtype)

    def set_weight(self, weight: QuantizedWeight) -> None:
        """Pack a weight and take it, with its bias.

        Raises:
            OpArgumentError: It has another shape, or the packed format cannot hold it.
        """
        op = weight.name or type(self).__name__
        for name in ("out_features", "in_features"):
            wanted, got = getattr(self, name), getattr(weight, name)
            check(got == wanted, op, name, f"be {wanted}", got)
        if self.lowp_mode is WoqLowpMode.INT8:
            fits = not weight.format.startswith("fp8")
            check(fits, op, "lowp_mode", "be NONE, FP16 or BF16 for fp8 weights", "INT8")
        self.packed_weight = weight.pack("vnni" if self.modes[0] == "int8" else "dot")
        self.group_size = weight.group_size
        self.dtype = dtype_of(weight)
        asymmetric = weight.zeros is not None
        self.weight_qscheme = (
            WoqWeightQScheme.ASYMMETRIC if asymmetric else WoqWeightQScheme.SYMMETRIC
        )
        bias = weight.bias
        if bias is not None and not bool(bias.any()):
            bias = None
        # A copy: what is given may be a view of a file or of another layer's parameter.
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), False)

    # -- torch.nn.Module ------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._buffers["packed_weight"] is not None:
            destination.update(saved.tensors(self.quantized_weight(), prefix))

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(
                state_dict,
                prefix,
                local_metadata,
                strict,
                missing_keys,
                unexpected_keys,
                error_msgs,
            )
        absent = saved.absent(state_dict, prefix)
        if strict:
            missing_keys += absent
            unexpected_keys += saved.unexpected(state_dict, prefix)
        if absent:
            return
        try:
            self.set_weight(saved.weight(state_dict, prefix))
        except ValueError as error:
            error_msgs.append(str(error))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        packed = self._buffers["packed_weight"]
        if packed is not None:
            self._check_move(fn, packed)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _check_move(self, fn: Callable[..., Any], packed: Tensor) -> None:
        """Try on nothing what is about to be done to all tensors: after an error nothing has moved."""
        op = type(self).__name__
        try:
            device = fn(packed.new_empty(0)).device
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            text = f"{op}: device must be cpu or xpu, got one that cannot be used: {error}"
            raise OpArgumentError(text) from error
        check(device.type in ("cpu", "xpu", "meta"), op, "device", "be cpu or xpu", device)

    def extra_repr(self) -> str:
        """Return the fields that IPEX's layer shows."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features},"
            f" dtype={self.dtype.name}, bias={self.bias is not None},"
            f" lowp_mode={self.lowp_mode.name}, act_quant_mode={self.act_quant_mode.name},"
            f" group_size={self.group_size},"
            f" cache_weight_for_large_batch={self.cache_weight_for_large_batch},"
            f" weight_qscheme={self.weight_qscheme.name}"
        )

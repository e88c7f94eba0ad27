# SPDX-License-Identifier: Apache-2.0
"""The linear layer with 8-bit operands."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_core.library.spec import FLOATS, check
from ipex_core.util.symbolic import tracing
from ipex_quant.fp8 import fp8 as _fp8
from ipex_quant.fp8.base import Fp8BaseModule, rounded
from ipex_quant.fp8.tensors import FP8BwdTensors, FP8FwdTensors

__all__ = ["EMULATED", "FP8Linear"]

log = logging.getLogger("ipex")

_F = TypeVar("_F", bound=Callable[..., Any])

_INPUT, _WEIGHT = int(FP8FwdTensors.GEMM1_INPUT), int(FP8FwdTensors.GEMM1_WEIGHT)
_GRADIENT = int(FP8BwdTensors.GRAD_OUTPUT1)

#: What `ipex.explain` and the log say.
EMULATED = (
    "8-bit operands are exact, products are computed in the dtype of the activations (emulated)"
)

_said = False


def _say() -> None:
    """Say once in a process that this is no 8-bit arithmetic."""
    global _said
    if not _said and not torch.compiler.is_compiling():
        _said = True
        log.warning("FP8Linear: %s", EMULATED)


def _outside_graphs(function: _F) -> _F:
    """Keep `torch.compile` from looking into what changes at each step; unlike the public name, imports no compiler."""
    compiler: Any = importlib.import_module("torch._compile")
    disabled: _F = compiler._disable_dynamo(function)
    return disabled


class _Product(torch.autograd.Function):
    """``x @ weight.T + bias`` with 8-bit operands, and gradients with 8-bit operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: Any) -> Tensor:
        record = module.training or _fp8.is_fp8_calibration()
        meta = module.fp8_meta
        x8, x_inverse = rounded(meta, True, _INPUT, x, record)
        w8, w_inverse = rounded(meta, True, _WEIGHT, weight, record)
        meta["scaling_fwd"].recorded |= record
        # Both in 8 bits: a quarter of the memory that float32 operands would take until the backward pass.
        ctx.save_for_backward(x8, x_inverse, w8, w_inverse)
        ctx.meta, ctx.record, ctx.group = meta, record, _fp8.get_fp8_group()
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        wide = ctx.wide = _wide(x.dtype)
        y = functional.linear(
            _float(x8, x_inverse, wide),
            _float(w8, w_inverse, wide),
            None if bias is None else bias.to(wide),
        )
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # Results of the gradient computations are constants: there is no second derivative of rounding.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return _Product.gradients(ctx, gradients[0])

    @staticmethod
    def gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x8, x_inverse, w8, w_inverse = ctx.saved_tensors
        wide = ctx.wide
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        meta = ctx.meta
        if ctx.record:
            _fp8.amax_and_scale_update(meta, False, ctx.group)
        g8, g_inverse = rounded(meta, False, _GRADIENT, grad, ctx.record)
        meta["scaling_bwd"].recorded |= ctx.record
        g = _float(g8, g_inverse, wide)
        of_x = of_w = of_b = None
        if ctx.needs_input_grad[0]:
            of_x = (g @ _float(w8, w_inverse, wide)).to(x_dtype)
        if ctx.needs_input_grad[1]:
            rows = _float(x8, x_inverse, wide).flatten(0, -2)
            of_w = (g.flatten(0, -2).t() @ rows).to(w_dtype)
        if ctx.needs_input_grad[2] and b_dtype is not None:
            of_b = grad.float().flatten(0, -2).sum(0).to(b_dtype)
        return of_x, of_w, of_b, None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of products: float16 does not hold all scaled 8-bit numbers, bfloat16 and float32 do."""
    return torch.float32 if dtype == torch.float16 else dtype


def _float(x8: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what 8-bit numbers stand for; exact, since scales are powers of two."""
    return x8.to(dtype) * inverse.to(dtype)


class FP8Linear(Fp8BaseModule):
    """A linear layer whose input and weight are 8-bit floating-point numbers inside `fp8_autocast`.

    Outside it is an ordinary linear layer. In training the gradient of the output is rounded to 8 bits too, and the
    products of the backward pass are made of the rounded operands; input and weight wait for it in 8 bits. In
    evaluation mode the weight is packed once, and packed again when it changes.

    Args:
        in_features: Input features.
        out_features: Output features.
        bias: Whether there is a bias. It is added in float.
        device: ``"cpu"``.
        params_dtype: dtype of weight and bias; None: torch's default.
        activation_dtype: dtype in which float32 input is computed and returned. Other input keeps its dtype, and
            ``torch.autocast`` decides where it is on.

    Attributes:
        weight: ``[out_features, in_features]``.
        bias: ``[out_features]`` or None.
    """

    _packed: Tensor | None = None
    _packed_of: tuple[Any, ...] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str = "cpu",
        params_dtype: torch.dtype | None = None,
        activation_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        op = "FP8Linear"
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            check(isinstance(value, int) and value > 0, op, name, "be a positive int", repr(value))
        check(torch.device(device).type in ("cpu", "meta"), op, "device", "be 'cpu'", repr(device))
        names = "float32, bfloat16, float16"
        for name, dtype in (
            ("params_dtype", params_dtype or torch.float32),
            ("activation_dtype", activation_dtype),
        ):
            check(dtype in FLOATS, op, name, f"be one of {names}", repr(dtype))
        self.in_features, self.out_features = in_features, out_features
        self.activation_dtype = activation_dtype
        shape = (out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=params_dtype))
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=params_dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill weight and bias with random numbers, as `torch.nn.Linear` does."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``.

        Args:
            input: ``[..., in_features]``, float32, bfloat16 or float16.

        Returns:
            ``[..., out_features]`` in the dtype of the activations.

        Raises:
            ValueError: The input is not as described.
        """
        fits = input.dtype in FLOATS
        check(fits, "FP8Linear", "input", "have dtype float32, bfloat16 or float16", input.dtype)
        check(
            tracing()  # sizes are tensors then
            or (input.dim() > 0 and input.shape[-1] == self.in_features),
            "FP8Linear",
            "input",
            f"have {self.in_features} features in the last dimension",
            list(input.shape),
        )
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        else:
            dtype = self.activation_dtype if input.dtype == torch.float32 else input.dtype
        x = input.to(dtype)
        with torch.autocast("cpu", enabled=False):
            active = _fp8.is_fp8_enabled() or _fp8.is_fp8_calibration()
            if not active:
                return self._plain(x)
            if self.training or _fp8.is_fp8_calibration() or self._trains(x):
                return self._step(x)
            _say()
            self.begin_step()
            with torch.no_grad():
                return self._infer(x)

    def _plain(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return functional.linear(x, self.weight.to(x.dtype), bias)

    @_outside_graphs
    def _step(self, x: Tensor) -> Tensor:
        """Compute with scales that change, or for gradients."""
        self.begin_step()
        if not _fp8.is_fp8_enabled():
            with torch.no_grad():
                self.calibrate({_INPUT: x, _WEIGHT: self.weight})
            return self._plain(x)
        _say()
        rows = x.unsqueeze(0) if x.dim() == 1 else x
        y: Tensor = _Product.apply(rows, self.weight, self.bias, self)  # type: ignore[no-untyped-call]
        return y.squeeze(0) if x.dim() == 1 else y

    def _trains(self, x: Tensor) -> bool:
        if not torch.is_grad_enabled() or tracing():
            return False
        return x.requires_grad or any(p.requires_grad for p in self.parameters())

    def _infer(self, x: Tensor) -> Tensor:
        """Compute with the scales as they are, and a packed weight."""
        wide = _wide(x.dtype)
        x8, x_inverse = rounded(self.fp8_meta, True, _INPUT, x, False)
        rows = _float(x8, x_inverse, wide)
        packed = self._pack()
        if packed is None:
            w8, w_inverse = rounded(self.fp8_meta, True, _WEIGHT, self.weight, False)
            bias = None if self.bias is None else self.bias.to(wide)
            y = functional.linear(rows, _float(w8, w_inverse, wide), bias)
        else:
            bias = None if self.bias is None else self.bias.to(wide)
            y = torch.ops.ipex.woq_linear(rows, packed, self.out_features, bias)
        return y.to(x.dtype)

    # ---------------------------------------------------------------------------------------------------- packed weight

    def _pack(self) -> Tensor | None:
        """Return the packed weight, repacked if it is old; in a compiled graph the existing one, or None."""
        if torch.compiler.is_compiling():
            return self._packed
        interpreter: Any = torch._C
        tracing = interpreter._get_tracing_state()
        interpreter._set_tracing_state(None)  # a traced model has it as a constant
        try:
            weight, meta = self.weight, self.fp8_meta["scaling_fwd"]
            version = None if weight.is_inference() else weight._version
            scale = float(meta.scale[_WEIGHT]) if meta.recorded else None
            form = self.fp8_meta["recipe"]
            state = (id(weight), weight.data_ptr(), version, scale, form.fp8_format, form.margin)
            if state != self._packed_of:
                w8, inverse = rounded(self.fp8_meta, True, _WEIGHT, weight, False)
                scales = inverse.expand(self.out_features, 1).contiguous()
                name = "fp8_e4m3" if w8.dtype == torch.float8_e4m3fn else "fp8_e5m2"
                self._packed = torch.ops.ipex.pack_woq_weight(
                    w8.contiguous(), scales, None, name, self.in_features, -1, None, "dot"
                )
                self._packed_of = state
            return self._packed
        finally:
            interpreter._set_tracing_state(tracing)

    def _forget(self) -> None:
        self._packed = self._packed_of = None

    def train(self, mode: bool = True) -> FP8Linear:
        """Set training or evaluation mode."""
        if mode:
            self._forget()
        super().train(mode)
        return self

    def set_extra_state(self, state: Tensor | None) -> None:
        self._forget()
        super().set_extra_state(state)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._forget()
        super()._load_from_state_dict(*args)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._forget()
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        kept = dict(self.__dict__)
        kept.pop("_packed", None)
        kept.pop("_packed_of", None)
        return kept

    def extra_repr(self) -> str:
        """Return the arguments."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}"

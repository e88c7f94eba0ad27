# SPDX-License-Identifier: Apache-2.0
"""Linear layer on a packed weight, and what it offers so that the operations after it run in the same op."""

from __future__ import annotations

import threading
from typing import Any, ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional

from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.base import (
    OptimizedModule,
    below_autograd,
    call,
    has_hooks,
    is_stand_in,
    needs_grad,
    record_call,
    stock_only,
    usable_parameters,
)
from ipex_core.module_swap.state_dict import attach, realize, state_of, swap_class
from ipex_core.nn.torchscript import function
from ipex_core.ops.linear import activate
from ipex_core.packing import onednn
from ipex_core.packing.dense import FORMATS
from ipex_core.packing.parameter import PackedWeight, captured, pack
from ipex_core.util.symbolic import tracing


class FusableLinear(Protocol):
    """A linear layer, dense or quantized, that can finish its result before it is stored.

    It is recognized by its attributes, not by its class: a module that has both ``packed_weight`` and ``fused`` is one.
    `OptimizedLinear` is one, and so is any layer with a packed quantized weight that wants to take part.

    Attributes:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
    """

    in_features: int
    out_features: int

    @property
    def packed_weight(self) -> Tensor | None:
        """The packed weight as its op (``linear``, ``woq_linear``) takes it; None while the weight is not packed."""
        ...

    def fused(
        self,
        x: Tensor,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        """Compute ``post(x @ weight.T + bias) * mul + residual + residual2``.

        It must accept operands of other dtypes and of shapes that are broadcast, and be differentiable where its
        parameters are; it decides itself what runs in one op.

        Args:
            x: ``[..., in_features]``.
            post: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
            residual: ``[..., out_features]``, or None.
            mul: Likewise.
            residual2: Likewise.

        Returns:
            ``[..., out_features]``.
        """
        ...


def is_fusable(module: nn.Module) -> TypeGuard[FusableLinear]:
    """Return whether a module is a `FusableLinear`."""
    kind = type(module)
    return hasattr(kind, "fused") and (
        hasattr(kind, "packed_weight") or hasattr(module, "packed_weight")
    )


def fits(operand: Tensor | None, x: Tensor, out_features: int) -> bool:
    """Return whether the ops can take what the result of a linear layer is multiplied by or added to."""
    if operand is None:
        return True
    shape = operand.shape
    return (
        operand.dtype is x.dtype
        and len(shape) == x.dim()
        and shape[-1] == out_features
        and shape[:-1] == x.shape[:-1]
    )


def finish(
    y: Tensor,
    post: str = "none",
    residual: Tensor | None = None,
    mul: Tensor | None = None,
    residual2: Tensor | None = None,
) -> Tensor:
    """Return ``post(y) * mul + residual + residual2``, with stock ops."""
    y = activate(y, post)
    if mul is not None:
        y = y * mul
    if residual is not None:
        y = y + residual
    return y if residual2 is None else y + residual2


_LINEAR = torch.ops.ipex.linear.default


class OptimizedLinear(OptimizedModule, nn.Linear):
    """`torch.nn.Linear` whose weight is packed for the CPU, or cast, or both.

    Without gradients a call is one op. With gradients the same op runs in an autograd function whose backward unpacks
    the weight. Inputs of another floating dtype are converted to the dtype of the weight; under autocast a float32
    layer uses a packed copy in the autocast dtype.
    """

    __jit_unused_properties__: ClassVar[list[str]] = ["packed_weight"]
    _lowered: tuple[torch.dtype, Tensor, Tensor | None] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``."""
        if is_scripting():
            return self._scripted(input)
        else:
            return self.fused(input)

    def _scripted(self, x: Tensor) -> Tensor:
        if hasattr(self, "_script_packed"):
            x = x.to(self._dtype)
            return torch.ops.ipex.linear(x, self._script_packed, self.out_features, self.bias)
        else:
            if hasattr(self, "_script_weight"):
                weight: Tensor = self._script_weight
            else:
                weight = self.weight
            bias: Tensor | None = self.bias
            if bias is not None:
                bias = bias.to(weight.dtype)
            return functional.linear(x.to(weight.dtype), weight, bias)

    @property
    def packed_weight(self) -> Tensor | None:
        """The packed weight as the op ``linear`` takes it; None where there is no such packing."""
        return self._packed if self._kernel else None

    def fused(
        self,
        x: Tensor,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        """Compute ``activation(x @ weight.T + bias) * mul + residual + residual2``.

        Args:
            x: ``[..., in_features]``.
            post: ``"none"``, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``.
            residual: ``[..., out_features]`` or anything that can be added to this, or None.
            mul: Likewise.
            residual2: Likewise.
        """
        packed, dtype = self._packed, self._dtype
        if packed is not None and self._kernel and tracing():
            return self._traced(x, packed, post, residual, mul, residual2)
        if packed is None or captured(self._kernel) or stock_only(x):
            return self._plain(x, post, residual, mul, residual2)
        if "weight" not in self._parameters or "bias" not in self._parameters:
            # a hook or a parametrization computes it
            return self._plain(x, post, residual, mul, residual2)
        bias: Tensor | None = self._parameters["bias"]
        if torch.compiler.is_compiling():
            bias = bias.detach() if bias is not None else None
            return self._run(x.to(dtype), packed, bias, post, residual, mul, residual2)
        if not isinstance(self._parameters["weight"], PackedWeight):  # the user's
            return self._plain(x, post, residual, mul, residual2)
        if dtype is torch.float32 and torch.is_autocast_enabled("cpu"):
            lowered = self._autocast(x, post, residual, mul, residual2)
            if lowered is not None:
                return lowered
            # In float32, where oneDNN does not have the dtype.
            wide = self._run(x.to(dtype), packed, bias, post, residual, mul, residual2)
            return wide.to(torch.get_autocast_dtype("cpu"))
        if x.dtype is not dtype:
            x = x.to(dtype)
        if torch.is_grad_enabled() and needs_grad(self, x):
            y: Tensor = _PackedLinear.apply(x, self._parameters["weight"], bias, self)
            return finish(y, post, residual, mul, residual2)
        return self._run(x, packed, bias, post, residual, mul, residual2)

    def _run(
        self,
        x: Tensor,
        packed: Tensor,
        bias: Tensor | None,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        y: Tensor
        n = self.out_features
        if not (fits(residual, x, n) and fits(mul, x, n) and fits(residual2, x, n)):
            return finish(self._run(x, packed, bias, post), "none", residual, mul, residual2)
        compiling = torch.compiler.is_compiling()
        if not compiling and x.shape[-1:] != (self.in_features,):
            return self._plain(
                x, post, residual, mul, residual2
            )  # stock PyTorch says what is wrong
        if self._kernel:
            arguments = (x, packed, self.out_features, bias, residual, post, mul, residual2)
            y = torch.ops.ipex.linear(*arguments) if compiling else call(_LINEAR, *arguments)
            return y
        if not compiling and (x.dim() < 2 or x.numel() == 0):
            return self._plain(x, post, residual, mul, residual2)
        if mul is not None or residual2 is not None or (residual is not None and post != "none"):
            return finish(self._run(x, packed, bias, post), "none", residual, mul, residual2)
        if compiling:
            y = torch.ops.ipex_core.packed_linear(
                x, packed, bias, self.out_features, post, residual
            )
            return y
        return onednn.linear(x, packed, bias, post, residual)

    def _traced(
        self,
        x: Tensor,
        packed: Tensor,
        post: str,
        residual: Tensor | None,
        mul: Tensor | None,
        residual2: Tensor | None,
    ) -> Tensor:
        """Record the op on the packed weight, which becomes a constant of the program."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        lowered = self._dtype is torch.float32 and torch.is_autocast_enabled("cpu")
        if not isinstance(weight, PackedWeight) or "bias" not in self._parameters or lowered:
            return self._plain(x, post, residual, mul, residual2)
        assert self._dtype is not None
        if x.dtype is not self._dtype or self._dtype is not torch.float32:  # as in `_cast`
            x = x.to(self._dtype)
        # A program has no derivative of our ops, whatever the mode it is recorded in.
        with below_autograd():
            y: Tensor = function("linear")(
                x, packed, self.out_features, bias, post, mul, residual, residual2
            )
        return y

    def _plain(
        self,
        x: Tensor,
        post: str,
        residual: Tensor | None,
        mul: Tensor | None,
        residual2: Tensor | None,
    ) -> Tensor:
        if is_stand_in(x):
            return finish(record_call(self, x), post, residual, mul, residual2)
        y = self._product(x)
        if y is None:
            weight, bias = usable_parameters(self)
            y = functional.linear(self._cast(x, weight), weight, bias)
        return finish(y, post, residual, mul, residual2)

    def _product(self, x: Tensor) -> Tensor | None:
        """Compute the layer on a weight that another package packed as a part of its own, if that can be done."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias")
        if (
            not isinstance(weight, PackedWeight)
            or "bias" not in self._parameters
            or torch.compiler.is_compiling()
            or captured()
            or stock_only(x)
            or torch.is_autocast_enabled("cpu")
            or (torch.is_grad_enabled() and needs_grad(self, x))
            or x.shape[-1:] != (self.in_features,)
        ):
            return None
        return weight.product(self._cast(x, weight), bias)

    def _autocast(
        self,
        x: Tensor,
        post: str,
        residual: Tensor | None,
        mul: Tensor | None,
        residual2: Tensor | None,
    ) -> Tensor | None:
        dtype = torch.get_autocast_dtype("cpu")
        if torch.is_grad_enabled() and needs_grad(self, x):
            return self._plain(x, post, residual, mul, residual2)
        if dtype is torch.float32 or not onednn.supports(dtype):
            return None
        lowered = self._lowered
        if lowered is None or lowered[0] is not dtype:
            weight, bias = self._parameters["weight"], self._parameters["bias"]
            assert isinstance(weight, PackedWeight)
            packed = pack(weight.plain().to(dtype), "ipex" if self._kernel else "mkldnn")
            lowered = (dtype, packed, bias.detach().to(dtype) if bias is not None else None)
            self.__dict__["_lowered"] = lowered
        return self._run(x.to(dtype), lowered[1], lowered[2], post, residual, mul, residual2)

    def extra_repr(self) -> str:
        """Add the packing to the line of `torch.nn.Linear`."""
        state = state_of(self)
        form = state.packing if state is not None and self._packed is not None else "plain"
        return f"{super().extra_repr()}, dtype={self._dtype or self.weight.dtype}, format={form}"


class _PackedLinear(torch.autograd.Function):
    """A packed linear layer under autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, module: OptimizedLinear
    ) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        assert module._packed is not None
        return module._run(x, module._packed, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (grad,) = gradients
        (x,) = ctx.saved_tensors
        need_x, need_weight, need_bias, _ = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        weight = ctx.module._parameters["weight"]
        grad_x = grad @ weight.plain() if need_x else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if need_weight else None
        return grad_x, grad_weight, rows.sum(0) if need_bias else None, None


# --- one layer, outside of ipex.optimize ----------------------------------------------------------------------------

_lock = threading.Lock()


def lower_linear(module: nn.Module) -> bool:
    """Pack the weight of a linear layer for this CPU, in place, and return whether it is packed now.

    The layer stays the same object, an ``nn.Linear``, with the same state dict; its class becomes `OptimizedLinear`, as
    `ipex.optimize` does it. Layers that compute something of their own (subclasses, parametrizations, hooks), layers on
    other devices and those in training mode stay as they are.

    Args:
        module: Any module.
    """
    if not _may_lower(module):
        return isinstance(module, OptimizedLinear) and module._packed is not None
    with _lock:
        if _may_lower(module):
            assert isinstance(module, nn.Linear)
            own = has_kernel("linear")
            swap_class(module, OptimizedLinear)
            state = attach(module)
            state.packing = "ipex" if own else "mkldnn"
            state.kernel_op = "linear" if own else None
            realize(module)
    return isinstance(module, OptimizedLinear) and module._packed is not None


def _may_lower(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.training or has_hooks(module):
        return False
    if state_of(module) is not None or "weight" not in module._parameters:
        return False
    weight = module._parameters["weight"]
    if type(weight) is not nn.Parameter or weight.device.type != "cpu" or weight.numel() == 0:
        return False
    bias = module._parameters.get("bias", module)
    if bias is not None and type(bias) is not nn.Parameter:
        return False
    dtype: torch.dtype = weight.dtype
    if bias is not None and bias.dtype not in (dtype, torch.float32):
        return False
    return dtype in FORMATS and (has_kernel("linear") or onednn.supports(dtype))


class IPEXLinearEltwise(nn.Module):
    """``relu`` or ``sigmoid`` of a linear layer; ``relu`` is computed in the op of a layer from `ipex.optimize`.

    Args:
        ipex_linear_module: The layer; one that `ipex.optimize` has not prepared works too.
        eltwise: ``"relu"`` or ``"sigmoid"``.

    Raises:
        TypeError: ``ipex_linear_module`` is not a linear layer.
        ValueError: ``eltwise`` is something else.
    """

    def __init__(self, ipex_linear_module: nn.Linear, eltwise: str = "relu") -> None:
        super().__init__()
        if not isinstance(ipex_linear_module, nn.Linear):
            raise TypeError(
                "IPEXLinearEltwise: ipex_linear_module must be a linear layer,"
                f" got {type(ipex_linear_module).__name__}"
            )
        if eltwise not in ("relu", "sigmoid"):
            raise ValueError(
                f"IPEXLinearEltwise: eltwise must be 'relu' or 'sigmoid', got {eltwise!r}"
            )
        self.m = ipex_linear_module
        self.eltwise = eltwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``eltwise(linear(x))`` for ``x [..., in_features]``; differentiable."""
        if self.eltwise == "sigmoid":
            return torch.sigmoid(self.m(x))
        if isinstance(self.m, OptimizedLinear):
            return self.m.fused(x, "relu")
        return torch.relu(self.m(x))

    def extra_repr(self) -> str:
        """Return the name of the activation."""
        return f"eltwise={self.eltwise!r}"

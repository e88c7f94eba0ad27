# SPDX-License-Identifier: Apache-2.0
"""Linear layers with what follows them, in one op.

Any module can be wrapped. A `torch.nn.Linear`, one that `ipex.optimize` has packed and a quantized layer (any
`ipex_core.nn.FusableLinear`) run fused; others run as they are, with the rest behind them. The weight of a plain
`torch.nn.Linear` is packed at the first call that needs no gradient, in evaluation mode; the layer stays the same
object with the same state dict. In training mode, and where a gradient is required, the operations run one by one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ipex_core.nn import OptimizedLinear
from ipex_core.nn.functional import linear as run
from ipex_core.nn.linear import finish, lower_linear
from ipex_core.nn.merged_linear import GatedPair
from ipex_llm.modules.utils import IPEXRuntimeCustomOps


def _checked(owner: nn.Module, name: str, module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        kind = type(module).__name__
        raise TypeError(f"{type(owner).__name__}: {name} must be a torch.nn.Module, got {kind}")
    return module


def _lower(x: Tensor, *modules: nn.Module) -> None:
    """Pack what is still a stock layer, unless this call is one of training or is being compiled."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return
    for module in modules:
        if type(module) is nn.Linear and not (
            torch.is_grad_enabled() and (x.requires_grad or module.weight.requires_grad)
        ):
            lower_linear(module)


class IPEXLinearFusion(nn.Module):
    """Base of the modules that wrap one linear layer.

    Args:
        linear: The layer, kept as the attribute ``linear``.

    Raises:
        TypeError: ``linear`` is not a module.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = _checked(self, "linear", linear)

    def init_on_device(self, x: Tensor, op_type: object = None) -> None:
        """Pack the weight now instead of at the first call, for instance before `torch.compile`."""
        with torch.no_grad():
            _lower(x, self.linear)

    def _run(
        self,
        x: Tensor,
        post: str = "none",
        residual: Tensor | None = None,
        mul: Tensor | None = None,
        residual2: Tensor | None = None,
    ) -> Tensor:
        linear = self.linear
        if self.training:
            return finish(linear(x), post, residual, mul, residual2)
        if type(linear) is nn.Linear:
            _lower(x, linear)
        return run(linear, x, post, residual, mul, residual2)


class IPEXLinear2Fusion(nn.Module):
    """Base of the modules that wrap two linear layers with the same input.

    Args:
        linear_1: The first layer, kept as the attribute of this name.
        linear_2: The second.

    Raises:
        TypeError: One of them is not a module.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    _pair: GatedPair

    def __init__(self, linear_1: nn.Module, linear_2: nn.Module) -> None:
        super().__init__()
        self.linear_1 = _checked(self, "linear_1", linear_1)
        self.linear_2 = _checked(self, "linear_2", linear_2)
        self.__dict__["_pair"] = (
            GatedPair()
        )  # past the look-up of torch.nn.Module: it is no submodule

    def init_on_device(self, x: Tensor, op_type: object = None) -> None:
        """Pack the weights now instead of at the first call, for instance before `torch.compile`."""
        with torch.no_grad():
            _lower(x, self.linear_1, self.linear_2)
            if _packed(self.linear_1, self.linear_2):
                self._pair.merge(self.linear_1, self.linear_2)

    def _gated(self, x: Tensor, activation: str) -> Tensor:
        one, two = self.linear_1, self.linear_2
        if self.training:
            return finish(one(x), activation, None, two(x))
        _lower(x, one, two)
        if _packed(one, two) and self._pair.ready(x, one, two, activation):
            return self._pair.forward(x, activation)
        return run(two, x, "none", None, run(one, x, activation))


def _packed(one: nn.Module, two: nn.Module) -> bool:
    return type(one) is OptimizedLinear and type(two) is OptimizedLinear


class LinearSilu(IPEXLinearFusion):
    """``silu(linear(x))``.

    Example:
        >>> layer = torch.nn.Linear(8, 8)
        >>> fused = LinearSilu(layer).eval()
        >>> x = torch.randn(2, 8)
        >>> with torch.no_grad():
        ...     torch.allclose(fused(x), torch.nn.functional.silu(layer(x)), atol=1e-6)
        True
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self._run(x, "silu")


class LinearRelu(IPEXLinearFusion):
    """``relu(linear(x))``."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self._run(x, "relu")


class LinearGelu(IPEXLinearFusion):
    """``gelu(linear(x))`` with the error function."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self._run(x, "gelu")


class LinearNewGelu(IPEXLinearFusion):
    """``gelu(linear(x))`` with the tanh approximation."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self._run(x, "gelu_tanh")


class LinearSiluMul(IPEXLinearFusion):
    """``silu(linear(x)) * y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map ``x`` ``[..., in_features]`` and ``y`` ``[..., out_features]`` to ``[..., out_features]``."""
        return self._run(x, "silu", None, y)


class LinearMul(IPEXLinearFusion):
    """``linear(x) * y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map ``x`` ``[..., in_features]`` and ``y`` ``[..., out_features]`` to ``[..., out_features]``."""
        return self._run(x, "none", None, y)


class LinearAdd(IPEXLinearFusion):
    """``linear(x) + y``."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Map ``x`` ``[..., in_features]`` and ``y`` ``[..., out_features]`` to ``[..., out_features]``."""
        return self._run(x, "none", y)


class LinearAddAdd(IPEXLinearFusion):
    """``linear(x) + y + z``."""

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        """Map ``x`` ``[..., in_features]``, ``y`` and ``z`` ``[..., out_features]`` to ``[..., out_features]``."""
        return self._run(x, "none", y, None, z)


class Linear2SiluMul(IPEXLinear2Fusion):
    """``silu(linear_s(x)) * linear_m(x)``, the first half of a gated MLP.

    Two dense layers are stored as one interleaved weight, in place of their own, and run in one op.

    Args:
        linear_s: The layer in front of the activation, kept as ``linear_1``.
        linear_m: The other one, kept as ``linear_2``.

    Raises:
        TypeError: One of them is not a module.
    """

    def __init__(self, linear_s: nn.Module, linear_m: nn.Module) -> None:
        for name, module in (("linear_s", linear_s), ("linear_m", linear_m)):
            _checked(self, name, module)
        super().__init__(linear_s, linear_m)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[..., in_features]`` to ``[..., out_features]``."""
        return self._gated(x, "silu")

# SPDX-License-Identifier: Apache-2.0
"""Second names of linear layers with what follows them, on plain or packed weights, and of casts from 8-bit floats."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from ipex.compat.torch_ops._alias_op import alias_op
from ipex_core.errors import OpArgumentError

Tensor = torch.Tensor
_OPS = torch.ops.ipex

#: Ops on one input and a bias -> activations of ``torch.ops.ipex.linear``.
_ACTIVATIONS = {
    "bias": "none",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}


def _linear(
    op: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int | None,
    activation: str = "none",
    mul: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Return ``activation(x @ weight.T + bias) * mul + residual``; an empty bias stands for none."""
    if bias is not None and not bias.numel():
        bias = None
    if weight.dim() == 1 and weight.dtype == torch.uint8 and out_features is not None:
        return _OPS.linear(x, weight, out_features, bias, residual, activation, mul)  # type: ignore[no-any-return]
    if weight.dim() != 2:
        raise OpArgumentError(
            f"{op}: t_wt must be a plain weight [N, K], or a result of torch.ops.ipex.pack_linear_weight together with"
            f" out_features, got {weight.dim()}-D; blocked weights of IPEX have no form here"
        )
    y = F.linear(x, weight, bias)
    if activation == "gelu":
        y = F.gelu(y)
    elif activation == "gelu_tanh":
        y = F.gelu(y, approximate="tanh")
    elif activation == "relu":
        y = F.relu(y)
    elif activation == "silu":
        y = F.silu(y)
    if mul is not None:
        y = y * mul
    return y if residual is None else y + residual


@alias_op("tpp_linear(Tensor t_in, Tensor t_wt, int? out_features=None) -> Tensor")
def _tpp_linear(t_in: Tensor, t_wt: Tensor, out_features: int | None = None) -> Tensor:
    return _linear("tpp_linear", t_in, t_wt, None, out_features)


def _register(suffix: str, activation: str) -> None:
    op = f"tpp_linear_{suffix}"

    @alias_op(f"{op}(Tensor t_in, Tensor t_wt, Tensor t_bias, int? out_features=None) -> Tensor")
    def alias(
        t_in: Tensor, t_wt: Tensor, t_bias: Tensor, out_features: int | None = None
    ) -> Tensor:
        return _linear(op, t_in, t_wt, t_bias, out_features, activation)


for _suffix, _activation in _ACTIVATIONS.items():
    _register(_suffix, _activation)


@alias_op(
    "tpp_linear_mul(Tensor t_in, Tensor t_in1, Tensor t_wt, Tensor t_bias, int? out_features=None) -> Tensor"
)
def _tpp_linear_mul(
    t_in: Tensor, t_in1: Tensor, t_wt: Tensor, t_bias: Tensor, out_features: int | None = None
) -> Tensor:
    return _linear("tpp_linear_mul", t_in, t_wt, t_bias, out_features, mul=t_in1)


@alias_op(
    "tpp_linear_add(Tensor t_in, Tensor t_in1, Tensor t_wt, Tensor t_bias, float scale,"
    " int? out_features=None) -> Tensor"
)
def _tpp_linear_add(
    t_in: Tensor,
    t_in1: Tensor,
    t_wt: Tensor,
    t_bias: Tensor,
    scale: float,
    out_features: int | None = None,
) -> Tensor:
    """Return ``t_in1 + scale * linear``."""
    if scale == 1.0:
        return _linear("tpp_linear_add", t_in, t_wt, t_bias, out_features, residual=t_in1)
    return torch.add(
        t_in1, _linear("tpp_linear_add", t_in, t_wt, t_bias, out_features), alpha=scale
    )


@alias_op(
    "tpp_linear_add_add(Tensor t_in, Tensor t_in1, Tensor t_in2, Tensor t_wt, Tensor t_bias, float scale,"
    " int? out_features=None) -> Tensor"
)
def _tpp_linear_add_add(
    t_in: Tensor,
    t_in1: Tensor,
    t_in2: Tensor,
    t_wt: Tensor,
    t_bias: Tensor,
    scale: float,
    out_features: int | None = None,
) -> Tensor:
    """Return ``t_in1 + t_in2 + scale * linear``."""
    y = _linear("tpp_linear_add_add", t_in, t_wt, t_bias, out_features)
    return torch.add(t_in1 + t_in2, y, alpha=scale)


@alias_op(
    "tpp_fused_gate_up_proj(Tensor t_in, Tensor t_wt_gate, Tensor t_bias_gate, Tensor t_wt_up,"
    " Tensor t_bias_up, int? out_features=None) -> Tensor"
)
def _tpp_fused_gate_up_proj(
    t_in: Tensor,
    t_wt_gate: Tensor,
    t_bias_gate: Tensor,
    t_wt_up: Tensor,
    t_bias_up: Tensor,
    out_features: int | None = None,
) -> Tensor:
    """Return ``silu(gate) * up``."""
    op = "tpp_fused_gate_up_proj"
    up = _linear(op, t_in, t_wt_up, t_bias_up, out_features)
    return _linear(op, t_in, t_wt_gate, t_bias_gate, out_features, "silu", up)


def _register_cast(source: torch.dtype, target: torch.dtype, name: str, options: str) -> None:
    @alias_op(f"{name}(Tensor src, Tensor(a!) dst, int len{options}) -> Tensor(a!)")
    def alias(src: Tensor, dst: Tensor, len: int, *exactness: bool) -> Tensor:
        """Write the first ``len`` numbers of ``src`` to ``dst``; every number is exact, denormal ones too."""
        for argument, value, dtype in (("src", src, source), ("dst", dst, target)):
            if value.dtype != dtype:
                raise OpArgumentError(f"{name}: {argument} must have {dtype}, got {value.dtype}")
            if not value.is_contiguous() or value.numel() < len:
                raise OpArgumentError(
                    f"{name}: {argument} must be contiguous and have at least len = {len} numbers, got shape"
                    f" {list(value.shape)} with strides {list(value.stride())}"
                )
        dst.view(-1)[:len] = src.reshape(-1)[:len].to(target)
        return dst


for _name, _target in (
    ("bf16", torch.bfloat16),
    ("fp16", torch.float16),
    ("fp32", torch.float32),
):
    _register_cast(
        *(torch.float8_e4m3fn, _target, f"convert_e4m3_to_{_name}"),
        ", bool with_denorm, bool with_lut",
    )
_register_cast(torch.float8_e5m2, torch.float16, "convert_e5m2_to_fp16", "")

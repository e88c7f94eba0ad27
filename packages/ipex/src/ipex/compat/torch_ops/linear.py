# SPDX-License-Identifier: Apache-2.0
"""Second names of linear layers with what follows them, batched products, norms, softmax and low-rank adapters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ipex.compat.torch_ops import alias_op
from ipex_core.errors import OpArgumentError
from ipex_core.ops.rms_norm import of_rows, times

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


@alias_op("tpp_linear")
def _tpp_linear(t_in: Tensor, t_wt: Tensor, out_features: int | None = None) -> Tensor:
    return _linear("tpp_linear", t_in, t_wt, None, out_features)


def _register_linear(suffix: str, activation: str) -> None:
    op = f"tpp_linear_{suffix}"

    @alias_op(f"{op}(Tensor t_in, Tensor t_wt, Tensor t_bias, int? out_features=None) -> Tensor")
    def alias(
        t_in: Tensor, t_wt: Tensor, t_bias: Tensor, out_features: int | None = None
    ) -> Tensor:
        return _linear(op, t_in, t_wt, t_bias, out_features, activation)


for _suffix, _activation in _ACTIVATIONS.items():
    _register_linear(_suffix, _activation)


@alias_op("tpp_linear_mul")
def _tpp_linear_mul(
    t_in: Tensor, t_in1: Tensor, t_wt: Tensor, t_bias: Tensor, out_features: int | None = None
) -> Tensor:
    return _linear("tpp_linear_mul", t_in, t_wt, t_bias, out_features, mul=t_in1)


@alias_op("tpp_linear_add")
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


@alias_op("tpp_linear_add_add")
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


@alias_op("tpp_fused_gate_up_proj")
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


# -- Batched products -------------------------------------------------------------------------------------------------


@alias_op("bmm_add(Tensor input, Tensor batch1, Tensor batch2, Scalar alpha) -> Tensor")
def _bmm_add(input: Tensor, batch1: Tensor, batch2: Tensor, alpha: float) -> Tensor:
    """Return ``input + alpha * batch1 @ batch2``; IPEX took an alpha but computed with 1."""
    return _OPS.bmm(batch1, batch2, input, float(alpha))  # type: ignore[no-any-return]


@alias_op(
    "bmm(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> Tensor(a!)"
)
def _bmm(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> Tensor:
    """Write ``mat1 @ mat2^T`` to ``out``: ``[B, M, K]`` times ``[B, N, K]``.

    ``mat2`` is plain, or from ``convert_weight_packed``, which packs nothing here.
    """
    if scale is not None:
        raise OpArgumentError("bmm: scale must be None, got a tensor: scale mat2 before")
    return out.copy_(_OPS.bmm(mat1, mat2.transpose(1, 2)))


# -- Normalizations and the softmax -----------------------------------------------------------------------------------


@alias_op("rmsnorm")
def _rmsnorm(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    if not of_rows(input, weight):
        return times("rmsnorm", input, weight, eps)
    return _OPS.rms_norm(input, weight, eps)  # type: ignore[no-any-return]


@alias_op("add_rmsnorm", mutates=("input1",))
def _add_rmsnorm(
    input: Tensor, input1: Tensor, weight: Tensor, eps: float, add_back: bool
) -> Tensor:
    if of_rows(input, weight):
        output, total = _OPS.add_rms_norm(input, input1, weight, eps)
    else:
        total = input + input1
        output = times("add_rmsnorm", total, weight, eps)
    if add_back:
        input1.copy_(total)
    return output  # type: ignore[no-any-return]


@alias_op("add_layernorm")
def _add_layernorm(
    a: Tensor,
    b: Tensor,
    alpha: int,
    normalized_shape: list[int],
    weight_opt: Tensor | None,
    bias_opt: Tensor | None,
    eps: float,
) -> Tensor:
    if list(normalized_shape) != list(a.shape[-1:]):
        total = torch.add(a, b, alpha=alpha)
        return torch.nn.functional.layer_norm(total, normalized_shape, weight_opt, bias_opt, eps)
    scaled = b if alpha == 1 else b * alpha
    return _OPS.add_layer_norm(a, scaled, weight_opt, bias_opt, eps)[0]  # type: ignore[no-any-return]


@alias_op("add_softmax_(Tensor(a!) self, Tensor other) -> Tensor(a!)")
def _add_softmax_(self: Tensor, other: Tensor) -> Tensor:
    return self.copy_(_OPS.softmax(self, other))


# -- Low-rank adapters for many users (punica) ------------------------------------------------------------------------


_ROWS = "Tensor(a!) out, Tensor input, Tensor weights, Tensor indicies"
#: Name -> further arguments; for ``sgmv_*`` they start with the lengths of the sequences.
_FURTHER = {
    "shrink": "float scale",
    "expand": "bool add_inputs",
    "expand_slice": "int offset, int size, bool add_inputs",
}


def _register_lora(kind: str, name: str) -> None:
    op = getattr(torch.ops.ipex, f"{kind}_{name}")
    lengths = "Tensor seq_lens, " if kind == "sgmv" else ""

    @alias_op(f"punica_{kind}_{name}({_ROWS}, {lengths}{_FURTHER[name]}) -> Tensor(a!)")
    def alias(out: Tensor, *args: object) -> Tensor:
        op(out, *args)
        return out


for _kind in ("bgmv", "sgmv"):
    for _name in _FURTHER:
        _register_lora(_kind, _name)

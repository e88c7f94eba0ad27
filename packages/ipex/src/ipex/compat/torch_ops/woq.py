# SPDX-License-Identifier: Apache-2.0
"""Second names of weight-only quantized linear layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ipex.compat.torch_ops import alias_op, python_op
from ipex_core.errors import OpArgumentError

_OPS = torch.ops.ipex

#: Names of weight dtypes -> formats of ``torch.ops.ipex.pack_woq_weight``.
_FORMATS = {
    "int8": "int8",
    "qint8": "int8",
    "int4": "int4",
    "uint4": "int4",
    "quint4x2": "int4",
    "nf4": "nf4",
    "fp4": "fp4",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
}
#: Values of ``WoqLowpMode`` and ``WoqActQuantMode`` -> names.
_LOWP_MODES = ("none", "fp16", "bf16", "int8")
_ACT_QUANT_MODES = (
    "per_tensor",
    "per_ic_block",
    "per_batch",
    "per_batch_ic_block",
    "per_tensor_sym",
    "per_ic_block_sym",
    "per_batch_sym",
    "per_batch_ic_block_sym",
)
_INT8 = _LOWP_MODES.index("int8")
#: Values of ``WoqWeightDtype`` -> names of weight dtypes.
_DTYPES = {1: "int8", 2: "int4", 3: "nf4", 4: "fp8"}


def _format(op: str, weight_dtype: str) -> str:
    if weight_dtype not in _FORMATS:
        raise OpArgumentError(
            f"{op}: weight_dtype must be one of {', '.join(_FORMATS)}, got {weight_dtype}"
        )
    return _FORMATS[weight_dtype]


def _order(lowp_mode: int) -> str:
    return "vnni" if lowp_mode == _INT8 else "dot"


def _mode(op: str, name: str, names: Sequence[str], value: int) -> str:
    if not 0 <= value < len(names):
        raise OpArgumentError(f"{op}: {name} must be in 0..{len(names) - 1}, got {value}")
    return names[value]


def lowp_name(op: str, lowp_mode: int) -> str:
    """Return the name of a value of ``WoqLowpMode``."""
    return _mode(op, "lowp_mode", _LOWP_MODES, lowp_mode)


def _columns(values: Tensor) -> Tensor:
    """Return ``[N, G]`` scales or zero points; ``[N]`` means one group."""
    return values.unsqueeze(1) if values.dim() == 1 else values


def _zeros(zeros: Tensor | None) -> Tensor | None:
    """Return zero points in a dtype that `pack_woq_weight` takes; zero points of `quantize_per_block` are int32."""
    if zeros is None or zeros.dtype in (torch.int8, torch.float32):
        return None if zeros is None else _columns(zeros)
    small = zeros.to(torch.int8)
    return _columns(small if torch.equal(small.to(zeros.dtype), zeros) else zeros.float())


def _first(values: Tensor | list[Tensor] | None) -> Tensor | None:
    """Return the first of a list: IPEX kept scales and zero points in several dtypes, float32 first."""
    if isinstance(values, (list, tuple)):
        return values[0] if values else None
    return values


_PACK = (
    "woq_linear_pack_weight{0}(Tensor W, str W_dtype, int[] W_shape, Tensor{1} scales,"
    " Tensor{1}? zero_points, Tensor? B, Tensor? g_idx, int group_size, int lowp_mode)"
    " -> (Tensor, Tensor[], Tensor[]?, Tensor[]?, Tensor?)"
)


@alias_op(_PACK.format("", ""), "ipex_prepack")
@alias_op(_PACK.format(".lists", "[]"), "ipex_prepack")
def _pack_weight(
    W: Tensor,
    W_dtype: str,
    W_shape: list[int],
    scales: Tensor | list[Tensor],
    zero_points: Tensor | list[Tensor] | None,
    B: Tensor | None,
    g_idx: Tensor | None,
    group_size: int,
    lowp_mode: int,
) -> tuple[Tensor, list[Tensor], list[Tensor] | None, list[Tensor] | None, Tensor | None]:
    """Return the packed weight, and the other parameters as they came.

    The packed weight holds scales and zero points too; there is no separate compensation. ``scales`` and
    ``zero_points`` are ``[N, G]``, or ``[N]`` for one group, or lists as this op returns them.
    """
    op = "woq_linear_pack_weight"
    steps, points = _first(scales), _first(zero_points)
    if steps is None:
        raise OpArgumentError(f"{op}: scales must have a tensor, got an empty list")
    form = _format(op, W_dtype)
    _mode(op, "lowp_mode", _LOWP_MODES, lowp_mode)
    if len(W_shape) != 2:
        raise OpArgumentError(f"{op}: W_shape must be [out_features, in_features], got {W_shape}")
    packed = _OPS.pack_woq_weight(
        W,
        _columns(steps),
        _zeros(points),
        form,
        W_shape[1],
        group_size,
        g_idx,
        _order(lowp_mode),
    )
    zeros = None if points is None else [points]
    return packed, [steps], zeros, None if B is None else [B], None


class PackedLinear:
    """A packed weight with what a product needs besides: what ``weight_only_qlinear_prepack`` returns.

    Args:
        weight: Result of `pack_woq_weight`, which holds scales and zero points.
        bias: float32, or None.
        lowp_mode: Name, as `woq_linear` takes it.
        act_quant_mode: Name; read for lowp_mode int8 only.
        scales: As they came, for `get_scales`.
        zero_points: As they came, for `get_zero_points`.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        lowp_mode: str,
        act_quant_mode: str = "per_batch_ic_block_sym",
        scales: Tensor | None = None,
        zero_points: Tensor | None = None,
    ) -> None:
        from ipex_core.packing.woq import read_layout

        layout = read_layout(weight)
        if layout is None:
            raise OpArgumentError(
                "weight: must be packed by weight_only_qlinear_prepack or woq_linear_pack_weight, got"
                f" {weight.dtype} {list(weight.shape)} without its header"
            )
        self._shape = [layout.n, layout.k]
        self._weight, self._bias = weight, bias
        self._scales, self._zero_points = scales, zero_points
        self._number = next(_NUMBERS)
        self._modes = lowp_mode, act_quant_mode if lowp_mode == "int8" else "none"

    def get_data_handle(self) -> Tensor:
        """Return a number that stands for this object, its bias and its modes, in ``woq_linear_*``, while it lives."""
        _LIVING[self._number] = self
        return torch.tensor([self._number])

    def get_weight(self) -> Tensor:
        """Return the packed weight."""
        return self._weight

    def get_weight_shape(self) -> list[int]:
        """Return ``[out_features, in_features]``."""
        return self._shape

    def get_bias(self) -> Tensor | None:
        """Return the bias."""
        return self._bias

    def get_scales(self) -> Tensor | None:
        """Return the scales, as they were given."""
        return self._scales

    def get_zero_points(self) -> Tensor | None:
        """Return the zero points, as they were given."""
        return self._zero_points

    def __call__(self, x: Tensor, activation: str = "none", **operands: Tensor) -> Tensor:
        """Return the product, ``[..., out_features]`` like ``x``, with the bias and what `woq_linear` fuses."""
        lowp, act = self._modes
        return _OPS.woq_linear(  # type: ignore[no-any-return]
            x,
            self._weight,
            self._shape[0],
            self._bias,
            activation=activation,
            lowp_mode=lowp,
            act_quant_mode=act,
            **operands,
        )


_NUMBERS = itertools.count(1)
_LIVING: WeakValueDictionary[int, PackedLinear] = WeakValueDictionary()


@python_op("ipex_prepack")
def weight_only_qlinear_prepack(
    W: Tensor,
    W_dtype: int,
    W_shape: list[int],
    scales: Tensor,
    zero_points: Tensor | None,
    B: Tensor | None,
    g_idx: Tensor | None,
    batch_size: int | None,
    group_size: int,
    lowp_mode: int,
    act_quant_mode: int,
    cache_weight_for_large_batch: bool = False,
) -> PackedLinear:
    """Pack a weight and keep it with its bias and modes.

    Arguments are as for ``woq_linear_pack_weight``, the dtype a value of ``WoqWeightDtype``. ``batch_size`` and
    ``cache_weight_for_large_batch`` are not read: one form serves all sizes.
    """
    op = "weight_only_qlinear_prepack"
    if W_dtype not in _DTYPES:
        raise OpArgumentError(
            f"{op}: W_dtype must be a WoqWeightDtype, one of {list(_DTYPES)}, got {W_dtype}"
        )
    lowp = lowp_name(op, lowp_mode)
    act = _mode(op, "act_quant_mode", _ACT_QUANT_MODES, max(act_quant_mode, 0))
    packed, *_ = _pack_weight(
        W, _DTYPES[W_dtype], W_shape, scales, zero_points, None, g_idx, group_size, lowp_mode
    )
    return PackedLinear(packed, None if B is None else B.float(), lowp, act, scales, zero_points)


@alias_op("woq_linear_unpack_weight", "ipex_prepack")
def _unpack_weight(W: Tensor, W_dtype: str, W_shape: list[int], lowp_mode: int) -> Tensor:
    from ipex_core.packing import woq
    from ipex_core.packing.woq import read_layout

    op = "woq_linear_unpack_weight"
    form = _format(op, W_dtype)
    layout = read_layout(W)
    if layout is None or (layout.format, layout.n, layout.k) != (form, *W_shape):
        raise OpArgumentError(
            f"{op}: W must be a {form} weight of shape {list(W_shape)} packed by"
            " woq_linear_pack_weight, got a tensor with another header"
        )
    return woq.unpack(W, layout)[0]


@alias_op("woq_linear")
def _woq_linear(
    input: Tensor,
    qweight: Tensor,
    weight_dtype: str,
    weight_shape: list[int],
    weight_scales: list[Tensor],
    weight_zeros: list[Tensor] | None,
    bias: list[Tensor] | None,
    g_idx: Tensor | None,
    group_size: int,
    lowp_mode: int,
    act_quant_mode: int,
    compensation: Tensor | None = None,
) -> Tensor:
    op = "woq_linear"
    form = _format(op, weight_dtype)
    lowp = _mode(op, "lowp_mode", _LOWP_MODES, lowp_mode)
    mode = "none"
    if lowp_mode == _INT8:
        mode = _mode(op, "act_quant_mode", _ACT_QUANT_MODES, max(act_quant_mode, 0))
    if qweight.dim() == 2:  # never packed: as on machines whose kernels IPEX did not have
        qweight = _OPS.pack_woq_weight(
            qweight,
            _columns(weight_scales[0]),
            _zeros(_first(weight_zeros)),
            form,
            weight_shape[1],
            group_size,
            g_idx,
            _order(lowp_mode),
        )
    first = None
    if bias:
        # IPEX kept a bias in several dtypes.
        first = next((b for b in bias if b.dtype == torch.float32), bias[0].float())
    return _OPS.woq_linear(  # type: ignore[no-any-return]
        input,
        qweight,
        weight_shape[0],
        first,
        lowp_mode=lowp,
        act_quant_mode=mode,
    )


@alias_op("dequantize_nf4")
def _dequantize_nf4(t: Tensor, scales: Tensor, group_size: int, out_dtype: torch.dtype) -> Tensor:
    return _dequantize("dequantize_nf4", t, "nf4", t.shape[-1] * 2, scales, group_size, out_dtype)


@alias_op("dequantize_4bit")
def _dequantize_4bit(
    weight: Tensor,
    quant_type: str,
    shape: list[int],
    absmax: Tensor,
    out: Tensor | None,
    blocksize: int,
) -> Tensor:
    op = "dequantize_4bit"
    dtype = absmax.dtype if out is None else out.dtype
    rows = weight.reshape(shape[0], -1)
    scales = absmax.reshape(shape[0], -1)
    form = _format(op, quant_type)
    result = _dequantize(op, rows, form, shape[1], scales, blocksize, dtype)
    return result if out is None else out.copy_(result)


def _dequantize(
    op: str,
    qweight: Tensor,
    form: str,
    in_features: int,
    scales: Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> Tensor:
    if qweight.dim() != 2:
        raise OpArgumentError(f"{op}: the weight must be 2-D, got {qweight.dim()}-D")
    packed = _OPS.pack_woq_weight(qweight, _columns(scales), None, form, in_features, group_size)
    return _OPS.dequantize_woq_weight(packed, qweight.shape[0], in_features, dtype)  # type: ignore[no-any-return]


def _fused(op: str, input: Tensor, packed: Tensor, activation: str, **operands: Tensor) -> Tensor:
    """Compute with what `PackedLinear.get_data_handle` returned, or with a packed weight alone, without a bias."""
    from ipex_core.packing.woq import read_layout

    operands = {name: operand.to(input.dtype) for name, operand in operands.items()}
    if packed.dtype == torch.int64 and packed.numel() == 1 and int(packed) in _LIVING:
        return _LIVING[int(packed)](input, activation, **operands)
    layout = read_layout(packed)
    if layout is None:
        raise OpArgumentError(
            f"{op}: W_prepack must be a weight packed by woq_linear_pack_weight, the packed_weight of a layer, or"
            " get_data_handle() of a result of weight_only_qlinear_prepack that still exists, got a"
            f" {packed.dim()}-D tensor of {packed.dtype}"
        )
    # The order of a weight for 8-bit products is another; how activations are rounded then is the default of layers.
    int8 = layout.order == "vnni"
    return _OPS.woq_linear(  # type: ignore[no-any-return]
        input,
        packed,
        layout.n,
        activation=activation,
        lowp_mode="int8" if int8 else "none",
        act_quant_mode="per_batch_ic_block_sym" if int8 else "none",
        **operands,
    )


def _alias_fused(op: str, activation: str = "none", operands: Sequence[str] = ()) -> None:
    schema = (
        f"{op}(Tensor input, Tensor W_prepack{', Tensor[] others' if operands else ''}) -> Tensor"
    )

    @alias_op(schema)
    def fused(input: Tensor, W_prepack: Tensor, others: Sequence[Tensor] = ()) -> Tensor:
        if len(others) != len(operands):
            raise OpArgumentError(
                f"{op}: others must have {len(operands)} tensors, got {len(others)}"
            )
        return _fused(op, input, W_prepack, activation, **dict(zip(operands, others, strict=True)))


_alias_fused("ipex_woq_linear")
_alias_fused("woq_linear_gelu", "gelu")
_alias_fused("woq_linear_new_gelu", "gelu_tanh")
_alias_fused("woq_linear_relu", "relu")
_alias_fused("woq_linear_silu", "silu")
_alias_fused("woq_linear_add", operands=("residual",))
_alias_fused("woq_linear_add_add", operands=("residual", "residual2"))
_alias_fused("woq_linear_mul", operands=("mul",))

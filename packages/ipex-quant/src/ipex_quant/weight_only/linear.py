# SPDX-License-Identifier: Apache-2.0
"""Linear layers on quantized weights."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.module_swap.base import call
from ipex_core.nn.linear import finish, fits
from ipex_core.packing.parameter import PackedWeight
from ipex_quant.qconfig.weight_only import (
    QConfigWoq,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
    _member,
    woq_qconfig,
)
from ipex_quant.weight.layouts import (
    QuantDtype,
    QuantMethod,
    WoqWeightFormat,
    awq_weight,
    gptq_weight,
)
from ipex_quant.weight.tensor import (
    QuantizedWeight,
    absent_keys,
    packable_group,
    saved_tensors,
    saved_weight,
    unknown_keys,
    unpack,
)
from ipex_quant.weight_only.build import as_qconfig, dtype_of, features_of, plain_codes, quantized

__all__ = [
    "QuantDtype",
    "QuantMethod",
    "WeightOnlyQuantizedLinear",
    "WoqLinearModule",
    "WoqWeightFormat",
]


@contextlib.contextmanager
def stand_ins(model: nn.Module) -> Iterator[None]:
    """Let layers of a model whose weights are not packed yet compute with random weights of low rank meanwhile.

    What only looks at how values go from layer to layer then does not make all of them pack weights that are to be
    combined with others.
    """
    waiting = [
        module
        for module in model.modules()
        if isinstance(module, WoqLinearModule)
        and module._later is not None
        and "forward" not in module.__dict__
    ]
    for seed, module in enumerate(waiting):
        module.__dict__["forward"] = _low_rank(module, seed)
    try:
        yield
    finally:
        for module in waiting:
            del module.__dict__["forward"]


def _low_rank(module: WoqLinearModule, seed: int, rank: int = 8) -> Callable[[Tensor], Tensor]:
    """Return a forward with a random weight; outputs are about as large as inputs."""
    source = torch.Generator().manual_seed(seed)
    down = torch.randn(module.in_features, rank, generator=source) / module.in_features**0.5
    up = torch.randn(rank, module.out_features, generator=source) / rank**0.5
    bias = module.bias

    def forward(x: Tensor) -> Tensor:
        y = x.float() @ down @ up
        return (y if bias is None else y + bias).to(x.dtype)

    return forward


class WoqLinearModule(nn.Module):
    """A linear layer on a quantized weight: computing, saving, loading, moving."""

    packed_weight: Tensor | None
    bias: Tensor | None
    #: A weight that is not packed yet.
    _later: QuantizedWeight | None = None

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
        #: The dtype that ``weight`` shows, unless it shows the codes.
        self._float_dtype = torch.float32
        self.shows_codes = False

    # -- computing ------------------------------------------------------------------------------------------

    def forward(self, input: Tensor) -> Tensor:
        """Compute ``input @ weight.T + bias``; the result has the dtype of ``input``."""
        return self.fused(input)

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
        packed = self.packed()
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
        """The float weight: it has shape and dtype, and is dequantized when somebody computes with it.

        With ``shows_codes`` a copy of the codes, int8 or an 8-bit float ``[N, K]`` or uint8 ``[N, ceil(K / 2)]``.
        """
        packed = self.packed()
        if packed is None:
            return None
        if self.shows_codes:
            return self.quantized_weight().codes
        shape = torch.Size((self.out_features, self.in_features))
        return PackedWeight(packed, "woq", shape, self._float_dtype)

    def quantized_weight(self) -> QuantizedWeight:
        """Return codes, scales and zero points, unpacked."""
        if self._later is not None:
            return dataclasses.replace(self._later, bias=self.bias)
        packed = self._buffers["packed_weight"]
        if packed is None:
            raise RuntimeError(
                f"{type(self).__name__}: has no weight yet: call load_state_dict() first"
            )
        weight = unpack(packed)
        weight.bias = self.bias
        return weight

    def packed(self) -> Tensor | None:
        """Return the packed weight; one that was to be packed later is packed now."""
        later = self._later
        if later is not None:
            self._buffers["packed_weight"] = later.pack(self._order)
            self._later = None
        return self._buffers["packed_weight"]

    @property
    def _order(self) -> str:
        return "vnni" if self.modes[0] == "int8" else "dot"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the ``[N, K]`` float weight."""
        return self.quantized_weight().dequantize(dtype)

    def set_weight(self, weight: QuantizedWeight, later: bool = False) -> None:
        """Pack a weight and take it, with its bias.

        Args:
            weight: The weight.
            later: Pack it when `packed` is asked for, which weights that are combined before never need.

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
        self._later = weight if later else None
        self.packed_weight = None if later else weight.pack(self._order)
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
        if self.packed() is not None:
            destination.update(saved_tensors(self.quantized_weight(), prefix))

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
        absent = absent_keys(state_dict, prefix)
        if strict:
            missing_keys += absent
            unexpected_keys += unknown_keys(state_dict, prefix)
        if absent:
            return
        try:
            self.set_weight(saved_weight(state_dict, prefix))
        except ValueError as error:
            error_msgs.append(str(error))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        packed = self.packed()
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


# --- the layer --------------------------------------------------------------------------------------------------------


class WeightOnlyQuantizedLinear(WoqLinearModule):
    """``y = x @ weight.T + bias`` with a weight of 4 or 8 bits.

    It is made by one of the class methods; a module made by the constructor has no weight until a state dict is
    loaded. The state dict holds codes, scales and zero points, and not the packed form, so it can be saved in any file
    format and read anywhere. The layer has no gradient for its weight, but for its input.

    Attributes:
        in_features: K.
        out_features: N.
        packed_weight: The weight as ``torch.ops.ipex.woq_linear`` takes it, 1-D uint8, or None.
        bias: ``[N]``, or None. A bias of zeros is dropped.
        dtype: The `WoqWeightDtype` of the weight.
        lowp_mode: The `WoqLowpMode`.
        act_quant_mode: The `WoqActQuantMode`.
        group_size: Input features that share a scale, or -1 for all.
        weight_qscheme: The `WoqWeightQScheme` of the weight.
        modes: ``(lowp_mode, act_quant_mode)`` as the op takes them.
        shows_codes: Whether ``weight`` is the codes, as IPEX's layer has it: scripts ask for its dtype. True for layers
            made by its class methods and by `ipex.quantization.convert`, but not in models of transformers, which cast
            activations to ``weight.dtype``.
    """

    @classmethod
    def from_quantized(
        cls, weight: QuantizedWeight, qconfig: QConfigWoq | None = None, later: bool = False
    ) -> WeightOnlyQuantizedLinear:
        """Return a layer with this weight.

        Args:
            weight: Codes, scales and zero points.
            qconfig: How to compute; only its modes matter. None: in the dtype of the input.
            later: See `set_weight`.

        Raises:
            OpArgumentError: The packed format cannot hold the weight.
        """
        result = cls(weight.in_features, weight.out_features, False, dtype_of(weight), qconfig)
        result.set_weight(weight, later)
        return result

    @classmethod
    def from_float(
        cls,
        mod: nn.Module,
        scales: Tensor | None = None,
        zero_points: Tensor | None = None,
        *,
        scale_dtype: torch.dtype = torch.float32,
    ) -> nn.Module:
        """Quantize a float linear layer and free its weight.

        Args:
            mod: `torch.nn.Linear` or a subclass with a float weight, and with an attribute ``qconfig``.
            scales: ``[N, G]`` to use (``[N]`` without groups), or None: computed from the extremes.
            zero_points: Likewise.
            scale_dtype: What scales are rounded to before codes are computed: float32, bfloat16 or float16.

        Returns:
            The quantized layer, without weight if ``mod.weight`` is on the meta device; ``mod`` itself, unchanged, if
            its ``qconfig`` is not a `QConfigWoq`.

        Raises:
            OpArgumentError: ``mod`` has no ``qconfig``, its weight is not finite, or the configuration does not fit.
        """
        op = f"{cls.__name__}.from_float"
        check(hasattr(mod, "qconfig"), op, "mod", "have a qconfig", type(mod).__name__)
        qconfig: Any = mod.qconfig
        if not isinstance(qconfig, QConfigWoq):
            return mod
        source = getattr(mod, "weight", None)
        check(isinstance(source, Tensor), op, "mod", "have a weight", type(mod).__name__)
        assert isinstance(source, Tensor)
        check(source.dim() == 2, op, "mod.weight", "be 2-D", list(source.shape))
        check(source.is_floating_point(), op, "mod.weight", "be floating point", source.dtype)
        n, k = source.shape
        bias = getattr(mod, "bias", None)
        dtype = qconfig.weight_dtype
        fits = packable_group(k if qconfig.group_size == -1 else qconfig.group_size, k) is not None
        text = f"be -1, or at least 16, for {k} input features"
        check(fits, op, "qconfig.group_size", text, qconfig.group_size)
        result = cls(k, n, bias is not None, dtype, qconfig)
        result._float_dtype = source.dtype
        if source.is_meta:
            return result
        check(source.device.type == "cpu", op, "mod.weight", "be on the CPU", source.device)
        with torch.no_grad():
            weight = quantized(op, source.detach(), qconfig, scales, zero_points, scale_dtype)
            weight.bias = bias
            result.set_weight(weight)
        result.shows_codes = True
        mod.weight = nn.Parameter(source.new_empty(0), requires_grad=False)  # type: ignore[assignment]
        return result.train(mod.training)

    @classmethod
    def from_float_and_qweight(
        cls,
        mod: nn.Module,
        qweight: Tensor,
        dtype: int,
        scales: Tensor,
        zero_points: Tensor | None,
        bias: Tensor | None = None,
        group_size: int = -1,
        g_idx: Tensor | None = None,
        weight_format: int = WoqWeightFormat.PLAIN_FORMAT,
    ) -> WeightOnlyQuantizedLinear:
        """Return a layer for a float one whose weight was quantized elsewhere.

        Args:
            mod: The float layer. It says the shape, the bias if none is given, and how to compute, if it has a
                ``qconfig``.
            qweight: Codes in the layout that ``weight_format`` names.
            dtype: The `WoqWeightDtype` of the codes.
            scales: ``[N, G]``, or ``[N]`` for one group; GPTQ and AWQ: ``[G, N]``.
            zero_points: ``[N, G]`` or ``[N]``, or for INT4 int32 ``[N, ceil(G / 8)]`` with eight in a word, the first
                lowest; or None. GPTQ and AWQ: packed like the codes.
            bias: ``[N]``, or None for the bias of ``mod``.
            group_size: Input features that share a scale, or -1.
            g_idx: int32 ``[K]``, the group of each input feature, or None.
            weight_format: A `WoqWeightFormat`.

        Raises:
            OpArgumentError: The parts do not fit together.
        """
        op = f"{cls.__name__}.from_float_and_qweight"
        form = _member(op, "weight_format", WoqWeightFormat, weight_format)
        qconfig = getattr(mod, "qconfig", None)
        in_features, out_features = features_of(op, mod)
        bias = getattr(mod, "bias", None) if bias is None else bias
        if form is not WoqWeightFormat.PLAIN_FORMAT:
            method = QuantMethod(form - 1)
            return cls.from_weight(
                qweight,
                scales,
                zero_points,
                in_features,
                out_features,
                qconfig if isinstance(qconfig, QConfigWoq) else None,
                bias,
                group_size,
                g_idx,
                method,
            )
        weight = plain_codes(
            op, qweight, dtype, scales, zero_points, in_features, group_size, g_idx, bias
        )
        result = cls(
            in_features,
            out_features,
            False,
            dtype,
            qconfig if isinstance(qconfig, QConfigWoq) else None,
        )
        result.set_weight(weight)
        result.shows_codes = True
        return result

    @classmethod
    def from_float_and_int4_weight(
        cls,
        mod: nn.Module,
        qweight: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        bias: Tensor | None = None,
        group_size: int = -1,
        g_idx: Tensor | None = None,
        weight_format: int = WoqWeightFormat.PLAIN_FORMAT,
    ) -> WeightOnlyQuantizedLinear:
        """`from_float_and_qweight` for INT4, under its deprecated name."""
        warnings.warn(
            f"{cls.__name__}.from_float_and_int4_weight is deprecated, use from_float_and_qweight",
            DeprecationWarning,
            stacklevel=2,
        )
        return cls.from_float_and_qweight(
            mod,
            qweight,
            WoqWeightDtype.INT4,
            scales,
            zero_points,
            bias,
            group_size,
            g_idx,
            weight_format,
        )

    @classmethod
    def from_int4_weight(
        cls,
        qweight: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        in_features: int,
        out_features: int,
        quant_method: int = QuantMethod.GPTQ_GEMM,
        qconfig: Any = None,
        bias: Tensor | None = None,
        group_size: int = -1,
        g_idx: Tensor | None = None,
    ) -> WeightOnlyQuantizedLinear:
        """`from_weight` with another order of arguments."""
        return cls.from_weight(
            qweight,
            scales,
            zero_points,
            in_features,
            out_features,
            qconfig,
            bias,
            group_size,
            g_idx,
            quant_method,
        )

    @classmethod
    def from_weight(
        cls,
        qweight: Tensor,
        scales: Tensor,
        zero_points: Tensor | None,
        in_features: int,
        out_features: int,
        qconfig: Any = None,
        bias: Tensor | None = None,
        group_size: int = -1,
        g_idx: Tensor | None = None,
        quant_method: int = QuantMethod.GPTQ_GEMM,
        dtype: int = QuantDtype.INT4,
        **kwargs: Any,
    ) -> WeightOnlyQuantizedLinear:
        """Return a layer for a 4-bit weight in the layout of GPTQ or AWQ.

        Args:
            qweight: int32 ``[K / 8, N]`` (GPTQ) or ``[K, N / 8]`` (AWQ).
            scales: ``[G, N]``.
            zero_points: int32 ``[G, N / 8]`` (GPTQ: less one), or None where all are 8.
            in_features: K; for GPTQ also the rows of ``qweight``, which vLLM passes. For AWQ the tensors say it, as in
                IPEX, and this number is not read.
            out_features: N; for AWQ likewise.
            qconfig: A `QConfigWoq`, or a mapping with one as global; None means ``lowp_mode=BF16``.
            bias: ``[N]``, or None.
            group_size: Input features that share a scale, or -1.
            g_idx: ``[K]``, the group of each input feature (GPTQ's act-order), or None.
            quant_method: A `QuantMethod`.
            dtype: `QuantDtype.INT4`.
            kwargs: ``zero_offset=False`` for GPTQ's second format, whose zero points are stored as they are. Others are
                ignored.

        Raises:
            OpArgumentError: The parts do not fit together.
        """
        op = f"{cls.__name__}.from_weight"
        method = _member(op, "quant_method", QuantMethod, quant_method)
        _member(op, "dtype", QuantDtype, dtype)
        qconfig = as_qconfig(op, qconfig)
        if method is QuantMethod.GPTQ_GEMM:
            if in_features == qweight.shape[0]:
                in_features *= 8
            weight = gptq_weight(
                qweight,
                scales,
                zero_points,
                g_idx,
                group_size=group_size,
                offset=kwargs.get("zero_offset", True),
                in_features=in_features,
                bias=bias,
            )
        else:
            check(g_idx is None or not g_idx.numel(), op, "g_idx", "be None for AWQ", "a tensor")
            weight = awq_weight(qweight, scales, zero_points, group_size=group_size, bias=bias)
            in_features, out_features = weight.in_features, weight.out_features
        result = cls(in_features, out_features, False, WoqWeightDtype.INT4, qconfig)
        result.set_weight(weight)
        result.shows_codes = True
        return result

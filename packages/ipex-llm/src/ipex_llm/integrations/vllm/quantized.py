# SPDX-License-Identifier: Apache-2.0
"""Kernels of vLLM's quantized linear layers: weights of 4 and 8 bits by groups, INT8 with activations, and FP8."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearKernel,
    Int8ScaledMMLinearKernel,
)
from vllm.scalar_type import scalar_types

from ipex_core.library.spec import FLOATS
from ipex_core.util import return_free_memory

#: Type of vLLM -> bits, format of ipex, and what a code without zero points means: ``code - zero``.
_TYPES = {
    scalar_types.uint4: (4, "int4", 0),
    scalar_types.uint4b8: (4, "int4", 8),
    scalar_types.uint8: (8, "int8", 0),
    scalar_types.uint8b128: (8, "int8", 128),
}


def unpack(words: Tensor, bits: int, dim: int) -> Tensor:
    """Return the codes of int32 words, the lowest bits first, as uint8.

    Args:
        words: int32 of any shape.
        bits: Bits of a code, 4 or 8.
        dim: The dimension that grows, by ``32 / bits``.
    """
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    shape = [-1 if d == dim + 1 else 1 for d in range(words.dim() + 1)]
    codes = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
    return codes.flatten(dim, dim + 1).to(torch.uint8)


def _release(layer: Any, names: Iterable[str | None]) -> None:
    """Replace parameters that are packed now by empty ones."""
    for name in names:
        if name is not None and getattr(layer, name, None) is not None:
            setattr(layer, name, torch.nn.Parameter(torch.empty(0), requires_grad=False))
    return_free_memory()  # of the layers before


class IpexWeightOnlyKernel(MPLinearKernel):
    """4-bit and 8-bit integer weights with scales of groups; activations stay float."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return that no capability of a GPU is needed."""
        return -1

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether a layer fits, and else why not."""
        if c.weight_type not in _TYPES:
            names = ", ".join(str(one) for one in _TYPES)
            return False, f"ipex: weight_type must be {names}, got {c.weight_type}"
        if getattr(c, "has_g_idx", False):
            return False, "ipex: has_g_idx must be False, got True (desc_act)"
        k, group = c.partition_weight_shape[0], c.group_size
        if group not in (-1, k) and not (16 <= group <= 256 and group % 8 == 0):
            return False, (
                f"ipex: group_size must be -1, {k} or a multiple of 8 from 16 to 256, got {group}"
            )
        if c.act_type not in FLOATS:
            return False, f"ipex: act_type must be a float dtype, got {c.act_type}"
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the codes, scales and zero points of a loaded layer, and free them."""
        bits, name, zero = _TYPES[self.config.weight_type]
        words, scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        codes = unpack(words.data, bits, words.packed_dim)
        codes = codes.t() if words.input_dim == 0 else codes
        scales = scales.data if scales.output_dim == 0 else scales.data.t()
        n, k = codes.shape
        zeros = None
        if self.config.zero_points:
            packed_zeros = getattr(layer, self.w_zp_name)
            zeros = unpack(packed_zeros.data, bits, packed_zeros.packed_dim)
            zeros = zeros if packed_zeros.output_dim == 0 else zeros.t()
        elif name == "int4" and zero != 8:
            zeros = torch.full(scales.shape, zero, dtype=torch.uint8)
        if name == "int8":
            # The op has signed codes.
            codes = (codes.int() - 128).to(torch.int8)
            if zeros is not None or zero != 128:
                base = torch.full(scales.shape, zero) if zeros is None else zeros.int()
                zeros = base - 128
        else:
            codes = codes.contiguous()
            if k % 2:
                codes = torch.nn.functional.pad(codes, (0, 1))
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        group = self.config.group_size
        layer.ipex_weight = torch.ops.ipex.pack_woq_weight(
            codes.contiguous(),
            scales.contiguous(),
            None if zeros is None else zeros.to(torch.int8).contiguous(),
            name,
            k,
            -1 if group in (-1, k) else group,
        )
        layer.ipex_features = n
        _release(layer, (self.w_q_name, self.w_s_name, self.w_zp_name))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        result: Tensor = torch.ops.ipex.woq_linear(x, layer.ipex_weight, layer.ipex_features, bias)
        return result


class IpexInt8Kernel(Int8ScaledMMLinearKernel):
    """8-bit integer weights and activations; activations are quantized at each call."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that every CPU can."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return that every layer fits."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the int8 weight ``[N, K]`` of a loaded layer, and bring its scales into the form of the op."""
        weight_name, scale_name, input_name, zero_name, _ = self.layer_param_names
        weight = getattr(layer, weight_name).data
        n = weight.shape[0]
        scale = getattr(layer, scale_name).data.float().flatten()
        if not self.config.is_channelwise:
            scale = per_row(scale, layer.logical_widths, n)
        layer.ipex_weight = torch.ops.ipex.pack_int8_weight(weight.contiguous())
        layer.ipex_scale = scale.contiguous()
        layer.ipex_features = n
        layer.ipex_input = None, None
        if self.config.is_static_input_scheme:
            given = getattr(layer, input_name).data.float().flatten()
            zeros = getattr(layer, zero_name, None)
            symmetric = self.config.input_symmetric
            layer.ipex_input = one_range(given, None if symmetric else zeros)
        _release(layer, (weight_name,))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``quantize(x) @ weight.T + bias``."""
        scale, zero = layer.ipex_input
        result: Tensor = torch.ops.ipex.int8_linear(
            x,
            layer.ipex_weight,
            layer.ipex_features,
            layer.ipex_scale,
            scale,
            zero,
            bias,
            symmetric=self.config.input_symmetric,
        )
        return result


def per_row(scale: Tensor, widths: list[int], rows: int) -> Tensor:
    """Return a scale for each row of a weight that was merged from layers with a scale each."""
    if scale.numel() == rows:
        return scale
    if scale.numel() == 1:
        return scale.expand(rows)
    return scale.repeat_interleave(torch.tensor(widths))


def one_range(scale: Tensor, zero: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return one scale and zero point for merged layers that were given one each: of the range that covers theirs.

    Args:
        scale: float32, one for each layer.
        zero: Zero points of int8 codes, or None for symmetric codes.

    Returns:
        The scale, and the zero point of uint8 codes as int32, or None.
    """
    if zero is None:
        return scale.max().reshape(1), None
    zero = zero.data.float().flatten()
    high, low = (scale * (127 - zero)).max(), (scale * (-128 - zero)).min()
    step = (high - low) / 255
    return step.reshape(1), (-low / step).round().int().reshape(1)


def fp8_format(weight: Tensor) -> str:
    """Return the name of the format of an 8-bit float weight."""
    return "fp8_e5m2" if weight.dtype == torch.float8_e5m2 else "fp8_e4m3"


class IpexFp8Kernel(FP8ScaledMMLinearKernel):
    """8-bit float weights with a scale for the layer or for each row; activations stay float.

    Checkpoints that ask for 8-bit activations, too, get the more exact product.
    """

    def __init__(self, c: Any, layer_param_names: Sequence[str]) -> None:
        # Not the base's: it makes what quantizes activations.
        self.config = c
        self.layer_param_names = layer_param_names

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that every CPU can."""
        return True, None

    @classmethod
    def can_implement(cls, c: Any) -> tuple[bool, str | None]:
        """Return whether a layer fits, and else why not."""
        shape = c.weight_quant_key.scale.group_shape
        if shape.is_per_tensor() or shape.is_per_token() or shape.is_per_channel():
            return True, None
        return (
            False,
            f"ipex: the scales of the weight must be per tensor or per channel, got {shape}",
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight ``[K, N]`` of a loaded layer."""
        weight_name, scale_name = self.layer_param_names[:2]
        weight = getattr(layer, weight_name).data.t()
        n, k = weight.shape
        scale = getattr(layer, scale_name).data.float().flatten()
        scale = per_row(scale, getattr(layer, "logical_widths", [n]), n)
        layer.ipex_weight = torch.ops.ipex.pack_woq_weight(
            weight.contiguous(), scale.reshape(n, 1).contiguous(), None, fp8_format(weight), k
        )
        layer.ipex_features = n
        _release(layer, (weight_name,))

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        result: Tensor = torch.ops.ipex.woq_linear(x, layer.ipex_weight, layer.ipex_features, bias)
        return result

    def apply_scaled_mm(self, **arguments: Any) -> Tensor:
        """Raise: `apply_weights` does the whole product."""
        raise NotImplementedError(
            "vLLM plug-in: apply_weights must be called, got a call of apply_scaled_mm with"
            f" {', '.join(arguments)}"
        )


class IpexFp8BlockKernel(Fp8BlockScaledMMLinearKernel):
    """8-bit float weights with a scale for each block of 128 x 128; activations stay float."""

    apply_input_quant = False

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return that every CPU can."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return whether a layer fits, and else why not."""
        shape = config.weight_quant_key.scale.group_shape
        if (shape.row, shape.col) == (128, 128):
            return True, None
        return False, f"ipex: weight_block_size must be (128, 128), got ({shape.row}, {shape.col})"

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack the weight ``[N, K]`` of a loaded layer."""
        given = self._get_layer_params(layer)
        weight = given.weight.data
        n, k = weight.shape
        inverse = given.weight_scale_inv
        scale = (given.weight_scale if inverse is None else inverse).data
        if scale.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            scale = scale.float()
        layer.ipex_weight = torch.ops.ipex.pack_woq_weight(
            weight.contiguous(), scale.contiguous(), None, fp8_format(weight), k, 128
        )
        layer.ipex_features = n
        _release(layer, (given.WEIGHT,))

    def apply_weights(
        self, layer: Any, x: Tensor, bias: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        del options
        result: Tensor = torch.ops.ipex.woq_linear(x, layer.ipex_weight, layer.ipex_features, bias)
        return result

    def apply_block_scaled_mm(self, A: Tensor, B: Tensor, As: Tensor, Bs: Tensor) -> Tensor:
        """Raise: `apply_weights` does the whole product."""
        raise NotImplementedError(
            "vLLM plug-in: apply_weights must be called, got a call of apply_block_scaled_mm"
        )


#: Name of a table in vLLM -> our kernels in it.
TABLES: dict[str, tuple[type, ...]] = {
    "_POSSIBLE_KERNELS": (IpexWeightOnlyKernel,),
    "_POSSIBLE_INT8_KERNELS": (IpexInt8Kernel,),
    "_POSSIBLE_FP8_KERNELS": (IpexFp8Kernel,),
    "_POSSIBLE_FP8_BLOCK_KERNELS": (IpexFp8BlockKernel,),
    "_POSSIBLE_WFP8A16_KERNELS": (IpexFp8Kernel,),
}

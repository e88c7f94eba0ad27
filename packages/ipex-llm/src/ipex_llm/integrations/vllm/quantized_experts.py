# SPDX-License-Identifier: Apache-2.0
"""Experts of vLLM with integer weights of 4 and 8 bits, FP8 and MXFP4, on ``ipex::fused_experts``.

vLLM looks its experts for the CPU up by their names in one module, each time. They are replaced there. Activations
stay float, also where vLLM's own would round them to 8 bits.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ipex_core.nn.moe import pack_woq_experts
from ipex_core.util import return_free_memory
from ipex_llm.integrations.vllm import experts

_CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe"
_KERNEL = "vllm.model_executor.layers.fused_moe.modular_kernel"
_FP8_ORACLE = "vllm.model_executor.layers.fused_moe.oracle.fp8"
_QUANTIZATION = "vllm.model_executor.layers.quantization"
#: Modules that import the function `convert_fp8` replaces, by name, at their start.
_FP8_USERS = (
    f"{_QUANTIZATION}.fp8",
    f"{_QUANTIZATION}.modelopt",
    f"{_QUANTIZATION}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8",
)
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

#: Places of the 8 codes in a word of AWQ.
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def register_quantized_experts() -> tuple[str, ...]:
    """Replace vLLM's quantized experts for the CPU; calling it again does nothing.

    Returns:
        The names of the classes that were replaced.
    """
    module: Any = importlib.import_module(_CPU_EXPERTS)
    done = []
    packs: dict[str, Callable[[Any, Any], None] | None] = {
        "CPUExpertsInt4": None,
        "CPUExpertsInt8": _pack_int8,
        "CPUExpertsMxfp4": _pack_mxfp4,
        "CPUExpertsFp8": None,
    }
    for name, pack in packs.items():
        stock = getattr(module, name, None)
        if stock is None:
            continue
        if not getattr(stock, "_ipex", False):
            made = _expert_class(name, stock, pack)
            if name == "CPUExpertsInt4":
                # Groups of any size, for which vLLM has keys of their own.
                made._supports_quant_scheme = staticmethod(_any_group(module.kInt4Static))
            elif name == "CPUExpertsFp8":
                made._supports_quant_scheme = staticmethod(_supports_fp8)
                # The clamped SwiGLU has rows that take turns.
                made._supports_activation = staticmethod(
                    lambda activation: (
                        _supports_activation(activation) and not experts.interleaved(activation)
                    )
                )
            setattr(module, name, made)
        done.append(name)
    if "CPUExpertsInt4" in done:
        module.prepare_int4_moe_layer_for_cpu = prepare_int4
    if "CPUExpertsMxfp4" in done:
        module.prepare_mxfp4_moe_layer_for_cpu = lambda w13, w2, s13, s2: (w13, w2, s13, s2)
    if "CPUExpertsFp8" in done:
        _replace_conversion_of_fp8()
    return tuple(done)


def _replace_conversion_of_fp8() -> None:
    """Replace vLLM's conversion of FP8 experts in its module, and in those that have imported it by now."""
    oracle: Any = importlib.import_module(_FP8_ORACLE)
    function = "convert_to_fp8_moe_kernel_format"
    stock = getattr(oracle, function)
    if getattr(stock, "_ipex", False):
        return
    cpu = oracle.Fp8MoeBackend.CPU

    @functools.wraps(stock)
    def convert(
        fp8_backend: Any,
        layer: Any,
        w13: Tensor,
        w2: Tensor,
        w13_scale: Tensor,
        w2_scale: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if fp8_backend != cpu:
            return stock(fp8_backend, layer, w13, w2, w13_scale, w2_scale, *args, **kwargs)
        block = getattr(layer, "weight_block_size", None)
        return (*convert_fp8((w13, w2), (w13_scale, w2_scale), block), w13_scale, w2_scale)

    convert._ipex = True  # type: ignore[attr-defined]
    for name in (_FP8_ORACLE, *_FP8_USERS):
        module = sys.modules.get(name)
        if getattr(module, function, None) is stock:
            setattr(module, function, convert)


def _supports_fp8(weight_key: Any, activation_key: Any) -> bool:
    """Return whether weights are FP8 with a scale for an expert, a row or a block; activations stay float."""
    if getattr(weight_key, "dtype", None) not in _FP8:
        return False
    if activation_key is not None and activation_key.dtype not in _FP8:
        return False
    shape = weight_key.scale.group_shape
    whole = shape.is_per_tensor() or shape.is_per_token() or shape.is_per_channel()
    return bool(whole or (shape.row > 1 and shape.col > 1))


def _any_group(key: Any) -> Callable[[Any, Any], bool]:
    """Return what says whether weights have the type of a key of vLLM, and activations are float."""

    def supports(weight_key: Any, activation_key: Any) -> bool:
        return activation_key is None and getattr(weight_key, "dtype", None) == key.dtype

    return supports


def _expert_class(name: str, base: type, pack: Callable[[Any, Any], None] | None) -> Any:
    """Return a subclass of vLLM's experts with the product of ipex, for all sizes and ways of routing."""
    general: Any = importlib.import_module(_KERNEL).FusedMoEExperts
    members: dict[str, Any] = {
        "_ipex": True,
        "_supports_current_device": staticmethod(lambda: True),
        "_supports_activation": staticmethod(_supports_activation),
        "_supports_routing_method": staticmethod(lambda method, weight, activation: True),
        # Not the limits of vLLM's kernels.
        "is_supported_config": staticmethod(general.is_supported_config),
        "supports_expert_map": lambda self: True,
        "moe_problem_size": _problem_size,
        "apply": experts.apply_method(_parts),
    }
    if pack is not None:
        members["process_weights_after_loading"] = pack
    return type(f"Ipex{name}", (base,), members)


def _supports_activation(activation: Any) -> bool:
    return getattr(activation, "value", activation) in ("silu", "gelu", "gelu_tanh", "swigluoai")


def _problem_size(
    self: Any, a1: Tensor, w1: Tensor, w2: Tensor, topk_ids: Tensor
) -> tuple[int, int, int, int, int]:
    """Return experts, tokens, rows of the first product, hidden size and experts of a token."""
    del w2
    rows = 2 * self.moe_config.intermediate_size_per_partition
    tokens = a1.shape[0] if a1.dim() == 2 else a1.shape[1]
    return w1.shape[0], tokens, rows, a1.shape[-1], topk_ids.shape[1]


def _parts(self: Any, w1: Tensor, w2: Tensor) -> tuple[Any, ...]:
    inner = self.moe_config.intermediate_size_per_partition
    return w1, w2, inner, getattr(self, "first_bias", self.w1_bias), self.w2_bias


# --- packing ----------------------------------------------------------------------------------------------------------


def unpack_words(words: Tensor, dim: int, awq: bool = False) -> Tensor:
    """Return the 4-bit codes of int32 words as uint8, with eight times as many along a dimension.

    Args:
        words: int32 of any shape.
        dim: The dimension that the codes were packed along.
        awq: Whether the codes of a word are in the order of AWQ, else the lowest bits come first.
    """
    order = torch.tensor(_AWQ if awq else range(8), dtype=torch.int32)
    shape = [-1 if d == dim + 1 else 1 for d in range(words.dim() + 1)]
    codes = (words.unsqueeze(dim + 1) >> (4 * order).view(shape)) & 15
    return codes.flatten(dim, dim + 1).to(torch.uint8)


def _pairs(codes: Tensor) -> Tensor:
    """Return two 4-bit codes in a byte, the first in the low bits."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).contiguous()


def prepare_int4(
    w13_packed: Tensor,
    w2_packed: Tensor,
    w13_scale: Tensor,
    w2_scale: Tensor,
    quant_algo: Any = None,
    w13_zeros: Tensor | None = None,
    w2_zeros: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Pack experts of 4 bits, in the place of vLLM's function of this meaning.

    Args:
        w13_packed: int32 ``[E, H / 8, 2 I]``, or of AWQ ``[E, H, 2 I / 8]``.
        w2_packed: int32 ``[E, I / 8, H]``, or of AWQ ``[E, I, H / 8]``.
        w13_scale: ``[E, groups, 2 I]``.
        w2_scale: ``[E, groups, H]``.
        quant_algo: vLLM's name of the order of codes, ``AWQ`` or another.
        w13_zeros: int32 ``[E, groups, 2 I / 8]``, less one but for AWQ; None: 8.
        w2_zeros: Like ``w13_zeros``.

    Returns:
        The packed weights, and empty tensors for their scales and zero points, which they contain.
    """
    awq = getattr(quant_algo, "name", "") == "AWQ"
    weights: list[Tensor] = []
    scales: list[Tensor] = []
    zeros: list[Tensor | None] = []
    for words, scale, stored in (
        (w13_packed, w13_scale, w13_zeros),
        (w2_packed, w2_scale, w2_zeros),
    ):
        codes = unpack_words(words, 2 if awq else 1, awq).transpose(1, 2)
        weights.append(codes)
        scales.append(scale.transpose(1, 2).contiguous())
        if stored is None:
            zeros.append(None)
        else:
            zero = unpack_words(stored, 2, awq).transpose(1, 2) + (0 if awq else 1)
            zeros.append(zero.to(torch.int8).contiguous())
    k13, k2 = weights[0].shape[2], weights[1].shape[2]
    packed = pack_woq_experts(
        (_pairs(weights[0]), _pairs(weights[1])),
        (scales[0], scales[1]),
        (zeros[0], zeros[1]),
        format="int4",
        in_features=(k13, k2),
        group_size=_group(k13, scales[0].shape[2]),
    )
    empty = [torch.empty(0) for _ in range(4)]
    return (packed.w13, packed.w2, *empty)


def convert_fp8(
    weights: tuple[Tensor, Tensor], scales: tuple[Tensor, Tensor], block: Any = None
) -> tuple[Tensor, Tensor]:
    """Pack experts of FP8.

    Args:
        weights: ``[E, 2 I, H]``, gate rows first, and ``[E, H, I]``.
        scales: For each weight ``[E]``, ``[E, N, 1]``, or one for each block, ``[E, ceil(N / r), ceil(K / c)]``.
        block: The rows ``r`` and columns ``c`` of a block, as the checkpoint says it; None where there are no blocks.
    """
    rows, group = [], -1
    for weight, scale in zip(weights, scales, strict=True):
        count, n, k = weight.shape
        scale = scale.detach().float()
        if block is None:
            scale = scale.reshape(count, -1, 1).expand(count, n, 1)
        else:
            height, group = block
            if -(-k // group) != scale.shape[2]:  # vLLM has cut the blocks for its ranks
                height, group = n // scale.shape[1], k // scale.shape[2]
            scale = scale.repeat_interleave(height, dim=1)[:, :n]
        rows.append(scale.contiguous())
    codes = weights[0].detach(), weights[1].detach()
    packed = pack_woq_experts(
        codes,
        (rows[0], rows[1]),
        format="fp8_e5m2" if codes[0].dtype == torch.float8_e5m2 else "fp8_e4m3",
        in_features=(codes[0].shape[2], codes[1].shape[2]),
        group_size=group,
    )
    return packed.w13, packed.w2


def _group(columns: int, groups: int) -> int:
    return -1 if groups == 1 else columns // groups


def _keep(layer: Any, packed: Any, freed: tuple[str, ...]) -> None:
    """Put packed weights into a layer, and free what they contain."""
    empty = torch.empty(0)
    for name, value in (("w13_weight", packed.w13), ("w2_weight", packed.w2)):
        setattr(layer, name, torch.nn.Parameter(value, requires_grad=False))
    for name in freed:
        if hasattr(layer, name):
            getattr(layer, name).data = empty
    return_free_memory()  # of the layers before


def _pack_mxfp4(self: Any, layer: Any) -> None:
    """Pack ``w13`` ``[E, 2 I, H / 2]`` and ``w2`` ``[E, H, I / 2]``, uint8 pairs of codes, with scales of 32 codes."""
    # The rows of gates and of the up projection take turns in checkpoints of gpt-oss.
    turns = experts.interleaved(self.moe_config.activation)
    first = experts.halves(layer.w13_weight.data, turns)
    scale = experts.halves(layer.w13_weight_scale.data, turns)
    bias = self.w1_bias
    self.first_bias = None if bias is None else experts.halves(bias, turns).contiguous()
    second = layer.w2_weight.data
    packed = pack_woq_experts(
        (first.contiguous(), second),
        (_powers(scale), _powers(layer.w2_weight_scale.data)),
        format="fp4",
        in_features=(2 * first.shape[2], 2 * second.shape[2]),
        group_size=32,
    )
    _keep(layer, packed, ("w13_weight_scale", "w2_weight_scale"))


def _powers(scale: Tensor) -> Tensor:
    """Return exponents as scales that are powers of two."""
    return scale.contiguous().view(torch.float8_e8m0fnu)


def _pack_int8(self: Any, layer: Any) -> None:
    """Pack ``w13`` ``[E, 2 I, H]`` and ``w2`` ``[E, H, I]``, int8 with a scale for each row."""
    scales = [self.w1_scale, self.w2_scale]
    first, second = layer.w13_weight.data, layer.w2_weight.data
    packed = pack_woq_experts(
        (first, second),
        (
            scales[0].data.float().reshape(*first.shape[:2], 1),
            scales[1].data.float().reshape(*second.shape[:2], 1),
        ),
        format="int8",
        in_features=(first.shape[2], second.shape[2]),
    )
    _keep(layer, packed, ())

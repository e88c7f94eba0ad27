# SPDX-License-Identifier: Apache-2.0
"""How a quantized weight is stored, scheme by scheme, and what ``config.json`` says about it.

In place of ``NAME.weight`` ``[N, K]`` there are, with G groups of K,

- int4, format ``pack-quantized``: ``NAME.weight_packed`` int32 ``[N, ceil(K / 8)]``, codes 0 to 15 with zero point 8,
  the first one in the lowest bits; ``NAME.weight_scale`` ``[N, G]``; ``NAME.weight_shape`` int64 ``[2]``;
- int8, format ``int-quantized``: ``NAME.weight`` int8 ``[N, K]``, ``NAME.weight_scale`` ``[N, 1]``; with groups it is
  ``pack-quantized`` as int4, but with codes 0 to 255, zero point 128, four in a word;
- fp8, format ``float-quantized``: ``NAME.weight`` float8_e4m3fn ``[N, K]``, ``NAME.weight_scale`` ``[N, 1]``;
- mxfp4, format ``mxfp4-pack-quantized``: ``NAME.weight_packed`` uint8 ``[N, ceil(K / 2)]``, the even column in the low
  nibble; ``NAME.weight_scale`` uint8 ``[N, G]``, exponents of two with bias 127;
- nf4, format ``nf4-pack-quantized``: ``NAME.weight_packed`` as of mxfp4, but indices of the NF4 values;
  ``NAME.weight_scale`` ``[N, G]``; ``NAME.weight_shape``.

All but nf4 are formats of the library compressed-tensors, which other engines read too; nf4 is written in the same
style under ``"quant_method": "ipex"``. Weights are ``scale * (code - zero)`` or ``scale * table[code]``.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ipex_core import woq
from ipex_core.errors import OpArgumentError
from ipex_core.packing.quantize import unpack_nibbles

#: Scheme -> format of `ipex_core.woq` and the group size that is usual.
SCHEMES = {
    "int4": ("int4", 128),
    "int8": ("int8", -1),
    "nf4": ("nf4", 64),
    "fp8": ("fp8_e4m3", -1),
    "mxfp4": ("fp4", 32),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme with its group size."""

    name: str
    group_size: int

    @property
    def packed(self) -> bool:
        """Whether codes share words or bytes."""
        return self.name in ("int4", "nf4", "mxfp4") or (
            self.name == "int8" and self.group_size != -1
        )

    @property
    def file_format(self) -> str:
        """The format as ``config.json`` names it."""
        if self.name in ("nf4", "mxfp4"):
            return f"{self.name}-pack-quantized"
        if self.packed:
            return "pack-quantized"
        return "float-quantized" if self.name == "fp8" else "int-quantized"

    def tensors(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return dtype and shape of what is stored for ``NAME.weight``; the codes come first."""
        n, k = shape
        base = name.removesuffix(".weight")
        groups = 1 if self.group_size == -1 else -(-k // self.group_size)
        scale_dtype = torch.uint8 if self.name == "mxfp4" else dtype
        found: dict[str, tuple[torch.dtype, tuple[int, ...]]]
        if not self.packed:
            codes = torch.float8_e4m3fn if self.name == "fp8" else torch.int8
            found = {name: (codes, (n, k)), f"{base}.weight_scale": (scale_dtype, (n, groups))}
            return found
        if self.name in ("int4", "int8"):
            per_word = 8 if self.name == "int4" else 4
            codes, columns = torch.int32, -(-k // per_word)
        else:
            codes, columns = torch.uint8, -(-k // 2)
        found = {
            f"{base}.weight_packed": (codes, (n, columns)),
            f"{base}.weight_scale": (scale_dtype, (n, groups)),
        }
        if self.name != "mxfp4":
            found[f"{base}.weight_shape"] = (torch.int64, (2,))
        return found

    def encode(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes and scales of some rows of a weight, as they are stored."""
        form, _ = SCHEMES[self.name]
        scale_dtype = torch.float8_e8m0fnu if self.name == "mxfp4" else weight.dtype
        codes, scales, _ = woq.quantize(weight, form, self.group_size, True, scale_dtype)
        if self.name == "mxfp4":
            scales = scales.view(torch.uint8)
        if self.packed and self.name in ("int4", "int8"):
            bits = 4 if self.name == "int4" else 8
            unsigned = (
                unpack_nibbles(codes, weight.shape[1])
                if bits == 4
                else (codes.view(torch.uint8) ^ 0x80)
            )
            codes = _words(unsigned, bits)
        return codes, scales

    def config(self, ignore: list[str]) -> dict[str, Any]:
        """Return the ``quantization_config`` of ``config.json``."""
        floating = self.name in ("fp8", "mxfp4", "nf4")
        weights: dict[str, Any] = {
            "num_bits": 8 if self.name in ("int8", "fp8") else 4,
            "type": "float" if floating else "int",
            "symmetric": True,
            "strategy": "channel" if self.group_size == -1 else "group",
            "group_size": None if self.group_size == -1 else self.group_size,
            "dynamic": False,
        }
        return {
            "quant_method": "ipex" if self.name == "nf4" else "compressed-tensors",
            "format": self.file_format,
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": None,
                    "output_activations": None,
                }
            },
            "ignore": ignore,
        }


def _words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words of uint8 codes, the first code of a word in its lowest bits."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_word))
    if bits == 4:
        padded = padded[:, 0::2] | (padded[:, 1::2] << 4)
    # The bytes of a word follow each other in memory from the lowest up.
    return padded.contiguous().view(torch.int32)


def make_scheme(name: str, group_size: int | None = None) -> Scheme:
    """Return a scheme.

    Args:
        name: One of `SCHEMES`.
        group_size: Input features that share a scale, -1 for all, None for what is usual.

    Raises:
        OpArgumentError: The name is unknown, or the scheme has no such groups.
    """
    if name not in SCHEMES:
        raise OpArgumentError(f"quantize: scheme must be one of {', '.join(SCHEMES)}, got {name!r}")
    usual = SCHEMES[name][1]
    size = usual if group_size is None else group_size
    if name == "mxfp4" and size != 32:
        raise OpArgumentError(f"quantize: group_size must be 32 for mxfp4, got {size}")
    if name == "fp8" and size != -1:
        raise OpArgumentError(f"quantize: group_size must be -1 for fp8, got {size}")
    if size != -1 and (size < 16 or size % 8):
        wanted = "be -1 or a multiple of 8 of at least 16"
        raise OpArgumentError(f"quantize: group_size must {wanted}, got {size}")
    return Scheme(name, size)

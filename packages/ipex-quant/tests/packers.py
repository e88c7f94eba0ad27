# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints, packed code by code from the descriptions of their formats, in numpy.

Each function returns the tensors of one layer and the float weight that they stand for. Nothing here is shared with the
readers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

Tensor = torch.Tensor


def words_of(codes: Any, bits: int) -> Any:
    """Return int32 words of a list of codes: a stream of bits, the first code in the lowest."""
    stream = 0
    for place, code in enumerate(codes):
        stream |= int(code) << (place * bits)
    count = -(-len(codes) * bits // 32)
    return [np.int64((stream >> (32 * i)) & 0xFFFFFFFF).astype(np.int32) for i in range(count)]


def draw(
    n: int, k: int, group: int, bits: int, symmetric: bool, seed: int
) -> tuple[Any, Any, Any, Any]:
    """Return codes ``[N, K]``, zero points and scales ``[N, G]`` and the group of each feature, at random."""
    rng = np.random.default_rng(seed)
    size = k if group == -1 else group
    groups = -(-k // size)
    codes = rng.integers(0, 2**bits, (n, k))
    middle = 2 ** (bits - 1)
    zeros = np.full((n, groups), middle) if symmetric else rng.integers(0, 2**bits, (n, groups))
    scales = (rng.random((n, groups)) + 0.1).astype(np.float16)
    return codes, zeros, scales, np.arange(k) // size


def value(codes: Any, zeros: Any, scales: Any, index: Any) -> Tensor:
    """Return the float weight."""
    wide = scales.astype(np.float32)[:, index] * (codes - zeros[:, index]).astype(np.float32)
    return torch.from_numpy(wide)


def gptq(
    n: int = 40,
    k: int = 64,
    group: int = 16,
    bits: int = 4,
    symmetric: bool = False,
    act_order: bool = False,
    second: bool = False,
    seed: int = 0,
) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, index = draw(n, k, group, bits, symmetric, seed)
    if act_order:
        index = np.random.default_rng(seed + 1).permutation(index)
    stored = zeros if second else (zeros - 1) % 2**bits
    tensors = {
        "qweight": torch.tensor(np.array([words_of(row, bits) for row in codes]).T.copy()),
        "qzeros": torch.tensor(np.array([words_of(c, bits) for c in stored.T])),
        "scales": torch.from_numpy(scales.T.copy()),
        "g_idx": torch.tensor(index, dtype=torch.int32),
    }
    return tensors, value(codes, zeros, scales, index)


def awq(
    n: int = 40, k: int = 64, group: int = 16, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, index = draw(n, k, group, 4, False, seed)

    def words(rows: Any) -> Tensor:
        result = np.zeros((rows.shape[0], rows.shape[1] // 8), dtype=np.uint32)
        for place, column in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
            result |= rows[:, column::8].astype(np.uint32) << np.uint32(4 * place)
        return torch.from_numpy(result.view(np.int32))

    tensors = {
        "qweight": words(codes.T),
        "qzeros": words(zeros.T),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return tensors, value(codes, zeros, scales, index)


def int8(
    n: int = 40, k: int = 64, shape: str = "[N]", seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    rng = np.random.default_rng(seed)
    codes = torch.from_numpy(rng.integers(-128, 128, (n, k)).astype(np.int8))
    scales = torch.from_numpy((rng.random((n, 1)) + 0.1).astype(np.float32))
    if shape == "[1]":
        scales = scales[:1, 0]
    weight = codes.float() * scales
    stored = scales.flatten() if shape == "[N]" else scales
    return {"weight": codes, "weight_scale": stored}, weight


def fp8(
    n: int = 200, k: int = 300, block: tuple[int, int] = (128, 128), seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(seed)
    codes = torch.randn(n, k).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-n // block[0]), -(-k // block[1])) + 0.1
    weight = torch.empty(n, k)
    for i in range(n):
        for j in range(scales.shape[1]):
            part = slice(j * block[1], (j + 1) * block[1])
            weight[i, part] = codes[i, part].float() * scales[i // block[0], j]
    return {"weight": codes, "weight_scale_inv": scales}, weight


def compressed(
    n: int = 40, k: int = 64, group: int = 16, bits: int = 4, symmetric: bool = True, seed: int = 0
) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, index = draw(n, k, group, bits, symmetric, seed)
    tensors = {
        "weight_packed": torch.tensor(np.array([words_of(row, bits) for row in codes])),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor([n, k]),
    }
    if not symmetric:
        packed = np.array([words_of(c, bits) for c in zeros.T]).T.copy()
        tensors["weight_zero_point"] = torch.tensor(packed)
    return tensors, value(codes, zeros, scales, index)


def compressed_config(bits: int, group: int, symmetric: bool, form: str) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if group == -1 else "group",
        "group_size": None if group == -1 else group,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def state_of(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors under the names that they have in a checkpoint."""
    return {f"{name}.{part}": tensor for part, tensor in tensors.items()}

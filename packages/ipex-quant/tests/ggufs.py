# SPDX-License-Identifier: Apache-2.0
"""GGUF files, written byte by byte, with weights decoded number by number; nothing is shared with the readers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Type -> (id, weights of a block, bytes of a block).
TYPES = {
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2), "Q4_0": (2, 32, 18)},
    **{"Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34)},
    **{"Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210)},
}
#: Where the float16 numbers of a block are.
HALVES = {
    **{"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)},
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)},
}


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value_bytes(value: Any) -> bytes:
    """Return type and value of a metadata entry."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, list):
        inner = [value_bytes(v) for v in value]
        return (
            struct.pack("<I", 9)
            + inner[0][:4]
            + struct.pack("<Q", len(value))
            + b"".join(b[4:] for b in inner)
        )
    return struct.pack("<II", 4, value)


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    metadata: Mapping[str, Any] | None = None,
    version: int = 3,
) -> None:
    """Write a file of tensors: name -> (type, shape with rows first, data)."""
    metadata = metadata or {}
    alignment = metadata.get("general.alignment", 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        head += text(key) + value_bytes(value)
    body = b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape))
        head += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        head += struct.pack("<IQ", TYPES[kind][0], len(body))
        body += data + b"\0" * (-len(data) % alignment)
    path.write_bytes(head + b"\0" * (-len(head) % alignment) + body)


def random_rows(kind: str, n: int, k: int, seed: int = 0) -> bytes:
    """Return random blocks of n rows, with scales of a sensible size."""
    rng = np.random.default_rng(seed)
    _, weights, size = TYPES[kind]
    if weights == 1:
        data = rng.standard_normal((n, k)).astype(np.float32)
        if kind == "BF16":
            return (data.view(np.uint32) >> 16).astype(np.uint16).tobytes()
        return data.astype(np.float16 if kind == "F16" else np.float32).tobytes()
    blocks = rng.integers(0, 256, (n * k // weights, size), dtype=np.uint8)
    for at in HALVES[kind]:
        half = (rng.random(len(blocks)) / 16 + 0.01).astype(np.float16)
        blocks[:, at : at + 2] = half.view(np.uint8).reshape(-1, 2)
    return blocks.tobytes()


def _six(s: bytes, j: int) -> tuple[int, int]:
    """Return scale and minimum j of the 12 bytes of a K block."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | ((s[j - 4] >> 6) << 4), (s[j + 4] >> 4) | ((s[j] >> 6) << 4)


def _block(kind: str, b: bytes) -> list[float]:
    d, m = (struct.unpack_from("<e", b, at)[0] for at in (0, 2))
    y: list[float] = []
    if kind == "Q8_0":
        return [d * q for q in struct.unpack_from("<32b", b, 2)]
    if kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1"):
        start = {"Q4_0": 2, "Q4_1": 4, "Q5_0": 6, "Q5_1": 8}[kind]
        fifth = struct.unpack_from("<I", b, start - 4)[0] if kind[1] == "5" else 0
        for i in range(32):
            byte = b[start + i % 16]
            q = (byte & 15 if i < 16 else byte >> 4) | (((fifth >> i) & 1) << 4)
            y.append(d * q + m if kind[3] == "1" else d * (q - (16 if kind[1] == "5" else 8)))
        return y
    if kind == "Q6_K":
        d = struct.unpack_from("<e", b, 208)[0]
        for i in range(256):
            half, place = divmod(i, 128)
            low = b[half * 64 + place % 64]
            low = low & 15 if place < 64 else low >> 4
            high = (b[128 + half * 32 + place % 32] >> (2 * (place // 32))) & 3
            scale = struct.unpack_from("<b", b, 192 + i // 16)[0]
            y.append(d * scale * ((low | (high << 4)) - 32))
        return y
    codes = 16 if kind == "Q4_K" else 48
    for i in range(256):
        pair, place = divmod(i, 64)
        byte = b[codes + 32 * pair + place % 32]
        q = byte & 15 if place < 32 else byte >> 4
        if kind == "Q5_K":
            q |= ((b[16 + place % 32] >> (i // 32)) & 1) << 4
        scale, minimum = _six(b[4:16], i // 32)
        y.append(d * scale * q - m * minimum)
    return y


def decode(kind: str, n: int, k: int, data: bytes) -> Any:
    """Return the float64 weights ``[n, k]`` of random rows."""
    _, weights, size = TYPES[kind]
    if weights == 1:
        if kind == "BF16":
            wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(n, k).astype(np.float64)
        return (
            np.frombuffer(data, np.float16 if kind == "F16" else np.float32)
            .reshape(n, k)
            .astype(np.float64)
        )
    values: list[float] = []
    for at in range(0, len(data), size):
        values += _block(kind, data[at : at + size])
    return np.array(values).reshape(n, k)

# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the blocks of llama.cpp's formats, and the tensors in a file."""

from __future__ import annotations

import dataclasses
import itertools
import math
import mmap
import os
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_core.packing.quantize import pack_nibbles
from ipex_quant.weight.tensor import QuantizedWeight

#: Unsigned codes ``[R, K]``, scales ``[R, G]``, and what is subtracted: zero points of all, or minima ``[R, G]``.
Parts = tuple[Tensor, Tensor, int | Tensor]

#: Bytes of blocks that are decoded at a time.
_PART = 4 << 20

#: Ids of types that are plain numbers.
FLOATS = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}
#: Other types that exist, for messages.
_OTHERS = {
    **{10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32"},
    **{27: "I64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"},
}


@dataclasses.dataclass(frozen=True, slots=True)
class Block:
    """A block type.

    Attributes:
        name: As llama.cpp calls it.
        weights: Weights of a block.
        size: Bytes of a block.
        group: Weights that share a scale.
        bits: Bits of a code.
        decode: Takes ``[R, B, size]`` bytes of R rows of B blocks.
    """

    name: str
    weights: int
    size: int
    group: int
    bits: int
    decode: Callable[[Tensor], Parts]


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return float16 ``[R, B]`` of the two bytes at a place of each block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _rows(values: Tensor) -> Tensor:
    return values.reshape(values.shape[0], -1)


def _nibbles(data: Tensor) -> Tensor:
    """Return ``[..., 2 n]`` codes: the low nibbles of n bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _bits(data: Tensor) -> Tensor:
    """Return ``[..., 8 n]`` bits, the lowest of the first byte first."""
    return ((data.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(-2)


def _q4_0(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 2:])), _half(b, 0), 8


def _q4_1(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 4:])), _half(b, 0), -_half(b, 2).float()


def _q5_0(b: Tensor) -> Parts:
    return _rows(_nibbles(b[..., 6:]) | (_bits(b[..., 2:6]) << 4)), _half(b, 0), 16


def _q5_1(b: Tensor) -> Parts:
    codes = _nibbles(b[..., 8:]) | (_bits(b[..., 4:8]) << 4)
    return _rows(codes), _half(b, 0), -_half(b, 2).float()


def _q8_0(b: Tensor) -> Parts:
    return _rows(b[..., 2:] ^ 0x80), _half(b, 0), 128


def _scales_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Return scales and minima of the eight groups of a block, ``[R, 8 B]``: 6 bits each in 12 bytes."""
    d, m = _half(b, 0).float().unsqueeze(-1), _half(b, 2).float().unsqueeze(-1)
    low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scales = torch.cat((low & 63, (high & 15) | ((low >> 6) << 4)), dim=-1)
    minima = torch.cat((middle & 63, (high >> 4) | ((middle >> 6) << 4)), dim=-1)
    return _rows(d * scales), _rows(m * minima)


def _q4_k(b: Tensor) -> Parts:
    scales, minima = _scales_k(b)
    # 32 bytes are two groups: their low nibbles one, the high ones the next.
    return _rows(_nibbles(b[..., 16:].unflatten(-1, (4, 32)))), scales, minima


def _q5_k(b: Tensor) -> Parts:
    scales, minima = _scales_k(b)
    codes = _nibbles(b[..., 48:].unflatten(-1, (4, 32)))  # [R, B, 4, 64]
    # Bit g of byte i is the fifth of weight i of group g.
    fifth = (b[..., 16:48].unsqueeze(-2) >> torch.arange(8, dtype=torch.uint8).view(8, 1)) & 1
    return _rows(codes | (fifth.reshape(codes.shape) << 4)), scales, minima


def _q6_k(b: Tensor) -> Parts:
    low = _nibbles(b[..., :128].unflatten(-1, (2, 64)))  # [R, B, 2, 128]
    high = b[..., 128:192].unflatten(-1, (2, 1, 32))
    pairs = (high >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(4, 1)) & 3
    codes = low | (pairs.reshape(low.shape) << 4)
    scales = b[..., 192:208].contiguous().view(torch.int8).float()
    return _rows(codes), _rows(scales * _half(b, 208).float().unsqueeze(-1)), 32


#: Id of a type -> the type.
BLOCKS = {
    2: Block("Q4_0", 32, 18, 32, 4, _q4_0),
    3: Block("Q4_1", 32, 20, 32, 4, _q4_1),
    6: Block("Q5_0", 32, 22, 32, 5, _q5_0),
    7: Block("Q5_1", 32, 24, 32, 5, _q5_1),
    8: Block("Q8_0", 32, 34, 32, 8, _q8_0),
    12: Block("Q4_K", 256, 144, 32, 4, _q4_k),
    13: Block("Q5_K", 256, 176, 32, 5, _q5_k),
    14: Block("Q6_K", 256, 210, 16, 6, _q6_k),
}


def type_name(number: int) -> str:
    """Return what a type is called, for messages."""
    if number in FLOATS:
        return str(FLOATS[number]).removeprefix("torch.")
    return BLOCKS[number].name if number in BLOCKS else _OTHERS.get(number, f"type {number}")


def blocks_weight(
    data: Tensor, number: int, bias: Tensor | None = None, name: str = ""
) -> QuantizedWeight:
    """Read the rows of a weight.

    Args:
        data: uint8 ``[N, bytes of a row]``.
        number: Id of the type, a key of `BLOCKS`.
        bias: ``[N]``, or None.
        name: The module's name, for messages.

    Raises:
        OpArgumentError: The type is not supported, or rows are no whole number of blocks.
    """
    key = f"{name}.gguf_blocks"
    known = ", ".join(block.name for block in BLOCKS.values())
    check(number in BLOCKS, key, "type", f"be one of {known}", type_name(number))
    block = BLOCKS[number]
    fits = data.dtype == torch.uint8 and data.dim() == 2 and data.shape[1] % block.size == 0
    what = f"be uint8 [N, a multiple of {block.size}] for {block.name}"
    check(fits, key, "gguf_blocks", what, f"{data.dtype} {list(data.shape)}")
    step = max(1, _PART // max(1, data.shape[1]))
    pieces = [_decode(part, block) for part in data.split(step)] or [_decode(data, block)]
    codes, scales = (torch.cat([piece[i] for piece in pieces]) for i in (0, 1))  # type: ignore[misc]
    points = [piece[2] for piece in pieces if piece[2] is not None]
    zeros = torch.cat(points) if points else None
    k = data.shape[1] // block.size * block.weights
    form = "int4" if block.bits == 4 else "int8"
    return QuantizedWeight(form, k, codes, scales, zeros, block.group, None, bias, name)


def _decode(data: Tensor, block: Block) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return stored codes, scales and float zero points of some rows."""
    rows = data.shape[0]
    codes, scales, offset = block.decode(data.unflatten(1, (-1, block.size)))
    zeros: Tensor | None = None
    if isinstance(offset, Tensor):
        scales, zeros = _with_zeros(codes, scales, offset, block.group)
        offset = 0
    if block.bits == 4:
        stored = pack_nibbles(codes)
    else:  # 8-bit codes wrap around into their sign
        stored = (codes - offset).view(torch.int8)
    return stored.view(rows, -1), scales.view(rows, -1), zeros


def _with_zeros(codes: Tensor, scales: Tensor, minima: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return scales and zero points for ``scale * code - minimum``; codes of groups that are constant change."""
    scales = scales.float()
    constant = scales == 0
    if bool(
        constant.any()
    ):  # one value, -minimum: code 0 with zero point 1 and the minimum as scale
        codes.unflatten(1, (-1, group)).masked_fill_(constant.unsqueeze(-1), 0)
        scales = torch.where(constant, minima, scales)
    return scales, torch.where(constant, 1.0, minima / torch.where(constant, 1.0, scales))


# --- files ------------------------------------------------------------------------------------------------------------
# A file (version 2 or 3, little-endian) is: ``GGUF``, version, number of tensors and of metadata entries; the entries
# (key, type, value); for each tensor its name, dimensions (of a row first), type and offset; then, aligned, the data.
# Every length in it is checked against the bytes that are left before it is used.


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
#: Codes of `struct` for the types of metadata; 8 is a string, 9 an array.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: Dimensions that a tensor can have, arrays in arrays, and the largest sensible alignment.
_DIMENSIONS, _DEPTH, _ALIGNMENT = 4, 4, 1 << 20
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.gguf$")


@dataclasses.dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a file.

    Attributes:
        name: Its name.
        type: Id of its type.
        shape: As torch has it, rows first.
        start: First byte in the file.
        size: Bytes.
    """

    name: str
    type: int
    shape: tuple[int, ...]
    start: int
    size: int


class _Cursor:
    """Reads forward in a file that may be cut off or nonsense."""

    def __init__(self, op: str, path: Path, data: mmap.mmap) -> None:
        self.op, self.path, self.data, self.at = op, path, data, 0

    def fail(self, got: str) -> OpArgumentError:
        return OpArgumentError(f"{self.op}: {self.path} must be a complete GGUF file, got {got}")

    def take(self, count: int, what: str) -> int:
        """Return where ``count`` bytes begin, and go behind them."""
        start = self.at
        if count > len(self.data) - start:
            raise self.fail(f"{len(self.data)} bytes, which end within {what}")
        self.at += count
        return start

    def number(self, code: str, what: str) -> Any:
        start = self.take(struct.calcsize(f"<{code}"), what)
        return struct.unpack_from(f"<{code}", self.data, start)[0]

    def text(self, what: str) -> str:
        length = self.number("Q", what)
        start = self.take(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def value(self, kind: int, what: str, depth: int = 0) -> Any:
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], what)
        if kind == _STRING:
            return self.text(what)
        if kind != _ARRAY or depth == _DEPTH:
            raise self.fail(f"the unknown type {kind} of {what}")
        inner, count = self.number("I", what), self.number("Q", what)
        if inner in _NUMBERS:
            code = _NUMBERS[inner]
            start = self.take(count * struct.calcsize(f"<{code}"), what)
            return list(struct.unpack_from(f"<{count}{code}", self.data, start))
        if count > len(self.data) - self.at:  # each takes a byte at least
            raise self.fail(f"{count} entries of {what} in {len(self.data)} bytes")
        return [self.value(inner, what, depth + 1) for _ in range(count)]


class GgufFile:
    """A GGUF file.

    Args:
        path: The file.
        op: Who asks, for messages.

    Attributes:
        metadata: Key -> value.
        tensors: Name -> `GgufTensor`.

    Raises:
        OpArgumentError: It is no GGUF file, of another version, cut off, or has a tensor of an unknown type.
    """

    def __init__(self, path: str | os.PathLike[str], op: str = "read_gguf") -> None:
        self.path, self._op = Path(path), op
        check(self.path.is_file(), op, "path", "be a GGUF file", str(path))
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        size = self.path.stat().st_size
        with self.path.open("rb") as file:
            head = file.read(4)
            check(
                head == _MAGIC, op, str(path), "be a GGUF file", f"a file that begins with {head!r}"
            )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(_Cursor(op, self.path, data))
        # Private: writing to a tensor does not change the file.
        self._bytes = torch.from_file(str(self.path), shared=False, size=size, dtype=torch.uint8)

    def _read(self, cursor: _Cursor) -> None:
        cursor.take(4, "the magic number")
        version = cursor.number("I", "the version")
        if version not in _VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS
            raise OpArgumentError(
                f"{self._op}: {self.path} must be a little-endian GGUF file of version 2 or 3, got"
                f" {'a big-endian one' if swapped else f'version {version}'}"
            )
        count, entries = cursor.number("Q", "the header"), cursor.number("Q", "the header")
        for _ in range(entries):
            key = cursor.text("the metadata")
            self.metadata[key] = cursor.value(cursor.number("I", key), key)
        alignment = self.metadata.get("general.alignment", 32)
        sensible = isinstance(alignment, int) and 0 < alignment <= _ALIGNMENT
        check(sensible, self._op, "general.alignment", "be a positive number", alignment)
        found = [self._tensor(cursor) for _ in range(count)]
        start = -(-cursor.at // alignment) * alignment
        total = len(cursor.data)
        for entry in found:
            entry = dataclasses.replace(entry, start=start + entry.start)
            if entry.start + entry.size > total:
                missing = entry.start + entry.size - total
                raise cursor.fail(f"{total} bytes, {missing} fewer than {entry.name} ends at")
            if entry.name in self.tensors:
                raise cursor.fail(f"{entry.name} twice")
            self.tensors[entry.name] = entry
        # A small file must not stand for more tensors than it has bytes for.
        filled = sorted((e for e in self.tensors.values() if e.size), key=lambda e: e.start)
        for one, other in itertools.pairwise(filled):
            if other.start < one.start + one.size:
                raise cursor.fail(f"the same bytes for {one.name} and {other.name}")

    def _tensor(self, cursor: _Cursor) -> GgufTensor:
        name = cursor.text("the table of tensors")
        dimensions = cursor.number("I", name)
        if not 0 < dimensions <= _DIMENSIONS:
            raise cursor.fail(f"{dimensions} dimensions of {name}")
        shape = tuple(reversed([cursor.number("Q", name) for _ in range(dimensions)]))
        # A dimension of 0 makes the others free of charge: they must still be sizes that a file can have.
        if 0 in shape and math.prod(max(1, size) for size in shape) > len(cursor.data):
            raise cursor.fail(f"the shape {list(shape)} of {name}")
        kind, start = cursor.number("I", name), cursor.number("Q", name)
        if kind in FLOATS:
            size = math.prod(shape) * FLOATS[kind].itemsize
        else:
            known = ", ".join(type_name(number) for number in (*FLOATS, *BLOCKS))
            check(
                kind in BLOCKS, self._op, f"type of {name}", f"be one of {known}", type_name(kind)
            )
            block = BLOCKS[kind]
            if shape[-1] % block.weights:
                raise cursor.fail(f"rows of {shape[-1]} weights of {name}, which is {block.name}")
            size = math.prod(shape) // block.weights * block.size
        return GgufTensor(name, kind, shape, start, size)

    def raw(self, name: str) -> Tensor:
        """Return a tensor as mapped bytes, uint8 ``[all rows, bytes of a row]``."""
        entry = self.tensors[name]
        rows = max(1, math.prod(entry.shape[:-1]))
        return self._bytes[entry.start : entry.start + entry.size].view(rows, -1)

    def floats(self, name: str) -> Tensor:
        """Return a tensor as floats: mapped if it is stored so, else dequantized to float32."""
        entry = self.tensors[name]
        data = self.raw(name)
        if entry.type in FLOATS:
            dtype = FLOATS[entry.type]
            if entry.start % dtype.itemsize:  # torch cannot look at such places
                data = data.clone()
            return data.reshape(-1).view(dtype).view(entry.shape)
        return blocks_weight(data, entry.type, None, name).dequantize().view(entry.shape)


def files_of(op: str, path: str | os.PathLike[str]) -> list[GgufFile]:
    """Return a GGUF file, or all parts of one that was split, from any of its parts or the only one of a folder.

    Raises:
        OpArgumentError: There is no file, there are several, a part is missing, or one is damaged.
    """
    place = Path(path)
    if place.is_dir():
        names = sorted(p.name for p in place.glob("*.gguf"))
        stems = {match[1] if (match := _SHARD.match(n)) else n for n in names}
        what = "have one GGUF file, or the parts of one"
        check(len(stems) == 1, op, "pathname", what, ", ".join(names) or "none")
        place = place / names[0]
    match = _SHARD.match(place.name)
    if match is None:
        return [GgufFile(place, op)]
    count = int(match[3])
    parts = [place.with_name(f"{match[1]}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    check(not missing, op, "pathname", f"have all parts of {place}", f"no {', '.join(missing[:3])}")
    return [GgufFile(part, op) for part in parts]


def entries(
    file: GgufFile, name: str, target: str, order: Tensor | None = None, dense: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield what a tensor is in a state dict, under another name: ``TARGET.gguf_blocks`` and ``TARGET.gguf_type``.

    Args:
        file: The file.
        name: Its name there, with ``.weight`` or ``.bias``.
        target: The name in the state dict.
        order: Rows in another order, or None.
        dense: Dequantize it; what is no 2-D weight always is.
    """
    entry = file.tensors[name]
    if entry.type in FLOATS or dense or len(entry.shape) != 2 or not target.endswith(".weight"):
        values = file.floats(name)
        yield target, values if order is None else values[order]
        return
    base = target.removesuffix(".weight")
    data = file.raw(name)
    yield f"{base}.gguf_blocks", data if order is None else data[order]
    yield f"{base}.gguf_type", torch.tensor(entry.type)


def read_gguf(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a GGUF file, with the names of tensors that it has.

    Args:
        path: The file, any part of one that was split, or a folder with one.

    Returns:
        ``(state_dict, quant_config)``, as `read_checkpoint` takes them. Quantized 2-D weights stay mapped bytes:
        uint8 ``NAME.gguf_blocks`` and the id of their type, ``NAME.gguf_type``. Everything else is floats. The
        metadata of the file is ``quant_config["metadata"]``.

    Raises:
        OpArgumentError: It is no GGUF file, of another version, cut off, or has a tensor of an unknown type.
    """
    state: dict[str, Tensor] = {}
    files = files_of("read_gguf", path)
    for file in files:
        for name in file.tensors:
            state.update(entries(file, name, name))
    return state, {"quant_method": "gguf", "metadata": files[0].metadata}

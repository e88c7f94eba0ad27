# SPDX-License-Identifier: Apache-2.0
"""Safetensors files, read and written by rows: neither needs a whole tensor in memory.

A file is a little-endian 64-bit length, a JSON header of that length (name -> dtype, shape, offsets into the data), and
the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import math
import operator
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ipex_core.errors import IpexError

#: Names of element types in the header.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

#: What descriptions that were changed by hand lead to, wherever a number or a name of them is used.
DAMAGE = (
    *(AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError),
    ZeroDivisionError,
)

#: A header is never larger; what is, is no header.
_LARGEST_HEADER = 100 << 20


class CheckpointError(IpexError, ValueError):
    """A model folder is not complete, or a file in it is damaged."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    size: int


def read_config(folder: Path, name: str = "config.json") -> dict[str, Any]:
    """Return a JSON file of a model folder.

    Raises:
        CheckpointError: It is missing or is no JSON object.
    """
    path = folder / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{folder} must be a model folder, got no {name}: {reason}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} must be JSON, got {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} must be a JSON object, got {type(found).__name__}")
    return found


def stored_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a config.json, None if it has none.

    Raises:
        CheckpointError: It is no JSON object.
    """
    found = config.get("quantization_config")
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(
            f"{folder} must have a JSON object as quantization_config, got {type(found).__name__}"
        )
    return found


def is_file_name(name: str) -> bool:
    """Return whether a text is the name of a file in the same folder, and no path to anywhere else."""
    return name not in ("", ".", "..") and "\0" not in name and Path(name).name == name


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model folder.

    Raises:
        CheckpointError: There are none, or one that the index names is missing.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        table = read_config(folder, index.name).get("weight_map")
        if not isinstance(table, dict) or not table:
            raise CheckpointError(f"{index} must have a weight_map, got none")
        names = sorted(set(map(str, table.values())))
        outside = [name for name in names if not is_file_name(name)]
        if outside:
            raise CheckpointError(f"{index} must name files beside it, got {outside[0][:200]!r}")
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        several = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(
            f"{folder} must have {'all shards of its index' if index.exists() else 'safetensors weights'}, got no"
            f" {missing[0]}{several}"
        )
    return [folder / name for name in names]


def read_header(path: Path) -> dict[str, Entry]:
    """Return the tensors of a safetensors file, after a check that all of them are inside it.

    Raises:
        CheckpointError: The file is damaged or incomplete.
    """

    def wrong(what: str) -> CheckpointError:
        return CheckpointError(f"{path} must be a complete safetensors file, got {what}")

    total = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(_LARGEST_HEADER, total - 8):
            raise wrong(f"{total} bytes with no header")
        try:
            header = json.loads(file.read(length))
            rows = [(name, row) for name, row in header.items() if name != "__metadata__"]
            found = {
                name: Entry(
                    path,
                    DTYPES[row["dtype"]],
                    tuple(map(operator.index, row["shape"])),
                    8 + length + operator.index(row["data_offsets"][0]),
                    operator.index(row["data_offsets"][1]) - row["data_offsets"][0],
                )
                for name, row in rows
            }
        except (
            *(ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError),
        ) as error:
            raise wrong(f"a header that cannot be read ({type(error).__name__}: {error})") from None
    for name, entry in found.items():
        if any(not 0 <= size < 1 << 63 for size in entry.shape):
            raise wrong(f"the shape {list(entry.shape)} of {name}")
        if entry.start < 8 + length:
            raise wrong(f"data of {name} in the header")
        if entry.start + entry.size > total:
            raise wrong(f"{total} bytes, {entry.start + entry.size - total} fewer than {name} ends")
        if entry.size != math.prod(entry.shape) * entry.dtype.itemsize or entry.size < 0:
            raise wrong(f"{entry.size} bytes for {name}, {entry.dtype} {list(entry.shape)}")
    # A small file must not stand for more tensors than it has bytes for.
    filled = sorted((entry.start, name) for name, entry in found.items() if entry.size)
    for (start, one), (other_start, other) in itertools.pairwise(filled):
        if other_start < start + found[one].size:
            raise wrong(f"the same bytes for {one} and {other}")
    return found


def check_model_folder(folder: Path) -> dict[str, Any]:
    """Return the config of a model folder, after a check of all its weight files, before anything is loaded.

    Raises:
        CheckpointError: Something is missing or damaged.
    """
    config = read_config(folder)
    for path in weight_files(folder):
        read_header(path)
    return config


def mapped(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file as views of mapped memory: what is not used is not read.

    Raises:
        CheckpointError: The file is damaged or incomplete.
    """
    entries = read_header(path)
    size = path.stat().st_size
    # Private: who writes to a tensor does not write to the file.
    data = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    found = {}
    for name, entry in entries.items():
        part = data[entry.start : entry.start + entry.size]
        if entry.start % entry.dtype.itemsize:  # torch cannot look at such places
            part = part.clone()
        found[name] = part.view(entry.dtype).view(entry.shape)
    return found


def read_bytes(file: BinaryIO, entry: Entry, first: int, count: int) -> bytearray:
    """Return bytes of a tensor.

    Raises:
        CheckpointError: The file ends before.
    """
    data = bytearray(count)
    file.seek(entry.start + first)
    if file.readinto(data) != count:  # type: ignore[attr-defined]
        raise CheckpointError(f"{entry.path} must be a complete safetensors file, got its end")
    return data


def read_rows(file: BinaryIO, entry: Entry, first: int, last: int) -> Tensor:
    """Return the rows ``first`` to ``last`` of a tensor with at least one dimension."""
    shape = (last - first, *entry.shape[1:])
    width = math.prod(entry.shape[1:]) * entry.dtype.itemsize
    data = read_bytes(file, entry, first * width, (last - first) * width)
    if not data:
        return torch.empty(shape, dtype=entry.dtype)
    return torch.frombuffer(data, dtype=entry.dtype).view(shape)


class ShardWriter:
    """A safetensors file that is written tensor after tensor, and goes on where a killed process stopped.

    The header comes first, so dtypes and shapes are given before. The file has the name ``PATH.part`` until it is
    complete.

    Args:
        path: The file.
        tensors: name -> (dtype, shape), in the order in which they are written.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    ) -> None:
        self.path = path
        self._part = path.with_name(path.name + ".part")
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        self._ends: dict[str, int] = {}
        end = 0
        for name, (dtype, shape) in tensors.items():
            size = math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [end, end + size],
            }
            end += size
            self._ends[name] = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = struct.pack("<Q", len(text)) + text
        self._file: BinaryIO | None = None

    @contextlib.contextmanager
    def writing(self) -> Iterator[set[str]]:
        """Open the file for a block, which gets what `open` returns; without an error in the block it is complete."""
        done = self.open()
        complete = False
        try:
            yield done
            complete = True
        finally:
            self.close(complete)

    def open(self) -> set[str]:
        """Open the file and return the tensors that it has already."""
        done: set[str] = set()
        kept = 0
        if self._part.exists():
            with self._part.open("rb") as file:
                same = file.read(len(self._head)) == self._head
            if same:
                written = self._part.stat().st_size - len(self._head)
                done = {name for name, end in self._ends.items() if end <= written}
                kept = max((self._ends[name] for name in done), default=0)
        if not done:
            self._part.write_bytes(self._head)
        self._file = self._part.open("r+b")
        self._file.truncate(len(self._head) + kept)
        self._file.seek(0, os.SEEK_END)
        return done

    def write(self, data: bytes | bytearray | Tensor) -> None:
        """Append data of the next tensor."""
        assert self._file is not None
        if isinstance(data, Tensor):
            data = data.contiguous()
            # Without NumPy, which torch does not need.
            whole = (ctypes.c_char * data.nbytes).from_address(data.data_ptr())
            self._file.write(whole)
        else:
            self._file.write(data)

    def close(self, complete: bool) -> None:
        """Close the file; a complete one gets its name."""
        if self._file is None:
            return
        self._file.flush()
        if complete:
            os.fsync(self._file.fileno())
        self._file.close()
        self._file = None
        if complete:
            self._part.replace(self.path)

    def names(self) -> Iterator[str]:
        """Yield the names of the tensors in order."""
        yield from self._ends

# SPDX-License-Identifier: Apache-2.0
"""Write a file that is embedded in libsycl-jit.so: extract.py LIBRARY PART_OF_ITS_NAME FOLDER."""

from __future__ import annotations

import mmap
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

_ROOT = b"/sycl-jit-toolchain/"


class _Library:
    """The segments and relocations of a shared library, as far as pointers in its data need them."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        (programs,) = struct.unpack_from("<Q", data, 32)
        (sections,) = struct.unpack_from("<Q", data, 40)
        size, count = struct.unpack_from("<HH", data, 54)
        section_size, section_count = struct.unpack_from("<HH", data, 58)
        self.segments = []
        for i in range(count):
            kind, _, offset, address, _, length = struct.unpack_from(
                "<IIQQQQ", data, programs + i * size
            )
            if kind == 1:
                self.segments.append((address, offset, length))
        self.pointers: dict[int, int] = {}
        for i in range(section_count):
            header = struct.unpack_from("<IIQQQQ", data, sections + i * section_size)
            if header[1] != 4:  # relocations with addends
                continue
            for at in range(header[4], header[4] + header[5], 24):
                where, kind, value = struct.unpack_from("<QQq", data, at)
                if kind & 0xFFFFFFFF == 8:  # relative to where the library lies
                    self.pointers[where] = value

    def offset(self, address: int) -> int:
        for start, offset, length in self.segments:
            if start <= address < start + length:
                return int(offset + address - start)
        raise SystemExit(f"no segment has the address {address:#x}")

    def address(self, offset: int) -> int:
        for start, begin, length in self.segments:
            if begin <= offset < begin + length:
                return int(start + offset - begin)
        raise SystemExit(f"no segment has the offset {offset:#x}")

    def word(self, address: int) -> int:
        if address in self.pointers:
            return self.pointers[address]
        return int(struct.unpack_from("<Q", self.data, self.offset(address))[0])


def files(library: _Library, part: str) -> Iterator[tuple[str, bytes]]:
    """Yield the embedded files whose path contains `part`: records of path, its length (in some), data and size."""
    holders: dict[int, list[int]] = {}
    for where, value in library.pointers.items():
        holders.setdefault(value, []).append(where)
    position = library.data.find(_ROOT)
    while position >= 0:
        end = library.data.find(b"\0", position)
        path = library.data[position:end].decode("latin-1")
        for where in holders.get(library.address(position), ()) if part in path else ():
            first = 2 if library.word(where + 8) == len(path) else 1
            data, size = library.word(where + 8 * first), library.word(where + 8 * first + 8)
            begin = library.offset(data)
            yield Path(path).name, library.data[begin : begin + size]
        position = library.data.find(_ROOT, end)


if __name__ == "__main__":
    path, part, folder = sys.argv[1:4]
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        found = list(files(_Library(data), part))
    if not found:
        raise SystemExit(f"{path} has no embedded file {part}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, content in found:
        (Path(folder) / name).write_bytes(content)
        print(name, len(content), "bytes")

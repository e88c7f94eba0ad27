# SPDX-License-Identifier: Apache-2.0
"""Install vLLM's wheel of PyPI for a machine without a GPU: ``python tools/vllm_install.py 0.33.0``.

The wheel asks for a build of torch with CUDA and for kernels of GPUs. On a CPU it needs the shared libraries
that `import torch` loads, and the packages that its Python code imports. Run it with the Python of the environment.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence

from packaging.requirements import Requirement

#: What vLLM requires for GPUs only, by the start of the name. Nothing imports it on a CPU.
GPU_ONLY = (
    *("apache-tvm-ffi", "flashinfer", "humming", "instanttensor", "fastsafetensors", "nvidia-"),
    *("nvtx", "pynvvideocodec", "quack", "tilelang", "tokenspeed", "torchcodec", "torchaudio"),
)
#: Requirements whose bounds the index may not satisfy, and which work in any version.
ANY_VERSION = ("certifi",)
#: Start of the name of a shared library -> the part of CUDA that has it, as torch's metadata names it.
LIBRARIES = {
    "libcublas": "nvidia-cublas",
    "libcudart": "nvidia-cuda-runtime",
    "libcudnn": "nvidia-cudnn",
    "libcufft": "nvidia-cufft",
    "libcufile": "nvidia-cufile",
    "libcupti": "nvidia-cuda-cupti",
    "libcurand": "nvidia-curand",
    "libcusolver": "nvidia-cusolver",
    "libcusparseLt": "nvidia-cusparselt",
    "libcusparse": "nvidia-cusparse",
    "libnccl": "nvidia-nccl",
    "libnvJitLink": "nvidia-nvjitlink",
    "libnvrtc": "nvidia-cuda-nvrtc",
    "libnvshmem": "nvidia-nvshmem",
}


def pip(*arguments: str) -> None:
    """Run pip of this Python."""
    subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=True)


def requirements(package: str, extras: Sequence[str] = ("",)) -> list[Requirement]:
    """Return what an installed package requires on this machine, with its extras."""
    found = map(Requirement, importlib.metadata.requires(package) or ())
    return [
        one
        for one in found
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
    ]


def missing_library() -> str | None:
    """Return the shared library that `import torch` does not find, or None when torch is imported."""
    command = [sys.executable, "-c", "import torch"]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode == 0:
        return None
    found = re.search(r"(lib\w+)\S*: cannot open shared object file", result.stderr)
    if found is None:
        raise SystemExit(f"import torch failed: {result.stderr.strip().splitlines()[-1]}")
    return found[1]


def parts_of_cuda() -> list[Requirement]:
    """Return the requirements of torch that hold shared libraries, from its metadata and from cuda-toolkit's."""
    parts = []
    for one in requirements("torch"):
        if one.name == "cuda-toolkit":
            pip("--no-deps", f"{one.name}{one.specifier}")
            extras = sorted(one.extras)
            parts += requirements("cuda-toolkit", extras)
        elif one.name.startswith("nvidia-"):
            parts.append(one)
    return parts


def install_libraries() -> None:
    """Install the parts of CUDA that `import torch` asks for, one after the other."""
    parts: list[Requirement] | None = None
    while (library := missing_library()) is not None:
        parts = parts_of_cuda() if parts is None else parts
        names = [name for start, name in LIBRARIES.items() if library.startswith(start)]
        chosen = [part for part in parts if names and part.name.startswith(names[0])]
        if not chosen:
            raise SystemExit(f"import torch needs {library}, which no requirement of torch has")
        part = chosen.pop(0)
        parts.remove(part)
        pip("--no-deps", f"{part.name}{part.specifier}")


def forget(package: str, starts: Iterable[str]) -> None:
    """Take requirements out of the metadata of an installed package, so that pip does not install them later."""
    files = importlib.metadata.files(package) or ()
    path = next(one for one in files if one.name == "METADATA").locate()
    pattern = "|".join(re.escape(start) for start in starts)
    text = path.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    kept = re.sub(rf"(?im)^Requires-Dist: (?:{pattern}).*\n", "", text)
    path.write_text(kept, encoding="utf-8")  # type: ignore[attr-defined]


def build(package: str) -> str:
    """Return the local part of a package's version, such as ``cpu``; the builds of PyPI have none."""
    return importlib.metadata.version(package).partition("+")[2]


def install_torch() -> None:
    """Install the torch and the torchvision that vLLM wants, of one build: torchvision loads with no other."""
    wanted = {one.name: one.specifier for one in requirements("vllm")}
    pair = ("torch", "torchvision")
    pip("--no-deps", *(f"{name}{wanted[name]}" for name in pair))
    if build("torch") != build("torchvision"):
        # pip prefers a build with a local version to the one of PyPI, and has found one of torch only.
        for name in pair:
            public = importlib.metadata.version(name).partition("+")[0]
            pip("--no-deps", f"{name}==={public}")


def main() -> None:
    """Install vLLM, its torch, and what the two need on a CPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version", help="version of vLLM")
    version = parser.parse_args().version
    pip("--no-deps", f"vllm=={version}")
    install_torch()
    small = [one for one in requirements("torch") if not one.name.startswith(("nvidia-", "cuda-"))]
    small += requirements("torchvision")
    needed = [one for one in small if one.name not in ("torch", "triton")]
    pip(*(f"{one.name}{one.specifier}" for one in needed))
    install_libraries()
    forget("torch", ("nvidia-", "cuda-", "triton"))
    forget("vllm", (*GPU_ONLY, *ANY_VERSION))
    wanted = []
    for one in requirements("vllm"):
        if not one.name.lower().startswith(("torch", *GPU_ONLY)):
            extras = f"[{','.join(sorted(one.extras))}]" if one.extras else ""
            wanted.append(f"{one.name}{extras}{one.specifier}")
    pip(*wanted, *ANY_VERSION)


if __name__ == "__main__":
    main()

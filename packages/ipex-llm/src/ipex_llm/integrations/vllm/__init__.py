# SPDX-License-Identifier: Apache-2.0
"""The plug-in of vLLM: a platform for machines without a GPU, with the kernels of ipex in vLLM's CPU backend.

vLLM's wheel of PyPI has kernels for GPUs only. With this plug-in the same wheel serves on a CPU. vLLM calls two entry
points of it:

===========  ==========================  ==================================================================
`platform`   ``vllm.platform_plugins``   names the platform, or None where vLLM keeps its own
`register`   ``vllm.general_plugins``    in each process: puts ops, layers and linear kernels in their places
===========  ==========================  ==================================================================

``VLLM_PLUGINS`` chooses plug-ins as vLLM defines it: unset, all that are installed; else those that it names.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import re
from collections.abc import Callable, Iterable

__all__ = ["VERSIONS", "named", "platform", "register"]

_log = logging.getLogger("ipex")

#: Minor versions of vLLM whose interfaces the plug-in knows.
VERSIONS = ("0.32", "0.33")

#: Path of the platform class.
PLATFORM = "ipex_llm.integrations.vllm.cpu_platform.IpexPlatform"


def named() -> bool:
    """Return whether ``VLLM_PLUGINS`` names this plug-in."""
    return "ipex" in [name.strip() for name in os.environ.get("VLLM_PLUGINS", "").split(",")]


def version_problem(version: str) -> str:
    """Return why a version of vLLM is not supported, or an empty string.

    Args:
        version: As the package says it, such as ``"0.33.0"``.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is not None and found[0] in VERSIONS:
        return ""
    known = " or ".join(f"{minor}.x" for minor in VERSIONS)
    return (
        f"vllm must be {known}, got {version}: install one of these, or another release of ipex-llm"
    )


def torch_problem(wanted: Iterable[str], found: str) -> str:
    """Return how torch differs from the one version that vLLM wants, or an empty string.

    Args:
        wanted: The requirements of vLLM, such as ``"torch==2.14.0"``.
        found: The version of torch that is there, such as ``"2.13.0+cpu"``.
    """
    for line in wanted:
        exact = re.match(r"torch *== *([\d.]+)", line)
        if exact is not None and exact[1] != found.partition("+")[0]:
            return f"torch must be {exact[1]}, got {found}: pip install torch=={exact[1]}"
    return ""


def gpu() -> str:
    """Return the kind of GPU that torch can use, or an empty string."""
    import torch

    # By the library of the driver: a count by CUDA itself would keep it from working in forked processes.
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        if torch.cuda.is_available():
            return "cuda"
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    xpu = getattr(torch, "xpu", None)
    # A module of ipex-xpu-kernels answers for a device that vLLM does not know.
    own = getattr(xpu, "__name__", "").startswith("ipex")
    return "xpu" if xpu is not None and not own and xpu.is_available() else ""


@functools.cache
def platform() -> str | None:
    """Name the platform class of this plug-in, or return None to leave the choice to vLLM.

    None where a GPU is usable, where vLLM was built for the CPU (its own kernels are there), and where the version of
    vLLM or its interfaces are not known; the log says which of these in one line.
    """
    if kind := gpu():
        if named():
            _log.warning(
                "vLLM plug-in: not used: a GPU (%s) is there, and vLLM takes it; hide it from torch to serve with the"
                " CPU (CUDA_VISIBLE_DEVICES=-1)",
                kind,
            )
        return None
    version = importlib.metadata.version("vllm")
    if "cpu" in version:
        return None
    if problem := version_problem(version):
        _log.warning("vLLM plug-in: not used: %s", problem)
        return None
    wanted = importlib.metadata.requires("vllm") or ()
    if problem := torch_problem(wanted, importlib.metadata.version("torch")):
        # vLLM's Python often runs with another one, so it is not refused.
        _log.warning("vLLM plug-in: vllm %s: %s", version, problem)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        # Ray sets it where it gives no GPU. Empty, it makes vLLM expect one later and take Triton for usable.
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    try:
        importlib.import_module(PLATFORM.rpartition(".")[0])
    except (ImportError, AttributeError) as error:
        _log.warning("vLLM plug-in: not used: vllm %s: %s", version, error)
        return None
    return PLATFORM


def _hooks() -> dict[str, Callable[[], tuple[str, ...]]]:
    """Return name -> function that puts something in its place in vLLM and returns what it has put there."""
    from ipex_llm.integrations.vllm import experts, layers, linear, quantized_experts

    return {
        "custom ops": layers.register_custom_ops,
        "implementations": layers.register_implementations,
        "linear": linear.replace_unquantized,
        "quantized linear": linear.register_quantized,
        "experts": experts.register_experts,
        "routing": experts.register_routing,
        "quantized experts": quantized_experts.register_quantized_experts,
    }


def register() -> tuple[str, ...]:
    """Put what ipex offers into the places that this vLLM has; calling it again does nothing.

    On `platform`'s platform all of it. On vLLM's own CPU platform only layers, and only if ``VLLM_PLUGINS`` names this
    plug-in: that it is installed is no wish to have other numerics there.

    Returns:
        What vLLM runs with ipex now. What this vLLM does not have, or what another plug-in has taken, is left alone,
        and the log says so.
    """
    import ipex_core  # noqa: F401  (registers the ops)

    try:
        current = importlib.import_module("vllm.platforms").current_platform
    except ImportError as error:
        _log.warning("vLLM plug-in: nothing is registered: %s", error)
        return ()
    ours = type(current).__name__ == PLATFORM.rpartition(".")[2]
    if not ours and not (named() and current.is_cpu()):
        if named():
            _log.info("vLLM plug-in: nothing is registered: the platform is not the CPU")
        return ()
    done: list[str] = []
    for name, hook in _hooks().items():
        if not ours and name not in ("custom ops", "implementations"):
            continue
        try:
            done += hook()
        except (ImportError, AttributeError, KeyError) as error:
            _log.warning(
                "vLLM plug-in: %s: left to vLLM, which lacks a place for it: %s", name, error
            )
    return tuple(done)

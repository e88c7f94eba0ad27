# SPDX-License-Identifier: Apache-2.0
"""The file that ``ipex doctor --report`` writes: what somebody needs who shall find out what goes wrong elsewhere."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ipex_core.diagnostics.doctor import Report


#: Variables that change how the work runs. Others are not reported.
_PREFIXES = (
    *("IPEX_", "OMP_", "KMP_", "GOMP_", "MKL_", "DNNL_", "ONEDNN_", "ATEN_", "TORCH", "PYTORCH_"),
    *("MALLOC_", "TCMALLOC_", "JEMALLOC_", "SYCL_", "ZE_", "UR_", "CCL_", "NUMEXPR_", "OPENBLAS_"),
)
_NAMES = {
    *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"),
    *("VLLM_PLUGINS", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
}
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
#: What keys and tokens of well-known services look like.
_TOKEN = re.compile(
    r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|pypi-)[\w-]{8,}|(?i:\bbearer +\S+)"
)
_HOME = re.compile(r"(?<=/)(home|Users)/[^/\s:;,\"']+")
_SECRET_QUERY = re.compile(r"(?i)([?&][\w-]*(?:token|key|secret|pass|auth|sig)[\w-]*=)[^&\s;,]+")

#: Distributions that matter; all whose name begins like this.
_PACKAGES = (
    *("ipex", "intel", "torch", "pytorch", "triton", "numpy", "transformers", "tokenizers", "mkl"),
    *("safetensors", "accelerate", "peft", "diffusers", "sentence", "optimum", "vllm", "deepspeed"),
    *("onnx", "openvino", "nncf", "zentorch", "llama-cpp", "gguf", "auto-round", "gptqmodel"),
    *("compressed-tensors", "bitsandbytes", "neural-compressor", "lightning", "oneccl", "dpcpp"),
)


def versions() -> dict[str, str]:
    """Return name -> version of the installed distributions that matter, without importing one."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith(_PACKAGES):
            found[name] = distribution.version
    return dict(sorted(found.items()))


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that change how the work runs, without secrets and without the home folder.

    Args:
        environ: All variables.
    """
    found = {}
    for name, value in sorted(environ.items()):
        if name in _NAMES or name.startswith(_PREFIXES):
            found[name] = "(hidden)" if _SECRET.search(name) else private(value, environ)
    return found


def private(text: str, environ: Mapping[str, str]) -> str:
    """Return a text without logins, tokens, home folders, and the name of the user in paths."""
    text = _SECRET_QUERY.sub(r"\1(hidden)", _LOGIN.sub("(hidden)@", text))
    text = _TOKEN.sub("(hidden)", text)
    home = environ.get("HOME") or environ.get("USERPROFILE") or ""
    if len(home) > 1:
        text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
    text = _HOME.sub(r"\1/(user)", text)
    user = environ.get("USER") or environ.get("LOGNAME") or environ.get("USERNAME") or ""
    if len(user) > 2 and user != "root":
        # As a whole part of a path, or at its end: torchinductor_NAME.
        text = re.sub(rf"(/|/[\w.-]*[_-]){re.escape(user)}(?=[/\s:;,\"']|$)", r"\1(user)", text)
    return text


def report_text(report: Report | None, problem: str = "") -> str:
    """Return the file as Markdown.

    Args:
        report: What `ipex_core.diagnostics.doctor.doctor` found; None if it could not run.
        problem: Why not.
    """
    if report is None:
        lines, facts = [f"problem: {problem}"], None
    else:
        lines = [f"{title:<26}{text}" for title, text in report.rows()]
        lines += [f"problem: {one}" for one in report.problems]
        lines += [f"advice: {one}" for one in report.advice]
        facts = report.to_dict()
    parts = [
        "# ipex doctor --report",
        f"{time.strftime('%Y-%m-%d %H:%M:%S %z')}, Python {platform.python_version()}"
        f" ({platform.python_implementation()}), {platform.platform()}",
        "Please attach this file to your report, with the command or script that goes wrong and its whole output.",
        _section("Doctor", "\n".join(lines)),
        _section("Packages", "\n".join(f"{n:<40}{v}" for n, v in versions().items())),
        _section(
            "Environment variables",
            "\n".join(f"{name}={value}" for name, value in environment(os.environ).items()),
        ),
        _section("Interpreter", f"{sys.executable}\n{sys.version}"),
        _section("CPU", _cpu()),
    ]
    if facts is not None:
        parts.append(_section("torch", _torch()))
        parts.append(_section("As JSON", json.dumps(facts, indent=1)))
    return private("\n\n".join(parts) + "\n", os.environ)


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n```text\n{text or '(none)'}\n```"


def _torch() -> str:
    """Return how torch was built, and the threads and libraries that it uses."""
    import torch

    return f"{torch.__config__.show().strip()}\n\n{torch.__config__.parallel_info().strip()}"


def _cpu() -> str:
    """Return the first CPU as the kernel describes it, and the CPUs that this process may use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        text = platform.processor()
    if hasattr(os, "sched_getaffinity"):
        text += f"\nusable: {sorted(os.sched_getaffinity(0))}"
    return text.strip()

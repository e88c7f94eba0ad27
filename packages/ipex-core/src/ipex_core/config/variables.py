# SPDX-License-Identifier: Apache-2.0
"""The table of configuration variables. `ipex_core.config` is its public face."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Mapping
from typing import Any

from ipex_core.config.isa_levels import ISA_LEVELS
from ipex_core.errors import ConfigError


class FP32MathMode(enum.IntEnum):
    """How float32 matrix products, convolutions and recurrent layers may round their inputs.

    ``FP32`` keeps float32, ``TF32`` allows 10 mantissa bits (XPU only), ``BF32`` allows bfloat16 inputs with float32
    accumulation.
    """

    FP32 = 0
    TF32 = 1
    BF32 = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table.

    Attributes:
        name: The environment variable.
        attribute: Name of the value in Python: ``config.<attribute>``, ``config.get``, ``config.override``.
        type: Type of the value, for the documentation.
        parse: Turns a string or a Python value into the value; raises ValueError.
        default: The value when the variable is unset or empty.
        allowed: The allowed values, in words; part of the error message.
        meaning: What the value does.
        old_names: Other variables that are accepted with the same meaning when `name` is unset.
        foreign: The variable belongs to PyTorch: a value we do not know is warned about and ignored, as PyTorch does.
    """

    name: str
    attribute: str
    type: str
    parse: Callable[[object], Any]
    default: Any
    allowed: str
    meaning: str
    old_names: tuple[str, ...] = ()
    foreign: bool = False

    def check(self, value: object, shown_name: str | None = None) -> Any:
        """Return the parsed value or raise `ConfigError` naming variable, value and allowed values."""
        try:
            return self.parse(value)
        except (ValueError, TypeError):
            raise ConfigError(
                f"{shown_name or self.name}={value!s} is not allowed; allowed values: {self.allowed}"
            ) from None


_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"0", "false", "off", "no"})


def _parse_bool(value: object) -> bool:
    text = str(value).strip().lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(text)


def _parse_verbosity(value: object) -> int:
    text = str(int(value)) if isinstance(value, bool) else str(value).strip()
    if text not in ("0", "1", "2"):
        raise ValueError(text)
    return int(text)


def _parse_count(value: object) -> int:
    text = str(value).strip()
    if not re.fullmatch(r"[0-9]{1,6}", text):
        raise ValueError(text)
    return int(text)


def _parse_math_mode(value: object) -> FP32MathMode:
    if isinstance(value, str):
        if value not in FP32MathMode.__members__:
            raise ValueError(value)
        return FP32MathMode[value]
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(value)
    return FP32MathMode(value)


def _is_level(level: str) -> bool:
    if level in ISA_LEVELS:
        return True
    # A newer kernel package may have a level this core has never heard of: its module file is the proof. Looked up
    # only for names outside the list, so the usual start-up reads no directory.
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("ipex_cpu_kernels") if level.isidentifier() else None
    roots = [Path(p) for p in (spec.submodule_search_locations or [])] if spec else []
    return any(next(root.rglob(f"libipex_cpu_{level}.*"), None) is not None for root in roots)


def _parse_level(value: object) -> str:
    level = str(value).strip().lower()
    if level and not _is_level(level):
        raise ValueError(level)
    return level


def _parse_xpu_device(value: object) -> str:
    text = str(value).strip().lower()
    if not re.fullmatch(r"|gpu|auto|cpu(:([1-9]|1[0-6]))?", text):
        raise ValueError(text)
    return text


def _parse_word(*words: str) -> Callable[[object], str]:
    def parse(value: object) -> str:
        text = str(value).strip().lower()
        if text not in words:
            raise ValueError(text)
        return text

    return parse


_LEVELS = ", ".join(ISA_LEVELS)

#: All variables, by attribute. To add one, add a row: documentation, `settings`, ``ipex doctor`` and ``ipex
#: show-config`` follow.
VARIABLES: Mapping[str, Variable] = {
    row.attribute: row
    for row in (
        Variable(
            "IPEX_CPU_ISA",
            "cpu_isa",
            "str",
            _parse_level,
            "",
            f"{_LEVELS}, or empty",
            "Forces the instruction-set level of the CPU kernels. A level that this CPU, the operating system or the "
            "installed kernels lack is an error. Empty: the best eligible level.",
        ),
        Variable(
            "ATEN_CPU_CAPABILITY",
            "cpu_isa_cap",
            "str",
            _parse_level,
            "",
            f"{_LEVELS}, or empty",
            "PyTorch's own variable, read here as an upper limit: the best eligible level not above it is used, and a "
            "limit above what the CPU has changes nothing. Ignored for our kernels when IPEX_CPU_ISA is set. PyTorch "
            "itself knows only default, avx2 and avx512 on x86 and warns about the others.",
            foreign=True,
        ),
        Variable(
            "IPEX_STRICT",
            "strict",
            "bool",
            _parse_bool,
            False,
            "0, 1 (also false/true, off/on, no/yes)",
            "Turns every silent fallback (an op without a kernel, a broken kernel package) into an exception.",
        ),
        Variable(
            "IPEX_VERBOSE",
            "verbosity",
            "int",
            _parse_verbosity,
            0,
            "0, 1, 2",
            "Log output of the ipex packages: 0 warnings only, 1 decisions (logging.INFO), 2 details (logging.DEBUG).",
        ),
        Variable(
            "IPEX_FP32_MATH_MODE",
            "fp32_math_mode",
            "FP32MathMode",
            _parse_math_mode,
            FP32MathMode.FP32,
            "FP32, TF32, BF32",
            "Start value of set_fp32_math_mode for the CPU. BF32 lets oneDNN round float32 inputs of matrix products, "
            "convolutions and recurrent layers to bfloat16 where the CPU gains from it (AMX). TF32 acts on XPU only.",
        ),
        Variable(
            "IPEX_NUM_THREADS",
            "num_threads",
            "int",
            _parse_count,
            0,
            "an integer >= 0",
            "Upper limit of the threads of one op. PyTorch's intra-op pool, which our kernels share, is reduced to it; "
            "it is never enlarged. 0: PyTorch's own number, or the CPU quota of the control group if that is smaller.",
        ),
        Variable(
            "IPEX_HUGE_PAGES",
            "huge_pages",
            "bool",
            _parse_bool,
            True,
            "0, 1 (also false/true, off/on, no/yes)",
            "Asks the operating system for transparent huge pages under packed weights and large embedding tables.",
        ),
        Variable(
            "IPEX_SHARED_MEMORY",
            "shared_memory",
            "bool",
            _parse_bool,
            True,
            "0, 1 (also false/true, off/on, no/yes)",
            "Sums over the processes of one host go through memory that they share; 0: through the backend of "
            "torch.distributed.",
        ),
        Variable(
            "IPEX_CHANGE_TORCH",
            "change_torch",
            "bool",
            _parse_bool,
            True,
            "0, 1 (also false/true, off/on, no/yes)",
            "`import intel_extension_for_pytorch` changes a few functions of torch, as IPEX did at import "
            "(ipex.compat.torch_changes); 0: it does not. `import ipex` never does.",
        ),
        # The xpu device reads these when torch is imported, before there is any configuration.
        Variable(
            "IPEX_XPU_DEVICE",
            "xpu_device",
            "str",
            _parse_xpu_device,
            "",
            "gpu, cpu, cpu:N with N from 1 to 16, auto, or empty",
            "Which devices ipex-xpu-kernels registers as xpu, when torch is imported: GPUs (gpu or empty), the CPU (in "
            "N parts), or GPUs and else the CPU (auto).",
        ),
        Variable(
            "IPEX_XPU_FALLBACK",
            "xpu_fallback",
            "str",
            _parse_word("silent", "warn", "error"),
            "silent",
            "silent, warn, error",
            "What happens at start to ops without a kernel for xpu: they run on the host, do so with one warning each, "
            "or raise. In Python: ipex.xpu.set_fallback_mode.",
        ),
        Variable(
            "IPEX_XPU_KERNELS",
            "xpu_kernels",
            "str",
            _parse_word("auto", "always"),
            "auto",
            "auto, always",
            "Whether kernels for xpu that were measured slower than the op of the host are used where the host can "
            "read the memory of the device: not (auto), or always. In Python: ipex.xpu.set_kernel_mode.",
        ),
        Variable(
            "IPEX_XPU_ONEDNN",
            "xpu_onednn",
            "str",
            str,
            "",
            "auto, 0, the path of a libdnnl.so.3, or empty",
            "Whether products of matrices and convolutions on xpu may use oneDNN for SYCL: where it is installed and "
            "faster (auto or empty), a library of one's own, or not (0). In Python: ipex.xpu.set_compute_eng.",
        ),
        Variable(
            "IPEX_XPU_ZERO_COPY",
            "xpu_zero_copy",
            "bool",
            _parse_bool,
            True,
            "0, 1 (also false/true, off/on, no/yes)",
            "Ops without a kernel for xpu use the memory of the device where the host can read it; 0: copies.",
        ),
        Variable(
            "IPEX_XPU_COLLECTIVES",
            "xpu_collectives",
            "str",
            _parse_word("auto", "host", "direct"),
            "auto",
            "auto, host, direct",
            "How torch.distributed moves tensors of xpu between processes of one host: from device to device where the "
            "device allows it and they are large (auto), by the host (host), or directly where possible (direct).",
        ),
        Variable(
            "IPEX_XPU_SOURCE",
            "xpu_source",
            "bool",
            _parse_bool,
            False,
            "0, 1 (also false/true, off/on, no/yes)",
            "1: kernels for xpu are compiled from their source on every device; 0: only on devices whose driver takes "
            "no SPIR-V. Needs the C++ headers of the system, which come with g++.",
        ),
        Variable(
            "IPEX_XPU_CACHE",
            "xpu_cache",
            "str",
            str,
            "",
            "a folder, 0, or empty",
            "Where binaries of SYCL kernels are kept; 0: nowhere; empty: ipex/xpu in the user's cache folder.",
        ),
    )
}

# SPDX-License-Identifier: Apache-2.0
"""Which names ``ipex.xpu`` has beyond ``torch.xpu``, and where they are; torch.xpu gets those it lacks."""

from __future__ import annotations

import importlib
from typing import Any

_SETTINGS = "ipex_xpu_kernels._settings"
_RUNTIME = "ipex_xpu_kernels._runtime_api"
_AMP = "ipex_xpu_kernels.amp"
_INLINE = "ipex_xpu_kernels._inline"

#: Public name -> module that has it.
NAMES: dict[str, str] = {
    **dict.fromkeys(
        [
            "FP32MathMode",
            "get_fp32_math_mode",
            "set_fp32_math_mode",
            "fp32_math_mode",
            "XPUComputeEng",
            "get_compute_eng",
            "set_compute_eng",
            "compute_eng",
            "OnednnVerbLevel",
            "set_onednn_verbose",
            "onednn_verbose",
            "OnemklVerbLevel",
            "set_onemkl_verbose",
            "onemkl_verbose",
            "using_onednn_layout",
            "enable_onednn_layout",
            "disable_onednn_layout",
            "onednn_layout",
            "is_onednn_layout",
            "enable_onednn_deterministic",
            "disable_onednn_deterministic",
            "has_onemkl",
            "has_fp64_dtype",
            "has_2d_block_array",
            "has_xmx",
            "has_xetla",
            "get_compiler_version",
            "has_multi_context",
            "has_channels_last_1d",
            "has_jit_quantization_save",
        ],
        _SETTINGS,
    ),
    **dict.fromkeys(
        [
            "get_device_type",
            "getDeviceIdListForCard",
            "fork_rng",
            "Generator",
            "memory_summary",
            "ByteStorage",
            "DoubleStorage",
            "FloatStorage",
            "HalfStorage",
            "LongStorage",
            "IntStorage",
            "ShortStorage",
            "CharStorage",
            "BoolStorage",
            "BFloat16Storage",
            "ComplexFloatStorage",
            "ComplexDoubleStorage",
        ],
        _RUNTIME,
    ),
    **dict.fromkeys(
        [
            "autocast",
            "get_autocast_xpu_dtype",
            "is_autocast_xpu_enabled",
            "set_autocast_xpu_dtype",
            "set_autocast_xpu_enabled",
        ],
        _AMP,
    ),
    **dict.fromkeys(("load_inline", "SyclOp", "SyclLibrary", "SyclCompileError"), _INLINE),
    "SyclKernel": "ipex_xpu_kernels._kernel",
    "KernelTimes": "ipex_xpu_kernels._times",
    "kernel_times": "ipex_xpu_kernels._times",
    "optimize": "ipex_core",
}
SUBMODULES = ("amp", "cpp_extension", "overrides")

_LOGGING = "ipex.set_logging_level and IPEX_XPU_FALLBACK=warn"
_TILES = "ZE_FLAT_DEVICE_HIERARCHY (GPUs) or IPEX_XPU_DEVICE=cpu:N"
_SYNC = "torch.xpu.synchronize() after what you want to time or debug"
_TRACE = "ipex.xpu.kernel_times, torch.profiler, or SYCL_UR_TRACE=2"
_USM = "torch.from_dlpack and Tensor.__dlpack__"
#: Names that IPEX dropped itself or that have no meaning here -> what to use instead.
INSTEAD: dict[str, str] = {
    **dict.fromkeys(("using_sync_mode", "enable_sync_mode", "disable_sync_mode"), _SYNC),
    **dict.fromkeys(
        ("using_tile_as_device", "enable_tile_as_device", "disable_tile_as_device"), _TILES
    ),
    **dict.fromkeys(("using_simple_trace", "enable_simple_trace", "disable_simple_trace"), _TRACE),
    **dict.fromkeys(("get_verbose_level", "set_verbose_level"), "onednn_verbose"),
    **dict.fromkeys(("from_usm", "to_usm"), _USM),
    **dict.fromkeys(
        (
            f"{verb}_log_{what}"
            for verb in ("set", "get")
            for what in (
                "level",
                "output_file_path",
                "rotate_file_size",
                "split_file_size",
                "component",
            )
        ),
        _LOGGING,
    ),
}


def resolve(name: str) -> Any:
    """Return what a name of `NAMES`, `SUBMODULES` or `INSTEAD` stands for.

    Raises:
        AttributeError: It is not one of them.
    """
    if name in NAMES:
        return getattr(importlib.import_module(NAMES[name]), name)
    if name in SUBMODULES:
        return importlib.import_module(f"ipex_xpu_kernels.{name}")
    if name in INSTEAD:
        return _missing(name, INSTEAD[name])
    raise AttributeError(name)


def _missing(name: str, instead: str) -> Any:
    def function(*arguments: object, **keywords: object) -> None:
        raise NotImplementedError(f"ipex.xpu.{name} is not offered; use {instead}")

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Raise NotImplementedError: use {instead}."
    return function


def attach() -> None:
    """Let ``torch.xpu`` have the names that it lacks, when they are first asked for, and import its submodules."""
    import torch

    from ipex_core.util.import_hooks import second_names

    xpu: Any = torch.xpu

    def find(name: str) -> Any:
        try:
            found = resolve(name)
        except AttributeError:
            raise AttributeError(f"module 'torch.xpu' has no attribute {name!r}") from None
        if name not in SUBMODULES:
            setattr(xpu, name, found)
        return found

    if "__getattr__" not in vars(xpu):
        xpu.__getattr__ = find
    second_names({f"torch.xpu.{name}": f"ipex_xpu_kernels.{name}" for name in SUBMODULES})

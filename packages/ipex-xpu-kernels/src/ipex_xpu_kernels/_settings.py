# SPDX-License-Identifier: Apache-2.0
"""Settings of IPEX's ``ipex.xpu``: precision of float32, compute engines, verbosity, layouts and what there is."""

from __future__ import annotations

import enum
import importlib.metadata
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ipex_core.config import FP32MathMode


class XPUComputeEng(enum.IntEnum):
    """Where kernels come from, for ops that have several."""

    RECOMMEND = 0
    BASIC = 1
    ONEDNN = 2
    ONEMKL = 3
    XETLA = 4


class OnednnVerbLevel(enum.IntEnum):
    """How much oneDNN prints: nothing, each execution, or creations, too."""

    OFF = 0
    ON = 1
    ON_DETAIL = 2


class OnemklVerbLevel(enum.IntEnum):
    """How much oneMKL prints; ``ON_SYNC`` is ``ON`` here, since its calls run on the host and are synchronous."""

    OFF = 0
    ON = 1
    ON_SYNC = 2


_fp32_mode = FP32MathMode.FP32
_engine = XPUComputeEng.RECOMMEND


def _member(function: str, kind: Any, value: object) -> Any:
    """Return the member of an enum by itself, its number or that as a text."""
    try:
        return kind(int(value))  # type: ignore[call-overload]
    except (TypeError, ValueError):
        names = ", ".join(f"{m.name} {m.value}" for m in kind)
        raise RuntimeError(
            f"{function}: the argument must be one of {names}, got {value!r}"
        ) from None


class _Setting:
    """Set something for a block of code; also usable without one, as IPEX has it."""

    _old: Any = None

    def __init__(self, new: Any, read: Callable[[], Any], write: Callable[[Any], None]) -> None:
        self._new, self._read, self._write = new, read, write

    def __enter__(self) -> Any:
        self._old = self._read()
        self._write(self._new)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write(self._old)


def get_fp32_math_mode() -> FP32MathMode:
    """Return how float32 products may round their inputs; see `set_fp32_math_mode`."""
    return _fp32_mode


def set_fp32_math_mode(mode: FP32MathMode | int | str) -> None:
    """Allow float32 products to round their inputs.

    It is a permission. The kernels of this device keep float32; in a torch that has XPU itself, TF32 is passed to its
    oneDNN.

    Args:
        mode: ``FP32MathMode.FP32``, ``TF32`` or ``BF32``, or its number.

    Raises:
        RuntimeError: Another mode.
    """
    global _fp32_mode
    _fp32_mode = _member("set_fp32_math_mode", FP32MathMode, mode)
    from ipex_xpu_kernels._device import state

    if state().mode == "native":
        torch.backends.mkldnn.set_flags(_allow_tf32=_fp32_mode == FP32MathMode.TF32)  # type: ignore[no-untyped-call]


class fp32_math_mode(_Setting):
    """`set_fp32_math_mode` for a block of code."""

    def __init__(self, mode: FP32MathMode | int | str) -> None:
        new = _member("fp32_math_mode", FP32MathMode, mode)
        super().__init__(new, get_fp32_math_mode, set_fp32_math_mode)


def get_compute_eng() -> XPUComputeEng:
    """Return the engine that was chosen by `set_compute_eng`."""
    return _engine


def set_compute_eng(eng: XPUComputeEng | int | str) -> None:
    """Choose where products of matrices and convolutions come from; all other ops have one kernel here.

    Args:
        eng: ``RECOMMEND`` uses oneDNN (extra ``onednn``) where it was measured not to be slower than the kernels of
            this package and the host, ``ONEDNN`` wherever it has an implementation, ``BASIC`` never. Where oneDNN is
            not installed, or turned off by ``IPEX_XPU_ONEDNN=0``, the three mean the same.

    Raises:
        NotImplementedError: ``ONEMKL`` or ``XETLA``, which are not part of this package.
        RuntimeError: Not an engine.
    """
    global _engine
    engine = _member("set_compute_eng", XPUComputeEng, eng)
    if engine in (XPUComputeEng.ONEMKL, XPUComputeEng.XETLA):
        raise NotImplementedError(
            f"set_compute_eng: there are no kernels of {engine.name} here: use RECOMMEND"
        )
    _engine = engine
    from ipex_xpu_kernels import _device, _onednn

    if _device.state().mode == "own":
        modes = {XPUComputeEng.BASIC: "off", XPUComputeEng.ONEDNN: "prefer"}
        mode = modes.get(engine, "auto") if _onednn.find()[0] else "off"
        _device.native().set_onednn_mode(mode)


class compute_eng(_Setting):
    """`set_compute_eng` for a block of code."""

    def __init__(self, eng: XPUComputeEng | int | str) -> None:
        new = _member("compute_eng", XPUComputeEng, eng)
        super().__init__(new, get_compute_eng, set_compute_eng)


_onednn_level = OnednnVerbLevel.OFF
_onemkl_level = OnemklVerbLevel.OFF


def set_onednn_verbose(level: OnednnVerbLevel | int) -> None:
    """Let torch's oneDNN print what it runs: ops without a kernel of the device, which run on the host.

    Raises:
        RuntimeError: Not a level, or torch was built without oneDNN.
    """
    global _onednn_level
    _onednn_level = _member("set_onednn_verbose", OnednnVerbLevel, level)
    if not torch._C._verbose.mkldnn_set_verbose(int(_onednn_level)):
        raise RuntimeError(
            "set_onednn_verbose: torch must be built with oneDNN, got torch.backends.mkldnn.is_available() ="
            f" {torch.backends.mkldnn.is_available()}"
        )


class onednn_verbose(_Setting):
    """`set_onednn_verbose` for a block of code."""

    def __init__(self, level: OnednnVerbLevel | int = OnednnVerbLevel.ON) -> None:
        new = _member("onednn_verbose", OnednnVerbLevel, level)
        super().__init__(new, lambda: _onednn_level, set_onednn_verbose)


def set_onemkl_verbose(level: OnemklVerbLevel | int) -> None:
    """Let torch's MKL print what it runs: ops without a kernel of the device, which run on the host.

    Raises:
        RuntimeError: Not a level, or torch was built without MKL.
    """
    global _onemkl_level
    _onemkl_level = _member("set_onemkl_verbose", OnemklVerbLevel, level)
    if not torch._C._verbose.mkl_set_verbose(int(_onemkl_level != OnemklVerbLevel.OFF)):
        raise RuntimeError(
            "set_onemkl_verbose: torch must be built with MKL, got torch.backends.mkl.is_available() ="
            f" {torch.backends.mkl.is_available()}"
        )


class onemkl_verbose(_Setting):
    """`set_onemkl_verbose` for a block of code."""

    def __init__(self, level: OnemklVerbLevel | int = OnemklVerbLevel.ON) -> None:
        new = _member("onemkl_verbose", OnemklVerbLevel, level)
        super().__init__(new, lambda: _onemkl_level, set_onemkl_verbose)


def using_onednn_layout() -> bool:
    """Return False: tensors of this device never have a blocked layout."""
    return False


def is_onednn_layout(tensor: torch.Tensor) -> bool:
    """Return False: tensors of this device never have a blocked layout.

    Raises:
        TypeError: Not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"is_onednn_layout: tensor must be a Tensor, got {type(tensor).__name__}")
    return False


def enable_onednn_layout() -> None:
    """Raise NotImplementedError: there are no blocked layouts here; channels-last is the fast layout of images."""
    raise NotImplementedError(
        "enable_onednn_layout: tensors must be contiguous or channels-last, got a request for blocked layouts:"
        " use model.to(memory_format=torch.channels_last)"
    )


def disable_onednn_layout() -> None:
    """Do nothing: it is never enabled."""


class onednn_layout:
    """Raises NotImplementedError when entered; see `enable_onednn_layout`."""

    def __enter__(self) -> None:
        enable_onednn_layout()

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def enable_onednn_deterministic() -> None:
    """Let oneDNN give the same bits in each run."""
    torch.backends.mkldnn.deterministic = True  # type: ignore[assignment]


def disable_onednn_deterministic() -> None:
    """Take `enable_onednn_deterministic` back."""
    torch.backends.mkldnn.deterministic = False  # type: ignore[assignment]


def _property(device: int, name: str) -> bool:
    if torch.xpu.device_count() == 0:
        return False
    if device == -1:
        device = torch.xpu.current_device()
    return bool(getattr(torch.xpu.get_device_properties(device), name, False))


def has_fp64_dtype(device: int = -1) -> bool:
    """Return whether a device has float64 numbers; -1 is the current one."""
    return _property(device, "has_fp64")


def has_2d_block_array(device: int = 0) -> bool:
    """Return whether a device loads blocks of two dimensions."""
    return _property(device, "has_subgroup_2d_block_io")


def has_xmx(device: int = 0) -> bool:
    """Return whether a device has matrix engines."""
    return _property(device, "has_subgroup_matrix_multiply_accumulate")


def has_onemkl() -> bool:
    """Return False: this package has no kernels of oneMKL."""
    return False


def has_xetla() -> bool:
    """Return False: this package has no kernels of XeTLA."""
    return False


def has_multi_context() -> bool:
    """Return False: the devices of a platform share its context."""
    return False


def has_channels_last_1d() -> bool:
    """Return False: torch has no such memory format."""
    return False


def has_jit_quantization_save() -> bool:
    """Return False: TorchScript modules have no quantized state of this device."""
    return False


def get_compiler_version() -> str:
    """Return the version of the SYCL run-time, whose compiler makes the kernels; empty if it is not installed."""
    try:
        return importlib.metadata.version("intel-sycl-rt")
    except importlib.metadata.PackageNotFoundError:
        return ""

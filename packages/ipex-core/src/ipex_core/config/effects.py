# SPDX-License-Identifier: Apache-2.0
"""Configuration values that act on PyTorch or on `logging`: float32 math mode, threads, verbosity.

PyTorch is imported only when a value differs from its default or a function is called.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from ipex_core.config import values
from ipex_core.config.variables import VARIABLES, FP32MathMode
from ipex_core.errors import ConfigError, MissingComponentError

#: Levels of `verbose`, with the names and values of IPEX and of ``torch.backends.mkldnn``.
VERBOSE_OFF = 0
VERBOSE_ON = 1
VERBOSE_ON_CREATION = 2


#: All loggers of the ipex packages are children of this one.
LOGGER = logging.getLogger("ipex")

#: Device -> function that returns the module that has its modes; `ipex_core.kernels.providers` enters them.
device_modules: dict[str, Callable[[], Any]] = {}

_lock = threading.RLock()


def apply(changed: Mapping[str, Any]) -> None:
    """Make changed configuration values effective."""
    if "verbosity" in changed:
        _apply_verbosity(changed["verbosity"])
    if "num_threads" in changed:
        _apply_num_threads(changed["num_threads"])
    if "fp32_math_mode" in changed:
        _apply_math_mode(changed["fp32_math_mode"])


# --- float32 math mode ------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Precision:
    """PyTorch's float32 precision switches before we touched them; ``legacy`` is None if they were mixed already."""

    legacy: str | None
    cuda_matmul: str
    ops: tuple[str, str, str]


_saved: _Precision | None = None


def _ops() -> tuple[Any, Any, Any]:
    from torch.backends import mkldnn

    backend: Any = mkldnn
    return backend.matmul, backend.conv, backend.rnn


def _own_value(op: Any) -> str:
    # The getter answers with the inherited value where the op has none of its own. Dropping the own value shows the
    # difference, so that restoring does not turn an inherited value into an explicit one.
    value: str = op.fp32_precision
    op.fp32_precision = "none"
    inherited = op.fp32_precision
    op.fp32_precision = value
    if inherited != value:
        return value
    op.fp32_precision = "none"
    return "none"


def _snapshot() -> _Precision:
    import torch

    legacy: str | None
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:
        legacy = None
    matmul, conv, rnn = _ops()
    cuda: Any = torch.backends.cuda.matmul
    return _Precision(
        legacy, _own_value(cuda), (_own_value(matmul), _own_value(conv), _own_value(rnn))
    )


def _write(legacy: str | None, cuda_matmul: str, ops: tuple[str, str, str]) -> None:
    import torch

    if legacy is not None:
        # The older switch is moved along because torch.get_float32_matmul_precision() raises when the two disagree. It
        # also writes the CUDA switch, which must not change: put back.
        torch.set_float32_matmul_precision(legacy)
        cuda: Any = torch.backends.cuda.matmul
        cuda.fp32_precision = cuda_matmul
    for op, value in zip(_ops(), ops, strict=True):
        op.fp32_precision = value


def _apply_math_mode(mode: FP32MathMode) -> None:
    global _saved
    with _lock:
        if mode.name == "BF32":
            if _saved is None:
                _saved = _snapshot()
            now = _saved
            _write("medium" if now.legacy else None, now.cuda_matmul, ("bf16", "bf16", "bf16"))
        elif mode.name == "FP32" and _saved is not None:
            _write(_saved.legacy, _saved.cuda_matmul, _saved.ops)
            _saved = None
        elif mode.name == "FP32" and any(
            op.fp32_precision not in ("none", "ieee") for op in _ops()
        ):
            # Reduced by somebody else through PyTorch itself; the caller asks for float32 now.
            now = _snapshot()
            _write("highest" if now.legacy else None, now.cuda_matmul, ("ieee", "ieee", "ieee"))
        elif mode.name == "TF32":
            warnings.warn(
                "set_fp32_math_mode: TF32 is not available on the CPU; the mode is unchanged (allowed: FP32, BF32)",
                UserWarning,
                stacklevel=5,
            )


def _check_device(function: str, device: str) -> None:
    if device not in ("cpu", "xpu"):
        raise ConfigError(f"{function}: device must be 'cpu' or 'xpu', got {device!r}")


def _xpu(function: str) -> Any:
    """Return the module of the device xpu."""
    try:
        return device_modules["xpu"]()
    except MissingComponentError:
        raise MissingComponentError(
            f"{function}: device 'xpu' needs the package ipex-xpu-kernels: pip install 'ipex[xpu]'"
        ) from None


def set_fp32_math_mode(mode: FP32MathMode | int | str = 0, device: str = "cpu") -> None:
    """Choose how float32 matrix products, convolutions and recurrent layers are computed.

    ``BF32`` sets PyTorch's ``torch.backends.mkldnn.{matmul,conv,rnn}.fp32_precision`` to ``"bf16"`` and keeps
    ``torch.get_float32_matmul_precision()`` consistent (``"medium"``); going back to ``FP32`` restores what was there
    before. oneDNN uses bfloat16 only where it is faster: on CPUs with AMX. ``TF32`` warns and changes nothing on CPU.

    Args:
        mode: An `FP32MathMode`, its number or its name.
        device: ``"cpu"``, or ``"xpu"`` for what `ipex.xpu` does with it.

    Raises:
        ConfigError: The mode or the device is unknown.
        MissingComponentError: The device needs a package that is not installed.

    Example:
        >>> import ipex_core.config as config
        >>> config.set_fp32_math_mode(config.FP32MathMode.BF32)
        >>> config.get_fp32_math_mode().name
        'BF32'
        >>> config.set_fp32_math_mode(config.FP32MathMode.FP32)
    """
    _check_device("set_fp32_math_mode", device)
    parsed = VARIABLES["fp32_math_mode"].check(mode, "mode")
    if device == "xpu":
        _xpu("set_fp32_math_mode").set_fp32_math_mode(parsed)
        return
    with _lock:
        if parsed is FP32MathMode.TF32:
            _apply_math_mode(parsed)
            return
        unchanged = values.get("fp32_math_mode") is parsed
        values.set_value("fp32_math_mode", parsed)
        if unchanged:
            # PyTorch's own switches may have been moved since: the call is a demand, not a hint.
            _apply_math_mode(parsed)


def get_fp32_math_mode(device: str = "cpu") -> FP32MathMode:
    """Return the mode in effect, read from PyTorch's switch for matrix products.

    Args:
        device: ``"cpu"`` or ``"xpu"``.

    Raises:
        ConfigError: The device is unknown.
        MissingComponentError: The device needs a package that is not installed.

    Example:
        >>> import ipex_core.config as config
        >>> config.get_fp32_math_mode().name
        'FP32'
    """
    _check_device("get_fp32_math_mode", device)
    if device == "xpu":
        return FP32MathMode(_xpu("get_fp32_math_mode").get_fp32_math_mode())
    precision = _ops()[0].fp32_precision
    return {"bf16": FP32MathMode.BF32, "tf32": FP32MathMode.TF32}.get(precision, FP32MathMode.FP32)


# --- threads ----------------------------------------------------------------------------------------------------------

_threads_before: int | None = None


def _apply_num_threads(limit: int) -> None:
    global _threads_before
    import torch

    with _lock:
        if _threads_before is None:
            _threads_before = torch.get_num_threads()
        torch.set_num_threads(min(limit, _threads_before) if limit else _threads_before)
        if not limit:
            _threads_before = None


# --- verbosity --------------------------------------------------------------------------------------------------------

_handler: logging.Handler | None = None
_level_before: int | None = None


def _apply_verbosity(verbosity: int) -> None:
    global _handler, _level_before
    with _lock:
        if verbosity == 0:
            if _level_before is not None:
                LOGGER.setLevel(_level_before)
                _level_before = None
            if _handler is not None:
                LOGGER.removeHandler(_handler)
                _handler = None
            return
        if _level_before is None:
            _level_before = LOGGER.level
        LOGGER.setLevel(logging.INFO if verbosity == 1 else logging.DEBUG)
        if not LOGGER.hasHandlers():
            # Without any handler Python prints warnings only; the root logger stays the user's.
            _handler = logging.StreamHandler()
            _handler.setFormatter(
                logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s")
            )
            LOGGER.addHandler(_handler)


def set_logging_level(level: int | str = logging.WARNING) -> None:
    """Set the level of the logger ``"ipex"``, of which all loggers of the ipex packages are children.

    Args:
        level: A number or a name of `logging`, such as ``logging.INFO`` or ``"INFO"``.

    Raises:
        ConfigError: The name is not a level.

    Example:
        >>> import ipex_core.config as config
        >>> config.set_logging_level("WARNING")
    """
    try:
        LOGGER.setLevel(level)
    except (ValueError, TypeError):
        raise ConfigError(
            f"level must be a number or one of DEBUG, INFO, WARNING, ERROR, CRITICAL, got {level!r}"
        ) from None


_verbose_stack: list[int] = []


class verbose:
    """Context manager that makes oneDNN print one line per primitive it runs.

    Args:
        level: ``VERBOSE_OFF``, ``VERBOSE_ON`` (execution) or ``VERBOSE_ON_CREATION`` (also creation).

    Raises:
        ConfigError: The level is not one of the three.
        RuntimeError: PyTorch was built without oneDNN, or oneDNN refuses.

    Nested blocks restore the level of the outer one. ``VERBOSE_OFF`` changes nothing.
    """

    VERBOSE_OFF = 0
    VERBOSE_ON = 1
    VERBOSE_ON_CREATION = 2

    def __init__(self, level: int) -> None:
        if level not in (0, 1, 2):
            raise ConfigError(f"verbose: level must be 0, 1 or 2, got {level!r}")
        self.level = int(level)

    def __enter__(self) -> verbose:
        if self.level:
            _set_onednn_verbose(self.level)
            _verbose_stack.append(self.level)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.level:
            _verbose_stack.pop()
            _set_onednn_verbose(_verbose_stack[-1] if _verbose_stack else 0)


def _set_onednn_verbose(level: int) -> None:
    import torch

    backends: Any = torch.backends
    native: Any = torch._C
    if not backends.mkldnn.is_available():
        raise RuntimeError(
            f"verbose: level must be 0 where PyTorch was built without oneDNN, got {level}"
        )
    if not native._verbose.mkldnn_set_verbose(level):
        raise RuntimeError(f"verbose: level must be one that oneDNN supports, got {level}")


values.on_change(apply)

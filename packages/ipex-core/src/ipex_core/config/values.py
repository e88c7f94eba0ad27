# SPDX-License-Identifier: Apache-2.0
"""Values of the configuration: read from the environment once, changed by `set_value` and `override`."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ipex_core.config.variables import VARIABLES, Variable
from ipex_core.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The state of one variable: its value and where the value comes from.

    ``source`` is ``"default"``, ``"environment"`` (or ``"environment: <old name>"``), ``"set"``, ``"override"`` or
    ``"error"``; with the last one ``value`` is the text that could not be read and ``error`` the message.
    """

    variable: Variable
    value: Any
    source: str
    error: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class IsaRequest:
    """Which instruction-set level the user wants for the CPU kernels.

    ``kind`` is ``"auto"`` (best eligible level), ``"force"`` (exactly `level`; impossible is an error) or ``"cap"``
    (best eligible level that is not above `level`). ``source`` is the variable that decided, or "".
    """

    kind: str
    level: str
    source: str


#: Variables of Intel Extension for PyTorch that have no meaning here: told as such instead of as a typing error, with
#: what to use instead.
_RETIRED = {
    **dict.fromkeys(
        (
            "IPEX_WOQ_SMALL_BATCH_THRESHOLD",
            "IPEX_WOQ_WEIGHT_CACHE_BATCH_THRESHOLD",
            "IPEX_WOQ_GEMM_LOOP_SCHEME",
            "IPEX_KCB_BLOCK_SIZE",
            "IPEX_GPU_EXTRA_BUILD_OPTION",
        ),
        "",
    ),
    **dict.fromkeys(
        (
            "IPEX_LOG_LEVEL",
            "IPEX_LOG_COMPONENT",
            "IPEX_LOG_OUTPUT",
            "IPEX_LOG_ROTATE_SIZE",
            "IPEX_LOG_SPLIT_SIZE",
        ),
        "ipex.set_logging_level",
    ),
    "IPEX_SHOW_OPTION": "ipex doctor",
    "IPEX_XPU_ONEDNN_LAYOUT": "torch.channels_last",
    "IPEX_XPU_BACKEND": "IPEX_XPU_DEVICE",
    "IPEX_XPU_SYNC_MODE": "torch.xpu.synchronize()",
    "IPEX_COMPUTE_ENG": "ipex.xpu.set_compute_eng, or IPEX_XPU_ONEDNN",
    "IPEX_TILE_AS_DEVICE": "ZE_FLAT_DEVICE_HIERARCHY",
    "IPEX_SIMPLE_TRACE": "ipex.xpu.kernel_times, torch.profiler, or SYCL_UR_TRACE=2",
}
#: Set by container images, for CMake, and by our own build and tests; never read by the packages.
_IGNORED = re.compile(r"IPEX_(VERSION$|INSTALL_PREFIX$|BUILD_|TEST_|BENCH_|DEMO_)")

_lock = threading.RLock()
_current: dict[str, Setting] = {}
_effects: list[Callable[[Mapping[str, Any]], None]] = []


def on_change(apply: Callable[[Mapping[str, Any]], None]) -> None:
    """Call ``apply`` with the values that changed, whenever some do: attribute -> new value."""
    _effects.append(apply)


def _read(environ: Mapping[str, str]) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for variable in VARIABLES.values():
        setting = Setting(variable, variable.default, "default")
        for name in (variable.name, *variable.old_names):
            text = environ.get(name, "")
            if not text.strip():
                continue
            source = "environment" if name == variable.name else f"environment: {name}"
            try:
                setting = Setting(variable, variable.check(text, name), source)
            except ConfigError as error:
                if variable.foreign:
                    warnings.warn(f"{error}; it is ignored", RuntimeWarning, stacklevel=4)
                else:
                    setting = Setting(variable, text, "error", str(error))
            break
        found[variable.attribute] = setting
    return found


def _unknown_names(environ: Mapping[str, str]) -> list[str]:
    known = [n for v in VARIABLES.values() for n in (v.name, *v.old_names)]
    lines = []
    for name in sorted(environ):
        if not name.startswith("IPEX_") or name in known or _IGNORED.match(name):
            continue
        close = difflib.get_close_matches(name, known, n=2, cutoff=0.75)
        if close:
            lines.append(f"{name} (did you mean {' or '.join(close)}?)")
        elif name in _RETIRED:
            instead = _RETIRED[name]
            lines.append(
                f"{name} (a variable of Intel Extension for PyTorch that has no effect here"
                + (f": use {instead})" if instead else ")")
            )
        else:
            lines.append(name)
    return lines


def reload(environ: Mapping[str, str] | None = None, *, tolerant: bool = False) -> None:
    """Read all values again from ``environ`` (default: ``os.environ``), dropping what was set in between.

    Args:
        environ: The variables to read.
        tolerant: Keep the errors for `environment_errors` instead of raising the first one.

    Raises:
        ConfigError: A value is not allowed and ``tolerant`` is False. The old values stay.
    """
    environ = os.environ if environ is None else environ
    unknown = _unknown_names(environ)
    if unknown:
        warnings.warn(
            f"unknown environment variables: {'; '.join(unknown)}", RuntimeWarning, stacklevel=3
        )
    found = _read(environ)
    errors = [s.error for s in found.values() if s.error]
    if errors and not tolerant:
        raise ConfigError("\n".join(errors))
    _install(found)


def environment_errors() -> tuple[str, ...]:
    """Return the messages of all bad values; empty unless the process runs in the tolerant mode."""
    return tuple(s.error for s in _current.values() if s.error)


def settings() -> tuple[Setting, ...]:
    """Return the state of every variable in the order of the table."""
    return tuple(_current[name] for name in VARIABLES)


def _attribute(name: str) -> str:
    if name in VARIABLES:
        return name
    for variable in VARIABLES.values():
        if name == variable.name or name in variable.old_names:
            return variable.attribute
    close = difflib.get_close_matches(name, VARIABLES, n=2)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise ConfigError(f"unknown configuration value {name!r}{hint} (known: {', '.join(VARIABLES)})")


def get(name: str) -> Any:
    """Return the value of a variable.

    Args:
        name: Attribute (``"strict"``) or variable (``"IPEX_STRICT"``).

    Raises:
        ConfigError: The name is unknown, or the value in the environment is not allowed (tolerant mode only).
    """
    setting = _current.get(name) or _current[_attribute(name)]
    if setting.error:
        raise ConfigError(setting.error)
    return setting.value


def _install(values: Mapping[str, Setting]) -> None:
    global _current
    with _lock:
        before = _current
        _current = {**before, **values}
        changed = {
            name: setting.value
            for name, setting in values.items()
            if not setting.error
            and setting.value != (before[name].value if name in before else VARIABLES[name].default)
        }
        if changed:
            for apply in _effects:
                apply(changed)


def _checked(values: Mapping[str, object], source: str) -> dict[str, Setting]:
    found = {}
    for name, value in values.items():
        variable = VARIABLES[_attribute(name)]
        found[variable.attribute] = Setting(variable, variable.check(value), source)
    return found


def set_value(name: str, value: object) -> None:
    """Set a value for the rest of the process; strings are parsed like the environment variable.

    Raises:
        ConfigError: The name is unknown or the value is not allowed.
    """
    _install(_checked({name: value}, "set"))


@contextlib.contextmanager
def override(**values: object) -> Iterator[None]:
    """Change values within a ``with`` block and restore them exactly; process-wide, not per thread.

    Raises:
        ConfigError: A name is unknown or a value is not allowed; nothing is changed then.
    """
    new = _checked(values, "override")
    with _lock:
        old = {name: _current[name] for name in new}
        _install(new)
    try:
        yield
    finally:
        _install(old)


def isa_request() -> IsaRequest:
    """Return which level the CPU kernels shall use: ``IPEX_CPU_ISA`` first, then ``ATEN_CPU_CAPABILITY`` as a limit."""
    level = get("cpu_isa")
    if level:
        return IsaRequest("force", level, "IPEX_CPU_ISA")
    cap = get("cpu_isa_cap")
    if cap:
        return IsaRequest("cap", cap, "ATEN_CPU_CAPABILITY")
    return IsaRequest("auto", "", "")


def start() -> None:
    """Read the environment for the first time."""
    # An interpreter option and not an environment variable: child processes must not inherit the tolerance.
    reload(tolerant="ipex-tolerant" in sys._xoptions)

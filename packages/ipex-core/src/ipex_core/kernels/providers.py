# SPDX-License-Identifier: Apache-2.0
"""Discovery of kernel packages and components through entry points.

Groups:
    ``ipex.kernels``: ``<name> = "<module>:register"``, where ``register(api: int) -> ProviderInfo`` loads the native
        library. Loaded at the first call of an op.
    ``ipex.components``: packages that add a part to the facade (quant, llm, runtime). Loaded when named.

Not installed is a normal state: ops then run their reference. Installed but broken is told once as a warning and is an
error under ``IPEX_STRICT=1``. A demand that cannot be met (`IsaError`, `ConfigError`) is always an error.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ipex_core.config import effects
from ipex_core.errors import (
    BrokenComponentError,
    ConfigError,
    FallbackError,
    IsaError,
    KernelApiError,
    MissingComponentError,
    UnknownComponentError,
)
from ipex_core.kernels import machine

#: Version of the contract between this core and native kernel packages: op schemas and `ProviderInfo`. It is raised
#: when kernels built against the old contract would fail or compute something else with the new one.
KERNEL_API = 1

KERNEL_GROUP = "ipex.kernels"
COMPONENT_GROUP = "ipex.components"

State = Literal["active", "missing", "broken"]


@dataclasses.dataclass(frozen=True, slots=True)
class KnownComponent:
    """A package of this project that may or may not be installed."""

    distribution: str
    extra: str
    module: str


#: Kernel packages by the name of their entry point.
KNOWN_PROVIDERS: Mapping[str, KnownComponent] = {
    "cpu": KnownComponent("ipex-cpu-kernels", "cpu", "ipex_cpu_kernels"),
    "xpu": KnownComponent("ipex-xpu-kernels", "xpu", "ipex_xpu_kernels"),
}

#: Components by the name under which the facade shows them (``ipex.llm``).
KNOWN_COMPONENTS: Mapping[str, KnownComponent] = {
    "quantization": KnownComponent("ipex-quant", "quant", "ipex_quant"),
    "llm": KnownComponent("ipex-llm", "llm", "ipex_llm"),
    "runtime": KnownComponent("ipex-runtime", "runtime", "ipex_runtime"),
    "xpu": KnownComponent("ipex-xpu-kernels", "xpu", "ipex_xpu_kernels"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class KernelInfo:
    """One native kernel: its symbol, the ISA level it runs at and the levels it exists for."""

    symbol: str
    current: str
    available: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderInfo:
    """What a kernel package tells about itself when it is loaded.

    Attributes:
        name: Name of the entry point, for instance ``"cpu"``.
        version: Version of the package.
        device: Device type whose dispatch key it implements.
        kernel_api: The contract version it was built for.
        isa: The level that was chosen when the package was loaded.
        isa_available: Levels this machine can run, lowest first.
        isa_built: Levels in the package, lowest first.
        ops: Names of the ops it implements.
        kernels: Returns the kernels behind one op; a function, because the active level can be changed by tests.
        stock_when: Conditions, per op, under which the stock op is used because it is faster.
        why_unavailable: Tells why a level cannot be used on this machine; "" if it can or if nothing is known.
        current_isa: Returns the active level, which tests and benchmarks can change; None if it cannot change.
        define: Registers an op of another library than ipex with torch, by the names of library and op, as plug-ins of
            other projects ask for; False if the package does not have it.
    """

    name: str
    version: str
    device: str
    kernel_api: int
    isa: str
    isa_available: tuple[str, ...]
    isa_built: tuple[str, ...]
    ops: tuple[str, ...]
    kernels: Callable[[str], tuple[KernelInfo, ...]]
    stock_when: Mapping[str, str] = dataclasses.field(default_factory=dict)
    why_unavailable: Callable[[str], str] = lambda level: ""
    current_isa: Callable[[], str] | None = None
    define: Callable[[str, str], bool] = lambda library, name: False

    def level(self) -> str:
        """Return the active level."""
        return self.isa if self.current_isa is None else self.current_isa()


@dataclasses.dataclass(frozen=True, slots=True)
class ProviderStatus:
    """State of one kernel package: active, missing (known, not installed) or broken (with its cause)."""

    name: str
    state: State
    distribution: str
    info: ProviderInfo | None = None
    cause: BaseException | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class ComponentStatus:
    """State of one component package; ``state`` is ``"active"`` if its entry point is found."""

    name: str
    state: State
    distribution: str
    version: str | None = None


_lock = threading.RLock()
_providers: tuple[ProviderStatus, ...] | None = None


@functools.cache
def _entry_points(group: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    # The scan reads the metadata of every installed distribution; it is done once and only on demand.
    return tuple(importlib.metadata.entry_points(group=group))


def providers_loaded() -> bool:
    """Return whether `load_providers` has run; cheap, it is asked at each reference call."""
    return _providers is not None


def load_providers() -> tuple[ProviderStatus, ...]:
    """Load all installed kernel packages once and return the state of each known or installed one.

    Raises:
        IsaError: ``IPEX_CPU_ISA`` names a level that is unknown or that this CPU lacks.
        ConfigError: Another demand of the configuration cannot be met.
        BrokenComponentError: A package is broken and ``IPEX_STRICT=1``.
    """
    global _providers
    if _providers is not None:
        return _providers
    with _lock:
        if _providers is None:
            found = {ep.name: ep for ep in _entry_points(KERNEL_GROUP)}
            names = [*KNOWN_PROVIDERS, *(name for name in found if name not in KNOWN_PROVIDERS)]
            _providers = tuple(_load_provider(name, found.get(name)) for name in names)
            machine.fit_threads()
    return _providers


def _load_provider(name: str, entry: importlib.metadata.EntryPoint | None) -> ProviderStatus:
    known = KNOWN_PROVIDERS.get(name)
    if entry is None:
        return ProviderStatus(name, "missing", known.distribution if known else name)
    distribution = entry.dist.name if entry.dist else (known.distribution if known else name)
    try:
        info = entry.load()(KERNEL_API)
        _check_info(info)
    except (IsaError, ConfigError):
        raise
    except Exception as cause:
        message = (
            f"the kernel package {distribution} is installed but cannot be loaded: {cause};"
            " install the version of this ipex-core, or uninstall it"
        )
        if _strict():
            raise BrokenComponentError(message) from cause
        warnings.warn(f"{message}; its ops run their slow reference", RuntimeWarning, stacklevel=2)
        return ProviderStatus(name, "broken", distribution, cause=cause)
    return ProviderStatus(name, "active", distribution, info=info)


def _check_info(info: Any) -> None:
    """Raise if what a package returned is not what it promises."""
    if not isinstance(info, ProviderInfo):
        raise TypeError(f"its register must return a ProviderInfo, got {type(info).__name__}")
    if info.kernel_api != KERNEL_API:
        raise KernelApiError(
            f"its kernel interface must have version {KERNEL_API}, as this ipex-core, got {info.kernel_api}"
        )


def provider_for(device: str) -> ProviderInfo | None:
    """Return the loaded provider of a device type, or None."""
    for status in load_providers():
        if status.info is not None and status.info.device == device:
            return status.info
    return None


def cpu_level() -> str | None:
    """Return the ISA level at which the CPU kernels run now, or None if there are none."""
    provider = provider_for("cpu")
    return None if provider is None else provider.level()


def note_reference_call(op: str, args: tuple[Any, ...]) -> None:
    """Called when an op runs its reference; raises `FallbackError` under ``IPEX_STRICT=1``."""
    if not _strict():
        return
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
    known = KNOWN_PROVIDERS.get(device)
    hint = f": pip install 'ipex[{known.extra}]'" if known else ""
    raise FallbackError(
        f"{op}: no kernel for device {device} is loaded and IPEX_STRICT=1 forbids the reference{hint}"
    )


def _strict() -> bool:
    from ipex_core import config

    return bool(config.get("strict"))


def xpu_wheel(torch_version: str, version: str = "*") -> str:
    """Return the file name of the wheel of ipex-xpu-kernels for a torch and this Python, as a pattern.

    Args:
        torch_version: Of the installed torch; its first two numbers count.
        version: Of ipex-xpu-kernels, if it is known.
    """
    release = ".".join(torch_version.split("+", maxsplit=1)[0].split(".")[:2])
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"ipex_xpu_kernels-{version}+torch{release}-{python}-{python}{sys.abiflags}-*.whl"


def components() -> tuple[ComponentStatus, ...]:
    """Return the state of each known or installed component without importing any."""
    found = {ep.name: ep for ep in _entry_points(COMPONENT_GROUP)}
    rows = []
    for name in [*KNOWN_COMPONENTS, *(name for name in found if name not in KNOWN_COMPONENTS)]:
        known = KNOWN_COMPONENTS.get(name)
        entry = found.get(name)
        if entry is None:
            assert known is not None
            rows.append(ComponentStatus(name, "missing", known.distribution))
        else:
            dist = entry.dist
            rows.append(
                ComponentStatus(
                    name, "active", dist.name if dist else name, dist.version if dist else None
                )
            )
    return tuple(rows)


def load_component(name: str) -> Any:
    """Import and return the component ``name``.

    Raises:
        UnknownComponentError: No component has this name.
        MissingComponentError: It is known but not installed.
        BrokenComponentError: It is installed but its import fails; the cause is attached.
    """
    entry = next((ep for ep in _entry_points(COMPONENT_GROUP) if ep.name == name), None)
    if entry is None:
        known = KNOWN_COMPONENTS.get(name)
        if known is None:
            raise UnknownComponentError(
                f"ipex has no component {name!r}; known components: {', '.join(KNOWN_COMPONENTS)}"
            )
        raise MissingComponentError(
            f"ipex.{name} needs the package {known.distribution}: pip install 'ipex[{known.extra}]'"
        )
    try:
        return entry.load()
    except Exception as cause:
        distribution = entry.dist.name if entry.dist else name
        raise BrokenComponentError(
            f"ipex.{name}: the package {distribution} is installed but cannot be imported: {cause}"
        ) from cause


effects.device_modules["xpu"] = lambda: load_component("xpu")

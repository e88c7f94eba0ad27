# SPDX-License-Identifier: Apache-2.0
"""CPU kernels of ipex, one native module per ISA level.

The package is found through the entry point group ``ipex.kernels``; it need not be imported. Importing it loads no
native code: `register` does, when the core calls it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

try:
    from ipex_core import config
except ModuleNotFoundError as error:
    if error.name != "ipex_core":
        raise
    raise ModuleNotFoundError(
        "ipex-cpu-kernels needs ipex-core, which is not installed: pip install ipex-core",
        name="ipex_core",
    ) from None
from ipex_core.errors import IsaError, KernelApiError
from ipex_core.kernels.providers import KernelInfo, ProviderInfo
from ipex_cpu_kernels._version import __version__

__all__ = ["KERNEL_API", "__version__", "cmake_prefix_path", "isa", "register"]

#: Contract version of these kernels; must equal the version of the core.
KERNEL_API = 1

#: Op -> when the stock op is faster, in words, measured; ``ipex.op_info`` shows it. The choice itself is made where a
#: model is changed, by ``ipex.optimize`` and the compile backend of core: an op that is called by name runs its kernel.
_STOCK_WHEN = {
    "attention": (
        "in models: fewer than 128 query rows in float32, fewer than 8 in bfloat16 and float16; with grouped heads,"
        " fewer than 4 query rows for each head of the key"
    ),
    "linear": (
        "in models: weights of fewer than 131072 elements in float32, of fewer than 6144 in bfloat16 and float16"
    ),
}


def _cmake_prefix_path() -> str:
    # The sources have a build folder in the place of lib.
    places = [Path(place, *inside) for place in __path__ for inside in ((), ("lib",))]
    found = (place / "share" / "cmake" for place in places)
    return str(next((path for path in found if path.is_dir()), places[0] / "share" / "cmake"))


#: For CMAKE_PREFIX_PATH of C++ programs, so that find_package(IPEX) finds the kernels.
cmake_prefix_path = _cmake_prefix_path()


def register(api: int) -> ProviderInfo:
    """Load the native library and register its kernels with torch; called once by the core.

    Args:
        api: ``KERNEL_API`` of the core.

    Raises:
        KernelApiError: Core and kernels were built for different contracts.
        IsaError: The level in ``IPEX_CPU_ISA`` is not in this build or cannot be used on this machine.
        ImportError: A native library is missing or damaged.
        OSError: The native library cannot be loaded.
    """
    if api != KERNEL_API:
        raise KernelApiError(
            f"ipex-cpu-kernels {__version__} needs an ipex-core of KERNEL_API {KERNEL_API}, got {api}:"
            " pip install --upgrade ipex-core ipex-cpu-kernels"
        )
    from ipex_cpu_kernels import _native

    native = _native.load()
    if native.kernel_api() != KERNEL_API:
        raise KernelApiError(
            f"libipex_cpu.so must have KERNEL_API {KERNEL_API} as its Python package, got {native.kernel_api()}:"
            " pip install --force-reinstall ipex-cpu-kernels"
        )
    native.enable_huge_pages(config.get("huge_pages"))
    _apply_request(native)
    return ProviderInfo(
        name="cpu",
        version=__version__,
        device="cpu",
        kernel_api=KERNEL_API,
        isa=native.level(),
        isa_available=native.levels_available(),
        isa_built=native.levels_built(),
        ops=native.ops(),
        kernels=_kernels,
        stock_when=_STOCK_WHEN,
        why_unavailable=native.why_unavailable,
        current_isa=native.level,
        define=native.define,
    )


def _apply_request(native: object) -> None:
    from ipex_cpu_kernels import _native

    assert isinstance(native, _native.Native)
    request = config.isa_request()
    if request.kind == "auto":
        return
    built, available = native.levels_built(), native.levels_available()
    level = request.level
    if request.kind == "cap":
        # A limit, not a demand: the highest usable level that is not above it.
        order = list(built)
        limit = order.index(level) if level in order else len(order) - 1
        level = next(name for name in reversed(order[: limit + 1]) if name in available)
    elif level not in available:
        raise IsaError(
            f"{request.source}={level} cannot be used: {native.why_unavailable(level)};"
            f" usable levels: {', '.join(available)}"
        )
    native.set_level(level)


def _kernels(op: str) -> tuple[KernelInfo, ...]:
    from ipex_cpu_kernels import _native

    return tuple(KernelInfo(*row) for row in _native.load().kernels(op))


@contextlib.contextmanager
def isa(level: str) -> Iterator[None]:
    """Run a block at another ISA level, process-wide; for tests and benchmarks.

    Args:
        level: A level of this build.

    Raises:
        IsaError: The level is unknown or cannot be used on this machine.

    Example:
        >>> with isa("default"):
        ...     pass
    """
    from ipex_core.kernels.providers import load_providers
    from ipex_cpu_kernels import _native

    load_providers()
    native = _native.load()
    before = native.level()
    try:
        native.set_level(level)
    except _native.NativeError as error:
        raise IsaError(str(error)) from None
    try:
        yield
    finally:
        native.set_level(before)

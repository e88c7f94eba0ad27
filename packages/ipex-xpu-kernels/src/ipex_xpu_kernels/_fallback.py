# SPDX-License-Identifier: Apache-2.0
"""Ops that have no kernel for the device and run on the host: how often, and whether they may."""

from __future__ import annotations

from typing import Literal

from ipex_xpu_kernels._device import kernels


def fallback_stats() -> dict[str, int]:
    """Return how often each op has run on the host for want of a kernel, most frequent first.

    Raises:
        RuntimeError: There is no xpu device.

    Example:
        >>> stats = ipex.xpu.fallback_stats()  # doctest: +SKIP
        {'aten::mm.out': 12, 'aten::_softmax.out': 4}
    """
    counts = kernels("fallback_stats").fallback_stats()
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def reset_fallback_stats() -> None:
    """Set all counts of `fallback_stats` to zero.

    Raises:
        RuntimeError: There is no xpu device.
    """
    kernels("reset_fallback_stats").reset_fallback_stats()


def set_fallback_mode(mode: Literal["silent", "warn", "error"]) -> None:
    """Choose what happens when an op has no kernel for the device.

    Args:
        mode: ``"silent"`` runs it on the host, ``"warn"`` does and warns once for each op, ``"error"`` raises
            ``NotImplementedError``. The variable ``IPEX_XPU_FALLBACK`` sets it at start.

    Raises:
        ValueError: Another mode.
        RuntimeError: There is no xpu device.
    """
    if mode not in ("silent", "warn", "error"):
        raise ValueError(
            f"set_fallback_mode: mode must be 'silent', 'warn' or 'error', got {mode!r}"
        )
    kernels("set_fallback_mode").set_fallback_mode(mode)


def set_kernel_mode(mode: Literal["auto", "always"]) -> None:
    """Choose whether kernels are used that are slower than the same op of the host.

    Args:
        mode: ``"auto"`` leaves such ops to the host where it can read the memory of the device (the CPU device) and
            fallbacks are allowed; they count as fallbacks. ``"always"`` uses kernels wherever there are some. The
            variable ``IPEX_XPU_KERNELS`` sets it at start. On devices whose memory the host cannot read, kernels are
            used in both modes.

    Raises:
        ValueError: Another mode.
        RuntimeError: There is no xpu device.
    """
    if mode not in ("auto", "always"):
        raise ValueError(f"set_kernel_mode: mode must be 'auto' or 'always', got {mode!r}")
    kernels("set_kernel_mode").set_kernel_mode(mode)

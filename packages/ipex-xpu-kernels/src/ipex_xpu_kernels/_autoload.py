# SPDX-License-Identifier: Apache-2.0
"""Runs at the end of ``import torch``: the device must be there before the first backward pass.

It may neither raise nor cost time where there is no device: torch would not import.
"""

from __future__ import annotations


def autoload() -> None:
    """Register the device if there is one; what goes wrong is told by ``import ipex`` and ``ipex doctor``."""
    try:
        from ipex_xpu_kernels import _device, _sycl

        if _sycl.device_possible():
            _device.activate()
    except Exception as error:
        from ipex_xpu_kernels import _device

        _device.failed(error)

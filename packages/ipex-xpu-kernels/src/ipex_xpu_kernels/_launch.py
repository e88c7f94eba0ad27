# SPDX-License-Identifier: Apache-2.0
"""Starts kernels of this package by their names, in the current stream of the device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: What kernels call the dtypes.
DTYPES = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "bf16",
    torch.int8: "signedchar",
    torch.float8_e5m2: "e5m2",
    torch.float8_e4m3fn: "e4m3",
}
#: Work-items of a group that owns a row: on a CPU it is one vector.
_LANES = {True: 16, False: 256}


@functools.cache
def programs() -> Any:
    """Return the native module that starts kernels; the one of the device is loaded before."""
    from ipex_xpu_kernels import _device

    _device.native()
    return importlib.import_module("ipex_xpu_kernels._programs")


def kernel(template: str, *dtypes: torch.dtype) -> str:
    """Return the name of a kernel: ``template<dtype,...>``."""
    return f"{template}<{','.join(DTYPES[dtype] for dtype in dtypes)}>"


def launch(
    name: str, like: Tensor, items: Sequence[int], group: Sequence[int], *arguments: object
) -> None:
    """Start a kernel.

    Args:
        name: As `kernel_names` lists it.
        like: A tensor of the device.
        items: Work-items in each dimension, rounded up to whole groups.
        group: Work-items of a group, as many dimensions.
        arguments: Tensors, None (a null pointer) and numbers, as the kernel takes them. Tensors live until the queue
            has come to the kernel, since memory goes back to the queue that it was used in.
    """
    if 0 in items:
        return
    device = like.device.index
    # Most are integers.
    values = [a if type(a) is int else _value(a) for a in arguments]
    whole = [-(-n // g) * g for n, g in zip(items, group, strict=True)]
    queue = torch._C._xpu_getCurrentRawStream(device)
    programs().launch(name, device, queue, whole, list(group), values)


def _value(argument: object) -> object:
    """Return an argument as the native module takes it."""
    if argument is None:
        return (0,)
    return (argument.data_ptr(),) if isinstance(argument, Tensor) else argument


def dense(x: Tensor) -> Tensor:
    """Return ``x`` with neighboring numbers of the last dimension side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def is_gpu(like: Tensor) -> bool:
    """Return whether a tensor is on another device than a CPU."""
    return _is_gpu(like.device.index)


@functools.cache
def _is_gpu(device: int) -> bool:
    from ipex_xpu_kernels import _device

    return bool(_device.native().properties(device)["type"] != "cpu")


def launch_rows(name: str, like: Tensor, rows: int, *arguments: object) -> None:
    """Start a kernel with a work-group for each row."""
    lanes = _LANES[not is_gpu(like)]
    launch(name, like, (rows * lanes,), (lanes,), *arguments)


def launch_columns(name: str, like: Tensor, rows: int, columns: int, *arguments: object) -> None:
    """Start a kernel with a work-item for each column of each row."""
    launch(name, like, (rows, columns), (1, 64), *arguments)

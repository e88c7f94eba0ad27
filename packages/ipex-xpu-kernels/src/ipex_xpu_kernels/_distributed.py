# SPDX-License-Identifier: Apache-2.0
"""``torch.distributed`` for tensors of the device: the back end gloo, which works on the host, serves them, too."""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import Any

#: Name of a back end that is gloo for tensors of the host and of the device.
BACKEND = "xpu_gloo"

_NO_XCCL = (
    "backend must be 'gloo', 'xpu_gloo' or None for the xpu device of ipex-xpu-kernels, which communicates through the"
    " host, got 'xccl'. The backend xccl is not there: only a torch built for XPU has it (see docs/xpu.md)."
    " Call init_process_group('gloo')."
)


def install(module: Any) -> None:
    """Let gloo take tensors of the device; a group without a named back end takes gloo for them.

    Args:
        module: The native one, which has the collectives.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        return
    from torch.distributed import distributed_c10d as c10d

    backend: Any = c10d.Backend
    if "xpu" not in backend.backend_capability[backend.GLOO]:
        backend.backend_capability[backend.GLOO].append("xpu")
    # What a group takes that names no back end; xccl is not in this torch.
    backend.default_device_backend_map["xpu"] = backend.GLOO
    if BACKEND not in backend.backend_list:
        backend.register_backend(BACKEND, _create, devices=["cpu", "xpu"])
    _watch_groups(c10d, module)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    import torch.distributed as dist

    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _watch_groups(c10d: Any, module: Any) -> None:
    """Tell the native module the timeouts of groups, and say what to use where one asks for xccl."""
    inner = c10d._new_process_group_helper
    signature = inspect.signature(inner)

    @functools.wraps(inner)
    def helper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("timeout") is not None:
            module.set_group_timeout(given["group_name"], given["timeout"].total_seconds())
        try:
            return inner(*args, **kwargs)
        except RuntimeError as error:
            if "XCCL built in" in str(error):
                raise RuntimeError(f"init_process_group: {_NO_XCCL}") from error
            raise

    c10d._new_process_group_helper = helper

# SPDX-License-Identifier: Apache-2.0
"""Look-up of modules by kind and device."""

from __future__ import annotations

from enum import Enum
from typing import Any

from ipex_core.library.spec import check

__all__ = ["IPEXCustomOpType", "IPEXRuntimeCustomOps"]


class IPEXCustomOpType(Enum):
    """The kinds of modules."""

    LINEAR_SILU = 0
    LINEAR_SILU_MUL = 1
    LINEAR2_SILU_MUL = 2
    LINEAR_RELU = 3
    LINEAR_NEW_GELU = 4
    LINEAR_GELU = 5
    LINEAR_ADD = 6
    LINEAR_ADD_ADD = 7
    LINEAR_MUL = 8
    ROPE = 9
    RMS_NORM = 10
    PAGED_ATTENTION = 11
    FAST_LAYERNORM = 12
    VARLEN_ATTENTION = 13
    INDIRECTACCESS_KVCACHE_ATTENTION = 14
    LINEAR_MOE = 15
    MAMBA_MIXER = 16


#: Kind -> class; `ipex_llm.modules` fills it, whose files import this one.
CLASSES: dict[IPEXCustomOpType, type] = {}


class IPEXRuntimeCustomOps:
    """Finds the module of a kind for a device. One class serves all devices.

    Attributes:
        device_type: What clients set to a device before their first call; nothing depends on it.
    """

    def __init__(self) -> None:
        self.device_type: str | None = None

    def get_module_from_device(
        self, device_type: str, ops: IPEXCustomOpType, is_instance: bool, *args: Any, **kwargs: Any
    ) -> Any:
        """Return a class of `ipex_llm.modules`, or an instance of it.

        Args:
            device_type: ``"cpu"`` or ``"xpu"``.
            ops: The kind.
            is_instance: Make an instance with the further arguments.

        Raises:
            OpArgumentError: The device is another one.
            TypeError: ``ops`` is not an `IPEXCustomOpType`.
        """
        op = "get_module_from_device"
        check(device_type in ("cpu", "xpu"), op, "device_type", "be one of cpu, xpu", device_type)
        if not isinstance(ops, IPEXCustomOpType):
            raise TypeError(f"{op}: ops must be an IPEXCustomOpType, got {type(ops).__name__}")
        found = CLASSES[ops]
        return found(*args, **kwargs) if is_instance else found

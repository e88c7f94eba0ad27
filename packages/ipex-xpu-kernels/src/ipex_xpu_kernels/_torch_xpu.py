# SPDX-License-Identifier: Apache-2.0
"""``torch.xpu`` for a torch that was built without XPU: the native functions that its Python part asks for."""

from __future__ import annotations

import functools
import importlib
import sys
import types
import uuid as _uuid
from typing import Any

import torch

from ipex_xpu_kernels import _streams


class DeviceProperties(types.SimpleNamespace):
    """Properties of a device, with the names that ``torch.xpu.get_device_properties`` documents.

    What the device does not say (clock and bus of its memory, size of its last cache, architecture) is 0.
    """

    def __repr__(self) -> str:
        mebibytes = self.total_memory >> 20
        return (
            f"_XpuDeviceProperties(name='{self.name}', platform_name='{self.platform_name}', type='{self.type}',"
            f" device_id=0x{self.device_id:X}, uuid={self.uuid}, driver_version='{self.driver_version}',"
            f" total_memory={mebibytes}MB, max_compute_units={self.max_compute_units},"
            f" max_work_group_size={self.max_work_group_size}, sub_group_sizes={self.sub_group_sizes},"
            f" has_fp16={int(self.has_fp16)}, has_fp64={int(self.has_fp64)}, has_atomic64={int(self.has_atomic64)})"
        )


#: What this device cannot be asked for.
_UNKNOWN = {
    "device_id": 0,
    "memory_clock_rate": 0,
    "memory_bus_width": 0,
    "last_level_cache_size": 0,
    "gpu_subslice_count": 0,
    "architecture": 0,
    "has_bfloat16_conversions": False,
    "has_subgroup_matrix_multiply_accumulate": False,
    "has_subgroup_matrix_multiply_accumulate_tensor_float32": False,
    "has_subgroup_2d_block_io": False,
    "is_integrated_gpu": False,
}


def properties(native: Any, device: int) -> DeviceProperties:
    """Return the properties of a device as torch names them."""
    values = native.properties(device)
    values["uuid"] = _uuid.UUID(hex=values["uuid"])
    return DeviceProperties(**_UNKNOWN, **values)


def _not_here(name: str) -> Any:
    def missing(*args: object, **kwargs: object) -> None:
        raise NotImplementedError(
            f"torch.xpu: {name} is not offered by the xpu device of ipex-xpu-kernels"
        )

    return missing


class _Calls:
    """Functions that ``torch.xpu`` calls in ``torch._C``, where one of the native module is not enough."""

    def __init__(self, native: Any) -> None:
        self.native = native

    def initialize(self) -> None:
        count = self.native.device_count()
        torch.xpu.default_generators = tuple(self.native.generator(i) for i in range(count))

    def exchange(self, device: int) -> int:
        before: int = self.native.current_device()
        if device >= 0:
            self.native.set_device(device)
        return before

    def snapshot(self, _pool: object = None) -> dict[str, Any]:
        return {
            "segments": self.native.memory_snapshot(),
            "device_traces": self.native.memory_history(),
            "external_annotations": [],
        }

    def record_history(self, enabled: object, *options: Any, **keywords: Any) -> None:
        # (enabled, context, stacks, max_entries, ...); without stacks, which the allocator does not gather.
        if enabled not in (None, "state", "all"):
            raise ValueError(
                f"_record_memory_history: enabled must be None, 'state' or 'all', got {enabled!r}"
            )
        limit = keywords.get("max_entries", options[2] if len(options) > 2 else 1 << 20)
        self.native.record_memory_history(min(int(limit), 1 << 24) if enabled == "all" else 0)

    def current_stream(self, device: int) -> tuple[int, int, int]:
        stream = torch._C._accelerator_getStream(device)
        return stream.stream_id, stream.device_index, stream.device_type

    def current_queue(self, device: int) -> int:
        stream = torch._C._accelerator_getStream(device)
        queue: int = self.native.queue_pointer(device, stream.stream_id)
        return queue

    def set_stream(self, stream_id: int, device_index: int, device_type: int) -> None:
        torch._C._accelerator_setStream(
            torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        )

    def stream_of(self, queue: int, device: int) -> tuple[int, int, int]:
        number = self.native.stream_of_queue(queue, device)
        if number is None:
            _not_here("a stream of a foreign queue")()
        return number, device, torch._C._accelerator_getStream(device).device_type

    def can_access(self, device: int, peer: int) -> bool:
        for index in (device, peer):
            self.native.properties(index)  # raises where the device does not exist
        return device == peer


def _names_of_c(native: Any) -> dict[str, Any]:
    """Return what ``torch._C`` has in a torch that is built for the device, by name."""
    c, calls = torch._C, _Calls(native)
    return {
        "_has_xpu": True,
        "_xpu_init": calls.initialize,
        "_xpu_isInBadFork": native.forked,
        "_xpu_getDeviceCount": native.device_count,
        "_xpu_getDevice": native.current_device,
        "_xpu_setDevice": native.set_device,
        "_xpu_exchangeDevice": calls.exchange,
        "_xpu_maybeExchangeDevice": calls.exchange,
        "_xpu_synchronize": native.synchronize,
        "_xpu_getCurrentStream": calls.current_stream,
        "_xpu_getCurrentRawStream": calls.current_queue,
        "_xpu_setStream": calls.set_stream,
        "_xpu_getStreamFromExternal": calls.stream_of,
        "_xpu_getArchFlags": lambda: None,
        "_xpu_canDeviceAccessPeer": calls.can_access,
        "_xpu_emptyCache": c._accelerator_emptyCache,
        "_xpu_getMemoryInfo": native.memory_info,
        "_xpu_memoryStats": c._accelerator_getDeviceStats,
        "_xpu_resetPeakMemoryStats": c._accelerator_resetPeakStats,
        "_xpu_resetAccumulatedMemoryStats": c._accelerator_resetAccumulatedStats,
        "_xpu_memorySnapshot": calls.snapshot,
        "_xpu_recordMemoryHistory": calls.record_history,
        "_xpu_setMemoryFraction": native.set_memory_fraction,
        "_xpu_getMemoryFraction": native.memory_fraction,
        "_xpu_changeCurrentAllocator": _not_here("change_current_allocator"),
        "_XpuDeviceProperties": DeviceProperties,
        "_XpuStreamBase": _streams.StreamBase,
        "_XpuEventBase": _streams.EventBase,
    }


def install(native: Any) -> None:
    """Give ``torch._C`` the functions that ``torch.xpu`` calls, and ``torch.xpu`` the types it took at its import.

    Args:
        native: The module ``ipex_xpu_kernels._C`` after `register_device`.
    """
    names = _names_of_c(native)
    for name, value in names.items():
        setattr(torch._C, name, value)
    _streams.bind(native)
    xpu: Any = torch.xpu
    xpu._is_in_bad_fork = native.forked
    xpu._exchange_device = xpu._maybe_exchange_device = names["_xpu_exchangeDevice"]
    xpu._XpuDeviceProperties = DeviceProperties
    xpu._get_device_properties = lambda device: properties(native, device)
    # There are no graphs of this device, so that nothing is being recorded.
    xpu.graphs._xpu_isCurrentStreamCapturing = lambda: False
    # It would ask the driver's library for GPUs, which are not what there is.
    xpu._device_count_zes = lambda: -1
    _rebuild_streams(xpu)


def _rebuild_streams(xpu: Any) -> None:
    """Let the classes of ``torch.xpu.streams`` derive from the bases that exist now."""
    import importlib

    module = importlib.reload(sys.modules["torch.xpu.streams"])
    xpu.Stream, xpu.Event = module.Stream, module.Event
    for name in ("torch.xpu.graphs", "torch._dynamo.device_interface"):
        other = sys.modules.get(name)
        for attribute in ("Stream", "Event"):
            if other is not None and getattr(other, attribute, None) is not None:
                kept = getattr(other, attribute)
                if getattr(kept, "__module__", "") == "torch.xpu.streams":
                    setattr(other, attribute, getattr(module, attribute))


# Profiles
# ----------------------------------------------------------------------------------------------------------------------
# The tracing library in torch asks a profiler of the native module for what the device has done. Two things of a torch
# that was built without XPU are left to Python: to offer the activity XPU, and to say that the events are of an XPU.

_no_profiles = "there is no device"


def why_no_profiles() -> str:
    """Return why profiles have no kernels; an empty text where they have."""
    return _no_profiles


def add_profiles() -> None:
    """Add kernels to profiles from now on. Without what that needs of torch, profiles stay as they are."""
    global _no_profiles
    try:
        native = importlib.import_module("ipex_xpu_kernels._kineto")
    except ImportError as error:
        _no_profiles = f"this torch lacks what profiles need: {error}"
        return
    native.attach()
    _no_profiles = ""
    _offer()
    _name_events()


def _offer() -> None:
    # A torch with parts for CUDA offers no XPU, even where it has no device for CUDA.
    from torch.autograd import profiler
    from torch.profiler import ProfilerActivity

    autograd: Any = torch.autograd
    supported = autograd._supported_activities
    if ProfilerActivity.XPU in supported():
        return

    @functools.wraps(supported)
    def with_xpu() -> set[ProfilerActivity]:
        return {*supported(), ProfilerActivity.XPU}

    module: Any
    for module in (autograd, profiler):
        if hasattr(module, "_supported_activities"):
            module._supported_activities = with_xpu


def _name_events() -> None:
    # Activities do not say of what device they are: torch takes them for the one that it was built for.
    from torch._C._autograd import DeviceType
    from torch.autograd import profiler

    profile: Any = profiler.profile
    parse = getattr(profile, "_parse_kineto_results", None)
    if parse is None:
        return  # of a torch that calls it otherwise: events then are of the device type CUDA

    @functools.wraps(parse)
    def with_xpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        events = parse(self, *args, **kwargs)
        if self.use_device == "xpu":
            for event in events:
                if event.device_type == DeviceType.CUDA:
                    event.device_type = DeviceType.XPU
        return events

    profile._parse_kineto_results = with_xpu

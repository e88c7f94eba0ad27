# SPDX-License-Identifier: Apache-2.0
"""Bases of ``torch.xpu.Stream`` and ``torch.xpu.Event``, over torch's streams and events of any device."""

from __future__ import annotations

from typing import Any

import torch

_native: Any = None


def bind(native: Any) -> None:
    """Name the native module that answers; called once, by the activation of the device."""
    global _native
    _native = native


class StreamBase(torch.Stream):  # type: ignore[misc]
    """A stream, which is an in-order SYCL queue of the device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> StreamBase:
        """Take the stream with the given ids, or the next one of the pool of the current device."""
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        if device is None:
            device = torch.device("xpu", torch.xpu.current_device())
        return super().__new__(cls, device=device, priority=priority)

    @property
    def sycl_queue(self) -> int:
        """Address of the ``sycl::queue``."""
        queue: int = _native.queue_pointer(self.device_index, self.stream_id)
        return queue


class EventBase(torch.Event):  # type: ignore[misc]
    """An event: a marker in the queue of a stream."""

    def __new__(cls, enable_timing: bool = False) -> EventBase:
        """Make an event of the xpu device; it marks nothing until it is recorded."""
        return super().__new__(cls, device="xpu", enable_timing=enable_timing)

    def elapsed_time(self, end_event: Any) -> float:
        """Return the milliseconds from this marker to the other."""
        if not (self.sycl_event and end_event.sycl_event):
            raise ValueError("elapsed_time: both events must be recorded before")
        elapsed: float = _native.elapsed_time(self.sycl_event, end_event.sycl_event)
        return elapsed

    @property
    def sycl_event(self) -> int:
        """Address of the ``sycl::event``; 0 before the event is recorded."""
        return self.event_id or 0

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
    def priority(self) -> int:
        """0, -1 for high or 1 for low: a wish, which devices may not heed."""
        number: int = _native.stream_priority(self.stream_id)
        return number

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """Return the least and the greatest priority; lower numbers come first."""
        return 1, -1

    @property
    def sycl_queue(self) -> int:
        """Address of the ``sycl::queue``."""
        queue: int = _native.queue_pointer(self.device_index, self.stream_id)
        return queue


class EventBase(torch.Event):  # type: ignore[misc]
    """An event: a marker in the queue of a stream."""

    def __new__(cls, enable_timing: bool = False) -> EventBase:
        """Make an event of the xpu device; it marks nothing until it is recorded."""
        event = super().__new__(cls, device="xpu", enable_timing=enable_timing)
        event._timed = enable_timing
        return event

    _timed: bool

    def elapsed_time(self, end_event: torch.Event) -> float:
        """Return the milliseconds from this marker to the other.

        Raises:
            TypeError: The other is not an event of ``torch.xpu``.
            RuntimeError: An event was made without ``enable_timing=True``, not recorded, or is not reached yet.
        """
        if not isinstance(end_event, EventBase):
            raise TypeError(
                f"elapsed_time: end_event must be a torch.xpu.Event, got {type(end_event).__name__}"
            )
        if not (self._timed and end_event._timed):
            timed = (self._timed, end_event._timed)
            raise RuntimeError(
                f"elapsed_time: both events must be created with enable_timing=True, got {timed}"
            )
        if not (self.sycl_event and end_event.sycl_event):
            recorded = (bool(self.sycl_event), bool(end_event.sycl_event))
            raise RuntimeError(
                f"elapsed_time: both events must be recorded before, got {recorded}: call record() first"
            )
        if not (self.query() and end_event.query()):
            completed = (self.query(), end_event.query())
            raise RuntimeError(
                f"elapsed_time: both events must be completed before, got {completed}: call synchronize() first"
            )
        elapsed: float = _native.elapsed_time(self.sycl_event, end_event.sycl_event)
        return elapsed

    @property
    def sycl_event(self) -> int:
        """Address of the ``sycl::event``; 0 before the event is recorded."""
        return self.event_id or 0

# SPDX-License-Identifier: Apache-2.0
"""How long kernels took on the device, from the events of its queues: alone, and in profiles of torch.profiler.

The tracing library in torch asks a profiler of the native module for what the device has done. Two things of a torch
that was built without XPU are left to Python: to offer the activity ``XPU``, and to say that the events are of an XPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ipex_xpu_kernels._device import kernels

#: Why profiles have no kernels; empty where they do.
no_profiles = "there is no device"


@dataclass
class KernelTimes:
    """What `kernel_times` has measured, once its block has ended.

    Attributes:
        launches: Name, begin and end of each kernel in the order of their starts, in nanoseconds of the device's clock.
    """

    launches: list[tuple[str, int, int]] = field(default_factory=list)

    def totals(self) -> dict[str, tuple[int, float]]:
        """Return for each kernel how often it ran and the microseconds of all its runs, the longest first."""
        found: dict[str, tuple[int, float]] = {}
        for name, begin, end in self.launches:
            count, time = found.get(name, (0, 0.0))
            found[name] = count + 1, time + (end - begin) / 1000
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def __str__(self) -> str:
        lines = [f"{'kernel':60} {'runs':>6} {'total us':>12} {'each us':>10}"]
        for name, (count, time) in self.totals().items():
            lines.append(f"{name:60} {count:6} {time:12.1f} {time / count:10.1f}")
        return "\n".join(lines)


@contextlib.contextmanager
def kernel_times() -> Iterator[KernelTimes]:
    """Measure the kernels that are started in a block, this package's and users', on all streams.

    ``torch.profiler`` shows kernels with the ops that started them; this has their times alone. At its end the block
    waits for the kernels. What runs on the host, copies and oneDNN are not among them.

    Yields:
        A `KernelTimes`, empty until the block ends.

    Raises:
        RuntimeError: There is no xpu device, or a queue of a torch that has XPU itself does not measure.

    Example:
        >>> with ipex.xpu.kernel_times() as times:  # doctest: +SKIP
        ...     model(x)
        >>> print(times)  # doctest: +SKIP
    """
    native = kernels("kernel_times")
    times = KernelTimes()
    native.start_kernel_times()
    try:
        yield times
    finally:
        times.launches = native.stop_kernel_times()


def add_profiles() -> None:
    """Add kernels to profiles from now on. Without what that needs of torch, profiles stay as they are."""
    global no_profiles
    try:
        native = importlib.import_module("ipex_xpu_kernels._kineto")
    except ImportError as error:
        no_profiles = f"this torch lacks what profiles need: {error}"
        return
    native.attach()
    no_profiles = ""
    _offer()
    _name_events()


def _offer() -> None:
    # A torch with parts for CUDA offers no XPU, even where it has no device for CUDA.
    import torch.autograd.profiler
    from torch.profiler import ProfilerActivity

    autograd: Any = torch.autograd
    supported = autograd._supported_activities
    if ProfilerActivity.XPU in supported():
        return

    @functools.wraps(supported)
    def with_xpu() -> set[ProfilerActivity]:
        return {*supported(), ProfilerActivity.XPU}

    for module in (autograd, autograd.profiler):
        if hasattr(module, "_supported_activities"):
            module._supported_activities = with_xpu


def _name_events() -> None:
    # Activities do not say of what device they are: torch takes them for the one that it was built for.
    import torch.autograd.profiler
    from torch._C._autograd import DeviceType

    profile: Any = torch.autograd.profiler.profile
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

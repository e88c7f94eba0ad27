# SPDX-License-Identifier: Apache-2.0
"""How long kernels took on the device, from the events of its queues."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ipex_xpu_kernels._device import kernels


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

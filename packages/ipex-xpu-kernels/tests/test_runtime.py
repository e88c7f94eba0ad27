# SPDX-License-Identifier: Apache-2.0
"""Streams, events, memory and counters of the device."""

from __future__ import annotations

import gc
import itertools
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DEVICE

import ipex_xpu_kernels as xpu

pytestmark = pytest.mark.usefixtures("needs_device")


def test_properties() -> None:
    properties = torch.xpu.get_device_properties(0)
    assert properties.type == DEVICE[:3] and properties.total_memory > 0
    assert torch.xpu.device_count() == xpu.state().count >= 1
    assert torch.xpu.is_available() and torch.xpu.is_bf16_supported()
    assert torch.xpu.get_device_name(0) == properties.name
    assert "total_memory" in repr(properties)
    assert torch.accelerator.current_accelerator() == torch.device("xpu")
    assert xpu.device_count() == torch.xpu.device_count()  # names of torch.xpu
    with pytest.raises(AttributeError, match="nonsense"):
        xpu.nonsense  # noqa: B018


def test_streams_and_events() -> None:
    stream = torch.xpu.Stream()
    before = torch.xpu.current_stream()
    with torch.xpu.stream(stream):
        assert torch.xpu.current_stream() == stream
        x = torch.ones(1000, device="xpu") * 2
    assert torch.xpu.current_stream() == before
    stream.synchronize()
    assert stream.query()
    assert x.sum().item() == 2000
    first, second = torch.xpu.Event(enable_timing=True), torch.xpu.Event(enable_timing=True)
    with pytest.raises(RuntimeError, match="must be recorded"):
        first.elapsed_time(second)
    first.record()
    torch.mm(torch.ones(64, 64, device="xpu"), torch.ones(64, 64, device="xpu"))
    second.record()
    second.synchronize()
    assert first.query() and first.elapsed_time(second) >= 0
    stream.wait_event(second)
    x.record_stream(stream)
    assert stream.sycl_queue != before.sycl_queue
    untimed = torch.xpu.Event()
    untimed.record()
    untimed.synchronize()
    for a, b in ((untimed, second), (first, untimed)):
        with pytest.raises(RuntimeError, match="enable_timing=True"):
            a.elapsed_time(b)
    with pytest.raises(TypeError, match=r"end_event must be a torch\.xpu\.Event, got int"):
        first.elapsed_time(1)


def test_priorities_and_queues_of_streams() -> None:
    assert torch.xpu.Stream.priority_range() == (1, -1)
    for wish, priority in ((-9, -1), (-1, -1), (0, 0), (1, 1), (5, 1)):
        stream = torch.xpu.Stream(priority=wish)
        assert stream.priority == priority
        with torch.xpu.stream(stream):
            x = torch.ones(100, device="xpu") * 3
        stream.synchronize()
        assert x.sum().item() == 300
        assert torch.xpu.get_stream_from_external(stream.sycl_queue) == stream
    assert torch.xpu.current_stream().priority == 0
    assert len({torch.xpu.Stream().stream_id for _ in range(70)}) == 32
    with pytest.raises(NotImplementedError, match="foreign queue"):
        torch.xpu.get_stream_from_external(4096)
    assert torch.xpu.can_device_access_peer(0, 0)
    assert not torch.xpu.is_current_stream_capturing()
    for wrong in ((0, 99), (99, 0)):
        with pytest.raises(RuntimeError, match="device must be in"):
            torch.xpu.can_device_access_peer(*wrong)
    with pytest.raises(RuntimeError, match="device must be in"):
        torch.xpu.get_device_properties(99)


def test_memory_statistics() -> None:
    gc.collect()
    torch.xpu.empty_cache()
    before = torch.xpu.memory_allocated()
    x = torch.empty(3_000_000, dtype=torch.uint8, device="xpu")
    assert torch.xpu.memory_allocated() - before == (3_000_000 + 511) // 512 * 512
    assert torch.xpu.memory_reserved() >= torch.xpu.memory_allocated()
    assert torch.xpu.max_memory_allocated() >= torch.xpu.memory_allocated()
    segments = torch.xpu.memory_snapshot()
    assert sum(s["total_size"] for s in segments) == torch.xpu.memory_reserved()
    for segment in segments:
        assert sum(b["size"] for b in segment["blocks"]) == segment["total_size"]
    free, total = torch.xpu.mem_get_info()
    assert 0 < free <= total
    del x
    assert torch.xpu.memory_allocated() == before
    torch.xpu.reset_peak_memory_stats()
    assert torch.xpu.max_memory_allocated() == before
    torch.xpu.empty_cache()


def test_limit_and_error_of_memory() -> None:
    total = torch.xpu.get_device_properties().total_memory
    torch.xpu.set_per_process_memory_fraction((torch.xpu.memory_reserved() + (64 << 20)) / total)
    try:
        retries = torch.xpu.memory_stats()["num_alloc_retries"]
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 1.00 GiB"):
            torch.empty(1 << 30, dtype=torch.uint8, device="xpu")
        assert torch.xpu.memory_stats()["num_alloc_retries"] == retries + 1
        torch.ones(10, device="xpu")  # goes on
    finally:
        torch.xpu.set_per_process_memory_fraction(1.0)
    with pytest.raises(ValueError, match=r"fraction"):
        torch.xpu.set_per_process_memory_fraction(1.5)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3_000_000)), max_size=60))
def test_allocator_against_a_model(requests: list[tuple[int, int]]) -> None:
    """Blocks never overlap, keep what was written to them, and are all given back."""
    gc.collect()
    start = torch.xpu.memory_allocated()
    held: dict[int, tuple[torch.Tensor, int]] = {}
    for slot, size in requests:
        if slot in held:
            tensor, value = held.pop(slot)
            assert not tensor.numel() or (tensor[0] == value and tensor[-1] == value)
            del tensor
        else:
            value = (slot * 7 + size) % 251
            held[slot] = (torch.full((size,), value, dtype=torch.uint8, device="xpu"), value)
        spans = sorted(
            (t.data_ptr(), t.data_ptr() + t.numel()) for t, _ in held.values() if t.numel()
        )
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        rounded = sum((t.numel() + 511) // 512 * 512 for t, _ in held.values())
        assert torch.xpu.memory_allocated() - start == rounded
    held.clear()
    assert torch.xpu.memory_allocated() == start


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 300_000), st.integers(0, 3), st.booleans()),
        max_size=50,
    )
)
def test_allocator_with_streams(requests: list[tuple[int, int, int, bool]]) -> None:
    """Blocks that other streams use are not handed out before those are done, and none is lost."""
    gc.collect()
    torch.xpu.synchronize()
    torch.xpu.empty_cache()
    start = torch.xpu.memory_stats()
    streams = [torch.xpu.Stream() for _ in range(4)]
    held: dict[int, tuple[torch.Tensor, float]] = {}
    for slot, size, stream, other in requests:
        if slot in held:
            tensor, value = held.pop(slot)
            assert tensor.min().item() == tensor.max().item() == value
            del tensor
            continue
        value = float(slot * 7 + size % 251)
        with torch.xpu.stream(streams[stream]):
            held[slot] = (torch.full((size,), value, device="xpu"), value)
        if other:
            user = streams[(stream + 1) % 4]
            user.wait_stream(streams[stream])
            with torch.xpu.stream(user):
                held[slot][0].add_(0.0)
            held[slot][0].record_stream(user)
        streams[stream].synchronize()
    held.clear()
    torch.xpu.synchronize()
    torch.xpu.empty_cache()
    end = torch.xpu.memory_stats()
    for name in ("allocated_bytes", "active_bytes", "reserved_bytes", "inactive_split", "active"):
        assert end[f"{name}.all.current"] == start[f"{name}.all.current"]


def test_history_and_summary_of_memory() -> None:
    torch.xpu.memory._record_memory_history(max_entries=100)
    try:
        x = torch.empty(1000, device="xpu")
        address = x.data_ptr()
        del x
        steps = torch.xpu.memory._snapshot()["device_traces"][0]
    finally:
        torch.xpu.memory._record_memory_history(enabled=None)
    actions = [s["action"] for s in steps if s.get("addr") == address]
    assert actions[-3:] == ["alloc", "free_requested", "free_completed"]
    assert torch.xpu.memory._snapshot()["device_traces"][0] == []
    text = torch.xpu.memory_summary()
    assert "Allocated memory" in text and "of small blocks" in text
    assert "of small blocks" not in xpu.memory_summary(abbreviated=True)


def test_threads_share_the_device() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(20):
                x = torch.full((seed * 37 + i + 1,), float(seed), device="xpu")
                assert (x * 2 + 1).sum().item() == x.numel() * (2 * seed + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures and not any(thread.is_alive() for thread in threads)


@pytest.fixture
def quiet_mode() -> Iterator[None]:
    yield
    xpu.set_fallback_mode("silent")


@pytest.mark.usefixtures("quiet_mode")
def test_fallbacks_are_counted_and_can_be_refused() -> None:
    x = torch.rand(4, device="xpu")
    xpu.reset_fallback_stats()
    x.relu().add(1).mul(x)  # kernels
    assert xpu.fallback_stats() == {}
    torch.special.i0(x)
    torch.special.i0(x)
    assert xpu.fallback_stats() == {"aten::i0.out": 2}
    xpu.reset_fallback_stats()
    xpu.set_fallback_mode("warn")
    with pytest.warns(UserWarning, match=r"i0\.out has no kernel for xpu"):
        torch.special.i0(x)
    xpu.set_fallback_mode("error")
    with pytest.raises(NotImplementedError, match=r"i0\.out has no kernel"):
        torch.special.i0(x)
    with pytest.raises(ValueError, match="mode must be"):
        xpu.set_fallback_mode("loud")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="mode must be"):
        xpu.set_kernel_mode("never")  # type: ignore[arg-type]


def test_kernels_are_loaded_once() -> None:
    assert "unary<relu,float>" in xpu.kernel_names()
    x = torch.ones(3, device="xpu")
    x.erf()
    before = xpu.kernel_load_stats()
    x.erf()
    assert xpu.kernel_load_stats() == before

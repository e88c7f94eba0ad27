# SPDX-License-Identifier: Apache-2.0
"""Kernels of the device in profiles of torch.profiler."""

from __future__ import annotations

import itertools
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from test_process import output
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function, schedule

import ipex_xpu_kernels as xpu

pytestmark = pytest.mark.usefixtures("always")
BOTH = [ProfilerActivity.CPU, ProfilerActivity.XPU]
EXP, ADD, COPIES = "unary<exp_,float>", "binary<add,float>", ("Memcpy", "Memset")


def kernels(found: Any) -> list[Any]:
    """Return the events of a profile that are on the device, without copies."""
    events = [e for e in found.events() if e.device_type == DeviceType.XPU]
    return [e for e in events if not e.name.startswith(COPIES) and not e.is_user_annotation]


def names(found: Any) -> dict[str, int]:
    return dict(Counter(event.name for event in kernels(found)))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(1 << 16, device="xpu")


def test_the_activity_is_offered() -> None:
    assert ProfilerActivity.XPU in torch.profiler.supported_activities()
    rows, _ = xpu.doctor()
    assert dict(rows)["torch.profiler"] == "shows kernels (activity XPU)"


def test_kernels_and_their_ops(x: torch.Tensor) -> None:
    with profile(activities=BOTH) as found:
        with record_function("mine"):
            (x + x).exp()
        x.exp()
    assert names(found) == {ADD: 1, EXP: 2}
    for event in kernels(found):
        assert event.self_device_time_total == event.time_range.elapsed_us() > 0
        assert event.device_index == 0
    # Each op has the time of its kernels, and what encloses it, too.
    rows = {row.key: row for row in found.key_averages()}
    assert rows[EXP].count == 2
    assert rows["aten::exp"].self_device_time_total == rows[EXP].self_device_time_total > 0
    assert rows["aten::add"].self_device_time_total == rows[ADD].self_device_time_total > 0
    assert rows["mine"].device_time_total == pytest.approx(
        rows[ADD].self_device_time_total + kernels(found)[1].self_device_time_total
    )
    assert rows["SYCL submit"].count >= 3
    text = found.key_averages().table(sort_by="self_xpu_time_total")
    assert "Self XPU" in text and EXP in text


def test_kernels_run_after_their_ops_began(x: torch.Tensor) -> None:
    x.exp()
    torch.xpu.synchronize()
    with profile(activities=BOTH) as found:
        for _ in range(20):
            x.exp()
    # The op for users calls the one with an output.
    outer = [e for e in found.events() if e.name == "aten::exp" and e.cpu_parent is None]
    begun = sorted(e.time_range.start for e in outer)
    ran = [e.time_range for e in kernels(found)]
    assert len(begun) == len(ran) == 20
    assert all(op <= kernel.start for op, kernel in zip(begun, ran, strict=True))
    assert all(a.end <= b.start for a, b in itertools.pairwise(ran))  # of one queue


def test_trace(x: torch.Tensor, tmp_path: Path) -> None:
    stream = torch.xpu.Stream()
    with profile(activities=BOTH) as found:
        x.exp()
        with torch.xpu.stream(stream):
            x + x
    file = tmp_path / "trace.json"
    found.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    work = {e["name"]: e for e in events if e.get("cat") == "kernel"}
    assert set(work) == {EXP, ADD}
    assert work[EXP]["tid"] == 0 and work[ADD]["tid"] == stream.stream_id
    assert all(e["pid"] == 0 and e["dur"] > 0 for e in work.values())
    ops = {e["args"]["External id"]: e["name"] for e in events if e.get("cat") == "cpu_op"}
    assert ops[work[EXP]["args"]["External id"]] == "aten::exp"
    labels = {e["args"]["labels"] for e in events if e["name"] == "process_labels"}
    assert "XPU 0" in labels
    # Arrows from the calls to what they started.
    ends = {e["id"]: e for e in events if e.get("cat") == "ac2g" and e["ph"] == "f"}
    begins = {e["id"] for e in events if e.get("cat") == "ac2g" and e["ph"] == "s"}
    assert {work[EXP]["args"]["correlation"], work[ADD]["args"]["correlation"]} <= begins & set(
        ends
    )


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end of each cycle")
def test_schedule(x: torch.Tensor) -> None:
    cycles = []
    with profile(
        activities=BOTH,
        schedule=schedule(wait=1, warmup=1, active=2, repeat=2),
        on_trace_ready=lambda p: cycles.append(names(p)),
    ) as found:
        for step in range(9):
            for _ in range(step + 1):
                x.exp()
            found.step()
    assert cycles == [{EXP: 3 + 4}, {EXP: 7 + 8}]


def test_profiles_after_each_other(x: torch.Tensor) -> None:
    for count in (1, 0, 3):
        with profile(activities=BOTH) as found:
            for _ in range(count):
                x.exp()
        assert names(found) == ({EXP: count} if count else {})
    with pytest.raises(ZeroDivisionError), profile(activities=BOTH) as found:
        x.exp()
        raise ZeroDivisionError
    assert names(found) == {EXP: 1}
    x.exp()  # not of the next one
    with profile(activities=BOTH) as found:
        x + x
    assert names(found) == {ADD: 1}


def test_an_empty_profile(tmp_path: Path) -> None:
    with profile(activities=BOTH) as found:
        pass
    assert kernels(found) == []
    found.key_averages().table()
    found.export_chrome_trace(str(tmp_path / "trace.json"))
    with profile(activities=[ProfilerActivity.XPU]) as found:
        pass
    assert kernels(found) == []


def test_other_activities(x: torch.Tensor) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        x.exp()
    assert kernels(found) == [] and "SYCL submit" not in {e.name for e in found.events()}
    with profile(activities=[ProfilerActivity.XPU]) as found:
        x.exp()
    assert names(found) == {EXP: 1}
    with profile() as found:  # all there are
        x.exp()
    assert names(found) == {EXP: 1}


def test_the_older_interface(x: torch.Tensor) -> None:
    with torch.autograd.profiler.profile(use_device="xpu", use_kineto=True) as found:
        x.exp()
    assert [e.name for e in found.function_events if e.device_type == DeviceType.XPU] == [EXP]
    row = next(row for row in found.key_averages() if row.key == "aten::exp")
    assert row.device_time_total > 0


def test_shapes(x: torch.Tensor) -> None:
    small = x[: 1 << 15].clone()
    with profile(activities=BOTH, record_shapes=True) as found:
        x.exp()
        small.exp()
        small.exp()
    rows = [r for r in found.key_averages(group_by_input_shape=True) if r.key == "aten::exp"]
    # The op for users, and the one with an output, which it calls.
    shapes = {(tuple(r.input_shapes[0]), len(r.input_shapes), r.count) for r in rows}
    assert shapes == {((n,), k, c) for n, c in ((1 << 16, 1), (1 << 15, 2)) for k in (1, 2)}
    assert all(r.device_time_total > 0 for r in rows)


def test_threads(x: torch.Tensor) -> None:
    """What other threads start is seen; it belongs to no op of this one. Backward passes have threads of their own."""

    def work() -> None:
        for _ in range(50):
            x + x

    threads = [threading.Thread(target=work) for _ in range(3)]
    weight = torch.randn(1 << 16, device="xpu", requires_grad=True)
    with profile(activities=BOTH) as found:
        for thread in threads:
            thread.start()
        for _ in range(5):
            weight.exp().sum().backward()
        for thread in threads:
            thread.join()
    assert names(found)[ADD] == 150 + 4  # and the sums of gradients
    rows = {row.key: row for row in found.key_averages()}
    assert rows["aten::exp"].self_device_time_total == pytest.approx(
        rows[EXP].self_device_time_total
    )
    assert rows["ExpBackward0"].device_time_total > 0


def test_kernel_times_within_a_profile(x: torch.Tensor) -> None:
    with profile(activities=BOTH) as found:
        x.exp()
        with xpu.kernel_times() as times:
            x + x
        x.exp()
    assert times.totals()[ADD][0] == 1 and len(times.launches) == 1
    assert names(found) == {EXP: 2, ADD: 1}
    with xpu.kernel_times() as times:
        with profile(activities=BOTH) as found:
            x + x
        x.exp()
    assert [name for name, _, _ in times.launches] == [ADD, EXP] and names(found) == {ADD: 1}


def test_copies(x: torch.Tensor) -> None:
    other = torch.empty_like(x)
    with profile(activities=BOTH) as found:
        other.copy_(x)
        other.zero_()
        host = x.to("cpu")
        other.copy_(host)
    copies = {e.name for e in found.events() if e.device_type == DeviceType.XPU}
    assert {"Memcpy DtoD", "Memset (Device)"} <= copies


def test_kernels_of_users(x: torch.Tensor) -> None:
    source = """
    #include "ipex/xpu.h"
    IPEX_KERNEL(1) void twice(const float* x, float* y, long n) {
      const long i = ipex::global_id();
      if (i < n) y[i] = 2 * x[i];
    }
    """
    twice = xpu.load_inline("profiled", source, ["twice"]).twice
    y = torch.empty_like(x)
    with profile(activities=BOTH) as found, record_function("mine"):
        twice(x, y, x.numel(), size=x.numel())
    assert names(found) == {"twice": 1}


def test_two_devices() -> None:
    code = (
        "import torch, ipex_xpu_kernels as xpu\n"
        "from torch.profiler import profile, ProfilerActivity as A\n"
        "xpu.set_kernel_mode('always')\n"
        "x = [torch.ones(1 << 16, device=f'xpu:{i}') for i in range(2)]\n"
        "with profile(activities=[A.CPU, A.XPU]) as found:\n"
        "    x[0].exp(), x[1].exp(), x[1].exp()\n"
        "print([e.device_index for e in found.events() if e.name == 'unary<exp_,float>'])\n"
    )
    if torch.xpu.get_device_properties(0).type != "cpu":
        pytest.skip("a device in parts is a CPU")
    assert output(code, IPEX_XPU_DEVICE="cpu:2").endswith("[0, 1, 1]")


def test_a_torch_without_the_symbols() -> None:
    """Its profiles have the ops of the host, as before."""
    code = (
        "import sys; sys.modules['ipex_xpu_kernels._kineto'] = None\n"
        "import torch, ipex_xpu_kernels as xpu\n"
        "from torch.profiler import profile, ProfilerActivity as A\n"
        "xpu.set_kernel_mode('always')\n"
        "with profile(activities=[A.CPU, A.XPU]) as found: torch.ones(9, device='xpu').exp()\n"
        "print({str(e.device_type) for e in found.events()})\n"
        "print(dict(xpu.doctor()[0])['torch.profiler'])\n"
    )
    lines = output(code).splitlines()[-2:]
    assert lines[0] == "{'DeviceType.CPU'}"
    assert lines[1].startswith("this torch lacks what profiles need")


def test_a_torch_with_parts_for_cuda() -> None:
    """Such a torch does not offer the activity by itself."""
    code = (
        "import torch\n"
        "from torch.profiler import profile, ProfilerActivity as A\n"
        "for module in (torch.autograd, torch.autograd.profiler):\n"
        "    module._supported_activities = lambda: {A.CPU}\n"
        "import ipex_xpu_kernels as xpu; xpu.activate()\n"
        "xpu.set_kernel_mode('always')\n"
        "with profile(activities=[A.CPU, A.XPU]) as found: torch.ones(9, device='xpu').exp()\n"
        "print([e.name for e in found.events() if str(e.device_type) == 'DeviceType.XPU'])\n"
    )
    found = output(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert found.endswith("'unary<exp_,float>']")


def test_annotations_on_the_device(x: torch.Tensor) -> None:
    """torch asks for them with the activity CUDA, since 2.14 also with XPU."""
    found = torch.autograd.profiler.profile(use_device="xpu", use_kineto=True)
    found.kineto_activities.add(ProfilerActivity.CUDA)
    with found, record_function("outer"):
        x.exp()
        with record_function("inner"):
            x + x
            x + x
    events = [e for e in found.function_events if e.device_type == DeviceType.XPU]
    spans = {e.name: e.time_range for e in events if e.is_user_annotation}
    assert set(spans) == {"outer", "inner"}
    ran = [e.time_range for e in events if not e.is_user_annotation]
    assert (spans["outer"].start, spans["outer"].end) == (ran[0].start, ran[2].end)
    assert (spans["inner"].start, spans["inner"].end) == (ran[1].start, ran[2].end)

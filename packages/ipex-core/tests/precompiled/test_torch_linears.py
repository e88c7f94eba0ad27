# SPDX-License-Identifier: Apache-2.0
"""Linear layers in float32 that a program leaves to torch, where that was measured to be faster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_core import explain, load_precompiled, precompile
from ipex_core.compile_backend import ipex_backend
from ipex_core.fusion.aten import linear


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(48, 96), nn.Linear(48, 96, bias=False)
        self.down = nn.Linear(96, 48)

    def forward(self, x: Tensor) -> Tensor:
        y = functional.gelu(self.down(functional.silu(self.gate(x)) * self.up(x)))
        return self.down(functional.relu(self.up(y))) + x


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Makes measurements come out as the test says; yields what was timed and a way to say it."""
    timed: list[str] = []
    side = ["stock"]

    def fastest(runs: Any, seconds: float, default: str, cold: bool) -> tuple[str, str]:
        first, second = (run() for run in runs.values())
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-2)
        timed.append(default)
        return side[0], "a and b"

    monkeypatch.setattr(linear, "fastest", fastest)
    monkeypatch.setattr(linear, "_known", {})
    monkeypatch.setattr(linear, "_table_holds", lambda: False)
    monkeypatch.setattr(linear, "_LEAST_WORK", 1)
    yield timed, side
    torch.compiler.reset()


@pytest.mark.parametrize("side", ["ipex", "stock"])
def test_the_faster_one_is_taken(side: str, model: Net, faster: Any) -> None:
    timed, sides = faster
    sides[0] = side
    x = torch.randn(2, 5, 48)
    fast = precompile(model, x)
    assert timed and set(timed) == {"ipex"}  # a program stays whole unless a step is faster
    assert bool(fast.linears) == (side == "stock") and not fast.calls
    assert ("linear layers of torch" in str(explain(fast))) == (side == "stock")
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_sizes_that_vary_small_layers_and_other_dtypes_are_not_timed(
    model: Net, faster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, _ = faster
    x = torch.randn(4, 48)
    rows = torch.export.Dim("rows", min=2, max=64)
    assert not precompile(model, x, dynamic_shapes=({0: rows},)).linears
    assert not precompile(Net().eval().bfloat16(), x.bfloat16()).linears
    torch.use_deterministic_algorithms(True)
    try:
        assert not precompile(model, x).linears
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(linear, "_LEAST_WORK", 1 << 23)
    assert not precompile(model, x).linears and not timed


@pytest.mark.parametrize("mkl", [True, False])
def test_files_keep_the_choice(
    mkl: bool, model: Net, faster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch._C, "has_mkl", mkl and torch._C.has_mkl)
    x = torch.randn(3, 48)
    fast = precompile(model, x)
    again = load_precompiled(fast.save(tmp_path / "model.safetensors"))
    assert again.linears == fast.linears > 0
    torch.testing.assert_close(again(x), fast(x), rtol=0, atol=0)
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)


def test_another_number_of_threads(model: Net, faster: Any) -> None:
    x, before = torch.randn(3, 48), torch.get_num_threads()
    fast = precompile(model, x)
    with torch.no_grad():
        want = model(x)
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            torch.testing.assert_close(fast(x), want, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


def test_compiled_graphs_stay_programs(model: Net, faster: Any) -> None:
    fast, x = torch.compile(model, backend=ipex_backend), torch.randn(3, 48)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    (graph,) = explain(fast).graphs
    assert [note for note in graph.notes if "linear layers of torch, as measured: 5" in note]

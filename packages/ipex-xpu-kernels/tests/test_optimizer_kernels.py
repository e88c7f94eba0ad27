# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers on the kernels of the device: float32, with a copy in 16 bits, and split parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_ipex_kernels import FLOATS, raises_as_on_the_host, run

from ipex_core.library.kernels import specs
from ipex_core.ops.optim import join
from ipex_core.ops.optim_steps import LISTED

pytestmark = pytest.mark.usefixtures("always")


def joined(args: tuple[object, ...], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Put the halves of split parameters together: the lower ones alone mean nothing."""
    tensors = [t.cpu() for t in tensors]
    halves = [t for t in tensors if t.dtype == torch.bfloat16]
    if not halves or tensors[0].dtype != torch.bfloat16:
        return tensors
    # param, ..., grad, ..., param2: the gradient is not written to.
    return [join(halves[0], halves[-1]), *(t for t in tensors if t.dtype == torch.float32)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LISTED)
def test_steps(name: str, dtype: torch.dtype) -> None:
    for sample in specs()[name].samples(dtype):
        expected = joined(sample.args, run(name, sample, "cpu"))
        actual = joined(sample.args, run(name, sample, "xpu"))
        for one, wanted in zip(actual, expected, strict=True):
            rtol = 1e-5 if wanted.dtype == torch.float32 else 8e-3
            torch.testing.assert_close(
                one, wanted, rtol=rtol, atol=1e-6, msg=lambda text, s=sample: f"{s.id}: {text}"
            )


@pytest.mark.parametrize("name", LISTED)
def test_steps_of_lists(name: str) -> None:
    for sample in specs()[f"{name}s"].samples(torch.float32):
        expected = run(f"{name}s", sample, "cpu")
        for one, wanted in zip(run(f"{name}s", sample, "xpu"), expected, strict=True):
            torch.testing.assert_close(one.cpu(), wanted, rtol=1e-5, atol=1e-6)


def test_wrong_arguments_raise_as_on_the_host() -> None:
    w, g = torch.ones(4), torch.ones(4)
    rest = (0.9, 0.1, 0.0, 0.0, False)
    raises_as_on_the_host("sgd_fused_step", w, torch.ones(5), None, None, *rest)
    raises_as_on_the_host("sgd_fused_step", w, g.bfloat16(), None, None, *rest)
    raises_as_on_the_host("sgd_fused_step", w.half(), g.half(), None, None, *rest)
    raises_as_on_the_host("adagrad_fused_step", w, g, g.clone(), None, 0.0, 0.1, 0.0, 0.0, 1e-10)
    raises_as_on_the_host(
        *("adam_fused_step", w, g.clone(), g.clone(), None, g, None, True, 1.0, 0.9, 0.99),
        *(0.1, 0.0, 1e-8),
    )
    raises_as_on_the_host("sgd_fused_steps", [w], [g, g], [], [], *rest)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_training_with_master_weights(kind: Any, split: bool) -> None:
    optimize = pytest.importorskip("ipex").optimize
    losses: dict[str, list[float]] = {"cpu": [], "xpu": []}
    for device, found in losses.items():
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16)
        ).to(device)
        model, optimizer = optimize(
            model.train(),
            optimizer=kind(model.parameters(), lr=0.01),
            dtype=torch.bfloat16,
            split_master_weight_for_bf16=split,
        )
        for seed in range(4):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(device)
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x).float().square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        assert next(model.parameters()).dtype == torch.bfloat16
    assert losses["xpu"] == pytest.approx(losses["cpu"], rel=2e-2)
    assert losses["xpu"][-1] < losses["xpu"][0]

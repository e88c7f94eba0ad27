# SPDX-License-Identifier: Apache-2.0
"""INT8 models that take paths which were not recorded: right numbers, or an error that names the layer."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    convert,
    default_dynamic_qconfig_mapping,
    default_static_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
    load,
    prepare,
    save,
)
from ipex_quant.int8.boundary import Codes, Early, Scaled

Tensor = torch.Tensor
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning", "ignore::torch.jit.TracerWarning"
)


def images(sign: float = 1.0) -> Tensor:
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    return sign * x * x.sum().sign()


def quantized(
    model: nn.Module, *samples: Any, mapping: Any = default_static_qconfig_mapping
) -> Any:
    samples = samples or (images(), images(-1))
    with torch.no_grad():
        prepared = prepare(model.eval(), mapping, samples[0])
        for x in samples:
            prepared(x)
        return convert(prepared)


def near(found: Tensor, expected: Tensor, least: float = 0.995) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    rows = [t.detach().flatten(1) for t in (found, expected)]
    assert nn.functional.cosine_similarity(*rows).min() > least


class Branches(nn.Module):
    """Convolutions in a row, with another way through them for each ``way``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.act, self.pool = nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
        self.norm.running_mean.normal_()  # type: ignore[union-attr, operator]
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor, way: str = "") -> Any:
        y = self.act(self.norm(self.a(x)))
        if x.sum() < 0:  # not in the example
            return self.last(self.other(y, way))
        return self.last(self.b(y))

    def other(self, y: Tensor, way: str) -> Tensor:
        return y


def variant(body: Any) -> Branches:
    model = Branches()
    model.other = body.__get__(model)  # type: ignore[method-assign]
    return model


def times(self: Any, y: Tensor) -> Tensor:
    return self.b(y) * 2 + y.abs()


def in_place(self: Any, y: Tensor) -> Tensor:
    view = y.view(y.shape)
    y += 1
    y.mul_(0.5)
    nn.functional.relu(view, inplace=True)
    return self.b(view) + y[:, :1]


def functions(self: Any, y: Tensor) -> Tensor:
    z = torch.cat([y, -y], 1)[:, ::2].contiguous()
    assert len(y) == 4 and y.dim() == 4
    return torch.where(z > 0.2, self.b(y), torch.flatten(y, 2).view_as(z)) / y.max()


def more_calls(self: Any, y: Tensor) -> Tensor:
    for _ in range(3):
        y = self.act(self.b(self.act(self.b(y))) - 0.1)
    return y


def early(self: Any, y: Tensor) -> Tensor:
    return self.pool(y)


@torch.no_grad()
@pytest.mark.parametrize("body", [times, in_place, functions, more_calls, early])
def test_other_branch(body: Any) -> None:
    def other(self: Any, y: Tensor, way: str) -> Tensor:
        return body(self, y)

    model = variant(other)
    converted = quantized(model)
    assert type(converted.act(converted.norm(converted.a(images())))) is Codes  # on the way seen
    for sign in (1.0, -1.0, 1.0):
        x = images(sign)
        near(converted(x), model(x), 0.98)


class Skips(nn.Module):
    """A sum that is computed with a convolution, whose other operand may be overwritten."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.block = Residual()
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Any:
        y = self.stem(x)
        before = y.clone() if x.sum() < -1e6 else y
        y = self.block(y)
        if x.sum() < 0:
            return self.last(before * y)
        return self.last(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + x)


@torch.no_grad()
def test_operand_that_was_overwritten() -> None:
    model = Skips().eval()
    converted = quantized(model)
    near(converted(images()), model(images()))
    with pytest.raises(OpArgumentError, match=r"block.body.2: its operand must not be read again"):
        converted(images(-1))


@torch.no_grad()
def test_sum_without_its_layer() -> None:
    converted = quantized(Skips())
    y = converted.stem(images())
    early = converted.block.body(y)
    with pytest.raises(
        OpArgumentError, match=r"block.body.2: this layer computes block.add_1 too, so only"
    ):
        early + 1
    with pytest.raises(
        OpArgumentError, match=r"block.add_1: this sum is fused into block.body.2, so one operand"
    ):
        converted.block.add_1(y, y)


@torch.no_grad()
def test_results_that_contain_what_follows() -> None:
    model = Branches().eval()
    converted = quantized(model)
    early = converted.a(images())
    assert type(early) is Early and early.shape == (4, 8, 12, 12)
    text = "a: this layer computes norm and act too, so only norm and act can read its output"
    for read in (torch.relu, lambda t: t + 1, converted.b, converted.act, converted.last):
        with pytest.raises(OpArgumentError, match=text):
            read(early)
    with pytest.raises(
        OpArgumentError,
        match="norm: this module is fused into a, so its input",
    ):
        converted.norm(torch.randn(1, 8, 4, 4))
    y = torch.randn(1, 8, 4, 4)  # an activation has nothing of a layer in it
    assert torch.equal(converted.act(y), y.relu())


@torch.no_grad()
def test_numbers_outside_of_the_model() -> None:
    model = Branches().eval()
    converted = quantized(model)
    found: Any = converted.act(converted.norm(converted.a(images())))
    expected = model.act(model.norm(model.a(images())))
    near(found + 0, expected)
    near(found.mean((2, 3)), expected.mean((2, 3)))
    assert found.shape == expected.shape and found.dtype == torch.float32
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found)), found.clone()):
        assert type(other) is Tensor
        near(other, expected)
    near(torch.from_numpy(found.numpy()), expected)
    near(torch.stack([found, found])[1], expected)
    seen = []
    converted.act.register_forward_hook(lambda module, args, y: seen.append(y))
    near(converted(images()), model(images()))
    near(seen[0].float(), expected)


class Stages(nn.Module):
    """Linear layers of which the first output may end it, and blocks that are called as often as the input says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(16)
        self.norm.weight.data.uniform_(0.5, 2)
        self.first, self.again, self.head = (nn.Linear(16, 16) for _ in range(3))
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.act(self.first(h))
        for _ in range(int(x[0, 0])):
            y = self.again(y)
        if x[0, 1] > 0:
            return y + h
        return self.head(y)


def rows(calls: int, leave: float) -> Tensor:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    x[0, :2] = torch.tensor([calls, leave])
    return x


@torch.no_grad()
@pytest.mark.parametrize(
    "mapping",
    [
        default_static_qconfig_mapping,
        default_dynamic_qconfig_mapping,
        get_smooth_quant_qconfig_mapping(alpha=0.5),
    ],
)
def test_calls_and_exits(mapping: Any, tmp_path: Any) -> None:
    model = Stages().eval()
    samples = [rows(n, e) for n in (1, 0, 3) for e in (-1.0, 1.0)]
    converted = quantized(model, *samples, mapping=mapping)
    save(converted, tmp_path / "m")
    for made in (converted, load(tmp_path / "m", Stages()), copy.deepcopy(converted)):
        for x in samples:
            near(made(x), model(x), 0.98)


@torch.no_grad()
def test_norms_with_channel_scales() -> None:
    model = Stages().eval()
    x = rows(1, -1)
    converted = quantized(model, x, mapping=get_smooth_quant_qconfig_mapping(alpha=0.5))
    scaled = converted.norm(x)
    assert type(scaled) is Scaled
    torch.testing.assert_close(scaled + 0, model.norm(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scaled.value, model.norm(x), rtol=0.05)
    # A reader that was not recorded, before and after the layer.
    wanted = converted.first(converted.norm(x))
    torch.testing.assert_close(converted.first(scaled).value, wanted.value)
    half = converted.norm(x)
    half.mul_(0.5)
    assert not torch.equal(converted.first(half).value, wanted.value)


@torch.no_grad()
def test_ranges_on_other_paths() -> None:
    # What the other branch reads is twenty times as large as what the first one does.
    model = variant(lambda self, y, way: self.pool(y)).eval()
    samples = images(), 20 * images(-1)
    converted = quantized(model, *samples)
    near(converted(samples[1]), model(samples[1]))


@torch.no_grad()
def test_sizes_of_what_is_part_of_a_sum() -> None:
    class Sizes(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = self.body[2](self.body[0](x))
            return (y + x).view(y.shape)

    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Sizes(), nn.Conv2d(8, 4, 1)).eval()
    near(quantized(model)(images()), model(images()))


@torch.no_grad()
def test_batch_norms_of_float_layers_stay() -> None:
    # The configuration leaves the layer out, and another path has no batch norm.
    mapping = copy.deepcopy(default_static_qconfig_mapping).set_module_name("a", None)
    model = Branches().eval()
    converted = quantized(model, mapping=mapping)
    assert type(converted.norm) is nn.BatchNorm2d and converted.a.weight is not model.a.weight
    assert torch.equal(converted.a(images()), model.a(images()))


@torch.no_grad()
def test_compiled_and_traced() -> None:
    model = variant(lambda self, y, way: times(self, y))
    converted = quantized(model)
    compiled = torch.compile(converted, backend="eager")
    for sign in (1.0, -1.0):
        x = images(sign)
        torch.testing.assert_close(compiled(x), converted(x), rtol=0, atol=1e-5)
        traced = torch.jit.trace(converted, x, check_trace=False)
        torch.testing.assert_close(traced(x), converted(x), rtol=0, atol=1e-5)

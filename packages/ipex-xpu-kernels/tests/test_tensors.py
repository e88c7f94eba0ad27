# SPDX-License-Identifier: Apache-2.0
"""Tensors on the device: making, moving, viewing, saving, and what goes wrong."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import raises

pytestmark = pytest.mark.usefixtures("needs_device")

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.device.type == "xpu"
    assert actual.stride() == expected.stride()
    torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def make(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 4
    return (
        x > 0 if dtype == torch.bool else x.abs().to(dtype) if dtype == torch.uint8 else x.to(dtype)
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_there_and_back(dtype: torch.dtype) -> None:
    x = make(dtype, 3, 5, 4)
    for one in (x, x.permute(2, 0, 1), x[1:, ::2], x[:, :0], x[0, 0, 0], x[:1].expand(4, 5, 4)):
        there = one.to("xpu")
        torch.testing.assert_close(there.cpu(), one, rtol=0, atol=0)
        assert there.clone().cpu().equal(one)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_conversions_of_views(source: torch.dtype, target: torch.dtype) -> None:
    x = make(source, 6, 7)
    y = x.to("xpu")
    same(y.t().to(target), x.t().to(target))
    out, expected = torch.zeros(7, 12, dtype=target, device="xpu"), torch.zeros(7, 12, dtype=target)
    out[:, ::2] = y.t()
    expected[:, ::2] = x.t()
    same(out, expected)


def test_copies_from_and_to_the_host_convert() -> None:
    x = torch.randn(5, 6)
    y = torch.empty(6, 5, dtype=torch.float16, device="xpu")
    y.t().copy_(x)
    assert y.cpu().equal(x.half().t().contiguous())
    z = torch.empty(5, 6, dtype=torch.float64)
    z.copy_(y.t())
    assert z.equal(x.half().double())


def test_views_share_memory() -> None:
    x = torch.zeros(4, 6, device="xpu")
    x.view(2, 12)[0, 3] = 1
    x.t()[2, 1] = 2
    x.unfold(1, 2, 2)[3, 2, 1] = 3
    x.as_strided((2,), (7,), 1).add_(1)
    torch.view_as_complex(x.view(4, 3, 2))[0, 0] = 5 + 6j
    expected = torch.zeros(4, 6)
    expected.view(2, 12)[0, 3] = 1
    expected.t()[2, 1] = 2
    expected.unfold(1, 2, 2)[3, 2, 1] = 3
    expected.as_strided((2,), (7,), 1).add_(1)
    torch.view_as_complex(expected.view(4, 3, 2))[0, 0] = 5 + 6j
    same(x, expected)


def test_sizes_and_storages_change() -> None:
    x = torch.arange(6.0, device="xpu")
    x.resize_(2, 3)
    x.resize_(4, 5)
    assert x.flatten()[:6].tolist() == [0, 1, 2, 3, 4, 5]
    y = torch.empty(0, device="xpu")
    y.set_(x.untyped_storage(), 2, (2, 2), (1, 2))
    assert y.tolist() == [[2, 4], [3, 5]]
    y.set_()
    assert y.numel() == 0
    out = torch.empty(0, device="xpu")
    torch.cumsum(torch.ones(3, device="xpu"), 0, out=out)
    assert out.tolist() == [1, 2, 3]


def test_saved_copied_and_pickled() -> None:
    x = torch.randn(3, 4).to("xpu")
    buffer = io.BytesIO()
    torch.save({"x": x, "t": x.t()}, buffer)
    for place in (None, "cpu", "xpu"):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=place)
        assert loaded["x"].device.type == (place or "xpu")
        assert loaded["t"].cpu().equal(x.cpu().t())
    assert copy.deepcopy(x).cpu().equal(x.cpu())
    assert pickle.loads(pickle.dumps(x)).cpu().equal(x.cpu())


def test_seeds_and_states() -> None:
    torch.manual_seed(3)
    first = (
        torch.randn(5, device="xpu"),
        torch.rand(5, device="xpu"),
        torch.randperm(9, device="xpu"),
    )
    torch.xpu.manual_seed(3)
    again = (
        torch.randn(5, device="xpu"),
        torch.rand(5, device="xpu"),
        torch.randperm(9, device="xpu"),
    )
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))
    state = torch.xpu.get_rng_state()
    a = torch.bernoulli(torch.full((20,), 0.5, device="xpu"))
    torch.xpu.set_rng_state(state)
    assert torch.bernoulli(torch.full((20,), 0.5, device="xpu")).equal(a)
    generator = torch.Generator("xpu").manual_seed(7)
    b = torch.randn(4, device="xpu", generator=generator)
    assert torch.randn(4, device="xpu", generator=torch.Generator("xpu").manual_seed(7)).equal(b)
    with pytest.raises(ValueError, match=r"new_state must have \d+ or 16 bytes, got 3"):
        torch.xpu.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_mixed_devices_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device="xpu") + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, 3, device="xpu") @ torch.ones(3, 3)
    image, kernel = torch.ones(1, 1, 4, 4, device="xpu"), torch.ones(1, 1, 3, 3)
    with pytest.raises(RuntimeError, match="same device"):
        F.conv2d(image, kernel)
    with pytest.raises(RuntimeError, match="same device"):
        F.conv2d(image, kernel.to("xpu"), torch.ones(1))
    with pytest.raises(RuntimeError, match="same device"):
        F.embedding(torch.tensor([1]), torch.ones(3, 3, device="xpu"))
    with pytest.raises(RuntimeError, match="device must be in"):
        torch.Generator("xpu:9")
    with pytest.raises(TypeError, match="cpu"):
        torch.ones(3, device="xpu").numpy()
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device="xpu:9")


def test_numbers_of_the_host_join() -> None:
    x = torch.tensor([1.0, -2.0, 0.0])
    y = x.to("xpu")
    half = torch.tensor(0.5, dtype=torch.float64)
    for f in (
        lambda a: a + half,
        lambda a: half - a,
        lambda a: a * half,
        lambda a: half / (a + 3),
        lambda a: torch.sub(a, half, alpha=3),
        lambda a: torch.add(half.float(), a, alpha=2),
        lambda a: a / 3,
        lambda a: 2 - a,
        lambda a: a + 1j,
    ):
        torch.testing.assert_close(f(y).cpu(), f(x))
    assert torch.ones(2, dtype=torch.bfloat16, device="xpu").add(1e-3).dtype == torch.bfloat16


def test_results_of_ops_keep_their_strides() -> None:
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    y = x.to("xpu")
    assert y.is_contiguous(memory_format=torch.channels_last)
    same(y.relu() * 2 + y, x.relu() * 2 + x)
    same(y.permute(3, 1, 0, 2).sigmoid().mul(0).add(1), torch.ones_like(x.permute(3, 1, 0, 2)))


def test_dlpack_and_pinned_memory() -> None:
    x = torch.arange(4.0, device="xpu")
    y = torch.from_dlpack(x)
    y[0] = 9
    assert x[0].item() == 9
    pinned = torch.ones(1000).pin_memory()
    assert pinned.is_pinned() and not torch.ones(3).is_pinned()
    there = pinned.to("xpu", non_blocking=True)
    torch.xpu.synchronize()
    assert there.sum().item() == 1000
    loader = torch.utils.data.DataLoader(list(torch.arange(6.0)), batch_size=3, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


@pytest.mark.parametrize("device", ["cpu", "xpu"])
def test_copies_within_the_same_memory(device: str) -> None:
    x = torch.arange(10.0, device=device)
    for write in (
        lambda: x[1:].copy_(x[:-1]),
        lambda: x[:1].expand(3).copy_(x[:3]),
        lambda: x[1:].add_(x[:-1]),
    ):
        with pytest.raises(RuntimeError, match=r"refers? to a single memory location"):
            write()
    assert x[:3].copy_(x[:3]).tolist() == [0, 1, 2]
    assert x[:3].copy_(x[4:7]).tolist() == [4, 5, 6]
    assert x.view(2, 5).copy_(x.view(2, 5)).sum().item() == 57


def test_printing_and_indexing() -> None:
    x = torch.arange(12.0, device="xpu").view(3, 4)
    assert "device='xpu:0'" in repr(x)
    index = torch.tensor([2, 0], device="xpu")
    assert x[index, 1:].tolist() == [[9, 10, 11], [1, 2, 3]]
    x[x > 5] = 0
    assert x.sum().item() == 15
    with raises(IndexError, match="index 7 is out of", op="index"):
        x[torch.tensor([7], device="xpu")]
    assert x.tolist()[0] == [0, 1, 2, 3]
    assert x[0, 1].item() == 1


def test_fake_tensors_and_tracing() -> None:
    def f(a: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(a) @ a.t()

    x = torch.randn(3, 4, device="xpu")
    for backend in ("eager", "aot_eager"):
        torch.testing.assert_close(torch.compile(f, backend=backend, fullgraph=True)(x), f(x))
    torch.testing.assert_close(torch.jit.trace(f, x)(x), f(x))
    torch.testing.assert_close(torch.vmap(lambda a: a * 2 + 1)(x), x * 2 + 1)
    with torch.device("xpu"):
        assert torch.ones(2).device.type == "xpu"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_sparse_quantized_and_strided_nested_tensors_are_refused() -> None:
    x = torch.eye(3, device="xpu")
    refused: list[Callable[[], object]] = [
        x.to_sparse,
        x.to_sparse_csr,
        lambda: torch.eye(3).to_sparse().to("xpu"),
        lambda: torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="xpu"),
        lambda: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    ]
    for make in refused:
        with pytest.raises(NotImplementedError, match="sparse and quantized tensors are not"):
            make()
    parts = [torch.ones(3, 2, device="xpu"), torch.ones(1, 2, device="xpu")]
    with pytest.raises(NotImplementedError, match=r"use layout=torch\.jagged"):
        torch.nested.nested_tensor([p.cpu() for p in parts]).to("xpu")
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert (jagged * 2).values().sum().item() == 16


def test_tensors_of_the_host_are_not_written_to() -> None:
    generator = torch.Generator("xpu")
    for write in (
        lambda: torch.empty((), dtype=torch.int64).random_(generator=generator),
        lambda: torch.zeros(()).addcmul_(torch.ones((), device="xpu"), torch.ones(())),
    ):
        with pytest.raises(RuntimeError, match="on the same device"):
            write()

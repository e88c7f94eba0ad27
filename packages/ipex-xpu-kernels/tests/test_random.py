# SPDX-License-Identifier: Apache-2.0
"""Random numbers: that they repeat with the seed, follow their distributions and refuse wrong arguments."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_checks import FLOATS, raises

import ipex_xpu_kernels

pytestmark = pytest.mark.usefixtures("needs_device", "no_host")
Tensor = torch.Tensor
N = 1 << 16


@pytest.fixture
def no_host(always: None) -> None:
    ipex_xpu_kernels.set_fallback_mode("error")
    torch.xpu.manual_seed(20)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="xpu")


def distance(sample: Tensor, cdf: Callable[[Tensor], Tensor]) -> float:
    """Kolmogorov's distance of the sample from its distribution, times the root of its size."""
    x = sample.cpu().double().sort().values
    n = x.numel()
    exact = cdf(x)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(steps[1:] - exact, exact - steps[:-1]).max()) * math.sqrt(n)


CONTINUOUS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "normal": (lambda t: t.normal_(2, 3), lambda x: torch.special.ndtr((x - 2) / 3)),
    "uniform": (lambda t: t.uniform_(-1, 3), lambda x: (x + 1) / 4),
    "exponential": (lambda t: t.exponential_(0.5), lambda x: 1 - torch.exp(-0.5 * x)),
    "cauchy": (lambda t: t.cauchy_(1, 2), lambda x: torch.atan((x - 1) / 2) / math.pi + 0.5),
    "log_normal": (lambda t: t.log_normal_(0, 1), lambda x: torch.special.ndtr(x.log())),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_distributions(name: str) -> None:
    draw, cdf = CONTINUOUS[name]
    first, second = draw(empty(N)), draw(empty(N))
    # 1.95: one draw of 2000 is further away. The seed is fixed.
    for part in (first, second, first[: N // 2], first[N // 2 :], first[::4], first[3::4]):
        assert distance(part, cdf) < 1.95
    a, b = (cdf(x.cpu().double()) - 0.5 for x in (first, second))
    for x, y in ((a, b), (a[: N // 2], a[N // 2 :]), (a[1:], a[:-1])):
        assert abs((x * y).mean()) * 12 * math.sqrt(x.numel()) < 4  # not correlated
    assert not torch.equal(a[: N // 2], a[N // 2 :])
    for dtype in (torch.bfloat16, torch.float16):
        torch.xpu.manual_seed(20)
        rounded = draw(empty(N, dtype=dtype))
        assert rounded.dtype == dtype
        if name != "uniform":
            torch.testing.assert_close(rounded.cpu(), first.to(dtype).cpu())


def test_moments() -> None:
    x = torch.randn(N, device="xpu")
    assert abs(x.mean().item()) < 4 / 256 and abs(x.var().item() - 1) < 4 * math.sqrt(2) / 256
    assert 3.5 < x.abs().max().item() < 6.7
    z = torch.randn(N, device="xpu", dtype=torch.complex64)
    for part in (torch.view_as_real(z)[:, 0].cpu(), torch.view_as_real(z)[:, 1].cpu()):
        assert abs(part.var().item() - 0.5) < 4 / 256
    mean, deviation = torch.full((N,), 5.0, device="xpu"), torch.full((N,), 0.5, device="xpu")
    for y in (
        torch.normal(mean, deviation),
        torch.normal(5.0, deviation),
        torch.normal(mean, 0.5),
        torch.normal(mean, deviation, out=empty(N)),
    ):
        assert distance(y, lambda v: torch.special.ndtr((v - 5) / 0.5)) < 1.95
    g = empty(N).geometric_(0.25).cpu()
    assert g.min() == 1 and abs(g.mean().item() - 4) < 4 * math.sqrt(12) / 256
    assert empty(3, dtype=torch.float32).normal_(float("nan"), 1).cpu().isnan().all()


def test_uniform_numbers_stay_within_the_range() -> None:
    for dtype in FLOATS:
        for low, high in ((0, 1), (1, 2), (-3, -2.5), (100, 101), (5, 5), (1.0001, 1.0002)):
            x = empty(N, dtype=dtype).uniform_(low, high).cpu().double()
            rounded = torch.tensor(low, dtype=dtype).double()
            assert ((x >= low) | (x == rounded)).all()
            assert ((x < high) | (x == rounded)).all()
    x = torch.rand(N, device="xpu").cpu()
    assert 0 <= x.min() < 1e-3 and 1 - 1e-3 < x.max() < 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers(dtype: torch.dtype) -> None:
    top = 2 if dtype == torch.bool else 7
    x = empty(N, dtype=dtype).random_(top).cpu().double()
    counts = torch.bincount(x.long(), minlength=top)
    expected = N / top
    assert ((counts - expected).square() / expected).sum() < 30  # chi square, 6 degrees of freedom
    if dtype not in (torch.bool, torch.uint8):
        y = empty(N, dtype=dtype).random_(-3, 4).cpu()
        assert (y.min(), y.max()) == (-3, 3)
    everything = empty(N, dtype=dtype).random_().cpu().double()
    digits = {torch.float32: 24, torch.bfloat16: 8, torch.float16: 11}
    bits = digits.get(dtype, {torch.bool: 1, torch.uint8: 8}.get(dtype, 8 * dtype.itemsize - 1))
    assert everything.min() >= 0 and everything.max() <= 2.0**bits
    assert abs(everything.mean() / (2.0**bits - (bits < 12)) - 0.5) < 0.01


def test_the_largest_ranges() -> None:
    x = empty(N, dtype=torch.int64)
    x.random_(-(2**63), None)
    host = x.cpu()
    assert host.min() < -(2**62) and host.max() > 2**62
    assert abs(host.gt(0).float().mean() - 0.5) < 0.01
    assert abs((host & 1).float().mean() - 0.5) < 0.01  # the low bits are random, too
    host = torch.randint(2**40, 2**40 + 3, (100,), device="xpu").cpu()
    assert set(host.tolist()) == {2**40 + i for i in range(3)}


@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool, torch.int64, torch.uint8, torch.float64])
def test_bernoulli(dtype: torch.dtype) -> None:
    if dtype == torch.float64:  # copied from float32 by the host
        ipex_xpu_kernels.set_fallback_mode("silent")
    x = empty(N, dtype=dtype).bernoulli_(0.3).cpu().double()
    assert set(x.tolist()) == {0.0, 1.0} and abs(x.mean() - 0.3) < 4 * 0.46 / 256
    p = torch.tensor([0.0, 1.0, 0.75], device="xpu")
    y = empty(N, 3, dtype=dtype).bernoulli_(p).cpu().double().mean(0)
    assert y[0] == 0 and y[1] == 1 and abs(y[2] - 0.75) < 4 * 0.44 / 256
    if dtype.is_floating_point:
        shares = torch.full((N,), 0.25, device="xpu", dtype=dtype)
        drawn = torch.bernoulli(shares)
        assert drawn.dtype == dtype and abs(drawn.cpu().double().mean() - 0.25) < 0.01


@pytest.mark.parametrize("dtype", FLOATS)
def test_multinomial(dtype: torch.dtype) -> None:
    ipex_xpu_kernels.set_fallback_mode("silent")  # for torch's checks, and the largest of several
    ipex_xpu_kernels.reset_fallback_stats()
    weights = torch.tensor([[0.0, 2, 1, 5], [1, 1, 0, 2]], dtype=dtype)
    p = weights.to("xpu")
    drawn = torch.multinomial(p, 8000, replacement=True).cpu()
    rows = torch.multinomial(p.repeat(4000, 1), 1).cpu().view(4000, 2).t()
    for sample in (drawn, rows):
        for row, shares in zip(sample, weights.double(), strict=True):
            counts, expected = torch.bincount(row, minlength=4), shares / shares.sum() * row.numel()
            assert counts[shares == 0].sum() == 0
            some = shares > 0
            assert ((counts - expected)[some].square() / expected[some]).sum() < 17  # chi square, 3
    assert torch.multinomial(p[0], 5, replacement=True).shape == (5,)
    out = torch.empty(0, dtype=torch.int64, device="xpu")
    assert torch.multinomial(p, 3, True, out=out) is out and out.shape == (2, 3)
    used = {name.partition(".")[0] for name in ipex_xpu_kernels.fallback_stats()}
    assert used.isdisjoint({"aten::multinomial", "aten::exponential_", "aten::div", "aten::argmax"})
    for count, replacement in ((0, True), (5, False)):
        with pytest.raises(RuntimeError, match="cannot sample"):
            torch.multinomial(p, count, replacement)
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        torch.multinomial(-p, 2, replacement=True)
    three = torch.multinomial(p, 3).cpu()
    assert [sorted(row) for row in three.tolist()] == [[1, 2, 3], [0, 1, 3]]


def test_permutations() -> None:
    for n in (0, 1, 2, 15, 16, 17, 1000, 4096):
        for dtype in (torch.int64, torch.int32, torch.float32):
            x = torch.randperm(n, device="xpu", dtype=dtype).cpu()
            assert torch.equal(x.sort().values, torch.arange(n, dtype=dtype))
    # All orders are equally frequent, and all places of a longer one.
    draws = 2400
    orders = torch.stack([torch.randperm(4, device="xpu") for _ in range(draws)]).cpu().tolist()
    counts = [orders.count(list(p)) for p in itertools.permutations(range(4))]
    assert sum((c - 100) ** 2 / 100 for c in counts) < 56  # 23 degrees of freedom
    places = torch.stack([torch.randperm(17, device="xpu") for _ in range(1700)]).cpu()
    for place in (0, 8, 16):
        found = torch.bincount(places[:, place], minlength=17)
        assert ((found - 100).square() / 100).sum() < 45  # 16 degrees of freedom
    for n, error in ((3000, torch.float16), (300, torch.uint8)):
        with pytest.raises(RuntimeError):
            torch.randperm(n, device="xpu", dtype=error)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: draw for name, (draw, _) in CONTINUOUS.items()},
    "bernoulli": lambda t: t.bernoulli_(0.5),
    "bernoulli_each": lambda t: t.bernoulli_(torch.full_like(t, 0.5)),
    "random": lambda t: t.random_(1000),
    "geometric": lambda t: t.geometric_(0.1),
    "randperm": lambda t: torch.randperm(1000, device="xpu"),
    "dropout": lambda t: F.dropout(torch.ones_like(t), 0.5),
}


@pytest.mark.parametrize("name", DRAWS)
def test_numbers_repeat_with_the_seed_and_the_state(name: str) -> None:
    def draw() -> Tensor:
        return DRAWS[name](empty(1000)).cpu()

    torch.xpu.manual_seed(5)
    first, second = draw(), draw()
    state = torch.xpu.get_rng_state()
    third = draw()
    with torch.random.fork_rng(devices=[0], device_type="xpu"):
        draw()
    fourth = draw()
    torch.xpu.set_rng_state(state)
    assert torch.equal(draw(), third) and torch.equal(draw(), fourth)
    torch.manual_seed(5)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    seen = [first, second, third, fourth]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(seen, 2))


def test_generators_have_streams_of_their_own() -> None:
    def draw(generator: torch.Generator | None = None) -> Tensor:
        return torch.randn(100, device="xpu", generator=generator).cpu()

    generator, other = (torch.Generator("xpu").manual_seed(3) for _ in range(2))
    torch.xpu.manual_seed(7)
    expected = draw()
    torch.xpu.manual_seed(7)
    mine = draw(generator)
    state = generator.get_state()
    assert torch.equal(draw(), expected) and torch.equal(draw(other), mine)
    following = draw(generator)
    other.manual_seed(9)
    other.set_state(state)
    assert torch.equal(draw(other), following) and torch.equal(
        draw(generator.clone_state()), draw(generator)
    )
    for call in (
        lambda g: torch.randn(3, device="xpu", generator=g),
        lambda g: empty(3).uniform_(generator=g),
        lambda g: torch.randperm(3, device="xpu", generator=g),
    ):
        with pytest.raises(RuntimeError, match="Expected a 'xpu' device type for generator"):
            call(torch.Generator())


def test_strides_do_not_change_the_numbers() -> None:
    torch.xpu.manual_seed(1)
    expected = empty(4, 6, 5, 3).normal_().cpu()
    for layout in (
        empty(4, 6, 5, 3).contiguous(memory_format=torch.channels_last),
        empty(3, 5, 6, 4).permute(3, 2, 1, 0),
        empty(4, 6, 5, 6)[..., ::2],
    ):
        torch.xpu.manual_seed(1)
        assert torch.equal(layout.normal_().cpu(), expected)
    base = torch.zeros(10, device="xpu")
    base[::2].uniform_(1, 2)
    assert base[1::2].eq(0).all() and base[::2].ge(1).all()
    with pytest.raises(RuntimeError, match="single memory location"):
        torch.zeros(1, device="xpu").expand(3).normal_()
    for shape in ((0,), (3, 0)):
        assert empty(*shape).normal_().shape == shape
    assert empty(1)[0].uniform_(2, 3).item() >= 2


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.normal_(0, -1),
        lambda t: t.uniform_(2, 1),
        lambda t: t.uniform_(-3e38, 3e38),
        lambda t: t.exponential_(0),
        lambda t: t.exponential_(-1.0),
        lambda t: t.cauchy_(0, 0),
        lambda t: t.log_normal_(0, 0),
        lambda t: t.geometric_(1.0),
        lambda t: t.bernoulli_(1.5),
        lambda t: t.random_(5, 5),
        lambda t: t.random_(0),
        lambda t: t.to(torch.uint8).random_(-1, 5),
        lambda t: t.long().normal_(),
        lambda t: t.long().exponential_(),
        lambda t: torch.randperm(-1, device=t.device),
        lambda t: torch.normal(t, -t - 1),
        lambda t: torch.randint(3, 3, (2,), device=t.device),
    ],
)
def test_wrong_arguments_raise_what_the_host_raises(call: Callable[[Tensor], Tensor]) -> None:
    ipex_xpu_kernels.set_fallback_mode("silent")
    texts = []
    for device in ("cpu", "xpu"):
        with pytest.raises((RuntimeError, NotImplementedError, ValueError)) as error:
            call(torch.zeros(4, device=device))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def test_wrong_shares_are_named() -> None:
    for wrong in (1.5, -0.25, float("nan")):
        with raises(RuntimeError, match=rf"bernoulli_: p must be in \[0, 1\], got {wrong}"):
            torch.bernoulli(torch.tensor([0.5, wrong], device="xpu"))


def test_compiled_graphs_that_take_no_tensor() -> None:
    ipex_xpu_kernels.set_fallback_mode("silent")
    made = torch.compile(
        lambda n: torch.rand(n, device="xpu") + torch.ones(n, device="xpu"), backend="ipex"
    )
    first = made(5).cpu()
    torch.xpu.manual_seed(20)
    again, other = made(5).cpu(), made(5).cpu()
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert 1 <= first.min() <= first.max() < 2


def test_layers_start_with_the_same_numbers() -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(torch.nn.TransformerEncoderLayer(8, 2, 16, device="xpu"))
    for a, b in zip(*(m.state_dict().values() for m in models), strict=True):
        assert torch.equal(a.cpu(), b.cpu())
    weight = models[0].linear1.weight
    assert weight.abs().max().item() <= 1 / math.sqrt(8) and weight.std().item() > 0.15


def test_dropout_repeats_with_the_seed_and_keeps_the_share() -> None:
    x = torch.ones(1 << 17, device="xpu", requires_grad=True)
    ipex_xpu_kernels.set_fallback_mode("error")
    torch.xpu.manual_seed(3)
    first, second = F.dropout(x, 0.25), F.dropout(x, 0.25)
    torch.xpu.manual_seed(3)
    again = F.dropout(x, 0.25)
    (grad,) = torch.autograd.grad(first.sum(), x)
    ipex_xpu_kernels.set_fallback_mode("silent")
    first, second, again, grad = first.cpu(), second.cpu(), again.cpu(), grad.cpu()
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert torch.equal(grad, first)
    assert set(first.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    kept = first != 0
    # 5 standard deviations of the share, and of the share of neighbors that are both kept
    assert abs(kept.float().mean() - 0.75) < 5 * (0.75 * 0.25 / kept.numel()) ** 0.5
    assert abs((kept[1:] & kept[:-1]).float().mean() - 0.75**2) < 0.01
    assert abs((kept & (second != 0)).float().mean() - 0.75**2) < 0.01

# SPDX-License-Identifier: Apache-2.0
"""State dicts, restoring, copying and moving of optimized models."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from ipex_core.module_swap.state_dict import SavedTensor
from ipex_core.nn import PackedWeight
from ipex_core.optimization import optimize, restore

pytestmark = pytest.mark.usefixtures("small_weights_are_packed")

DTYPES = [None, torch.bfloat16, torch.float16]


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up = nn.Linear(size, 2 * size)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * size, size)
        self.norm = nn.LayerNorm(size)

    def forward(self, x):
        return self.norm(self.down(self.act(self.up(x))) + x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 64, 3, bias=False)
        self.bn = nn.BatchNorm2d(64)
        self.block = Block(64)
        self.scale = nn.Parameter(torch.randn(64))
        self.register_buffer("table", torch.randn(64))

    def forward(self, x):
        x = torch.relu(self.bn(self.conv(x))).mean((2, 3))
        return self.block(x) * self.scale + self.table


X = torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(3))


def make():
    torch.manual_seed(0)
    model = Net()
    model.bn.running_mean.normal_()
    model.bn.running_var.uniform_(0.5, 2.0)
    nn.init.normal_(model.bn.weight)
    return model.eval()


def equal_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.is_floating_point():
        kind = kinds[a.element_size()]
        a, b = a.detach().contiguous().view(kind), b.detach().contiguous().view(kind)
    assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_is_the_original(dtype):
    model = make()
    want, got = model.state_dict(), optimize(model, dtype=dtype).state_dict()
    assert list(want) == list(got)
    for name in want:
        equal_bits(want[name], got[name])
        assert want[name].stride() == got[name].stride()
        assert type(got[name]) is torch.Tensor and not got[name].requires_grad


@pytest.mark.parametrize("dtype", DTYPES)
def test_state_dict_with_keep_vars(dtype):
    model = make()
    got = optimize(model, dtype=dtype).state_dict(keep_vars=True)
    for name, value in model.state_dict(keep_vars=True).items():
        equal_bits(value, got[name])
        assert isinstance(got[name], nn.Parameter) == isinstance(value, nn.Parameter)
        assert got[name].requires_grad == value.requires_grad


def test_state_dict_of_a_child():
    model = make()
    got = optimize(model, dtype=torch.bfloat16).block.state_dict(prefix="p.")
    for name, value in model.block.state_dict(prefix="p.").items():
        equal_bits(value, got[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_state_dict(dtype):
    other = make()
    with torch.no_grad():
        for p in other.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        other.bn.running_mean.add_(1.0)
    result = optimize(make(), dtype=dtype)
    assert str(result.load_state_dict(other.state_dict())) == "<All keys matched successfully>"
    with torch.no_grad():
        torch.testing.assert_close(result(X), optimize(other, dtype=dtype)(X))
    for name, value in result.state_dict().items():
        equal_bits(value, other.state_dict()[name])
    for p, q in zip(restore(result).parameters(), other.parameters(), strict=True):
        equal_bits(p, q)


def test_loading_the_batch_norm_alone_folds_again():
    model, other = make(), make()
    other.bn.running_mean.add_(1.0)
    result = optimize(model)
    result.bn.load_state_dict(other.bn.state_dict())
    torch.testing.assert_close(result(X), other(X), rtol=1e-4, atol=1e-4)


def test_load_errors_are_those_of_torch():
    result = optimize(make(), dtype=torch.bfloat16)
    state = result.state_dict()
    state["block.up.weight"] = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="size mismatch for block"):
        result.load_state_dict(state)
    del state["block.up.weight"]
    with pytest.raises(RuntimeError, match="Missing key"):
        result.load_state_dict(state)
    want = make().state_dict()
    for name, value in result.state_dict().items():
        equal_bits(value, want[name])


@pytest.mark.parametrize("dtype", DTYPES)
def test_restore(dtype):
    model = make()
    with torch.no_grad():
        want = model(X)
    result = optimize(model, dtype=dtype)
    ids = {n: id(p) for n, p in result.block.norm.named_parameters()}
    assert restore(result) is result
    assert [type(m) for m in result.modules()] == [type(m) for m in model.modules()]
    for a, b in zip(result.modules(), model.modules(), strict=True):
        assert sorted(a.__dict__) == sorted(b.__dict__)
        for table in ("_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks"):
            assert not a.__dict__[table]
    for (n, p), (m, q) in zip(result.named_parameters(), model.named_parameters(), strict=True):
        assert n == m and p.stride() == q.stride() and type(p) is nn.Parameter
        equal_bits(p, q)
    assert ids == {n: id(p) for n, p in result.block.norm.named_parameters()}
    with torch.no_grad():
        assert torch.equal(result(X), want)
    with pytest.raises(ValueError):
        restore(result)


def test_restore_in_place_keeps_parameter_objects():
    model = make()
    ids = {n: id(p) for n, p in model.named_parameters()}
    restore(optimize(model, dtype=torch.bfloat16, inplace=True))
    assert ids == {n: id(p) for n, p in model.named_parameters()}


def test_restored_model_trains():
    model = restore(optimize(make(), dtype=torch.bfloat16)).train()
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "pickle2": lambda m: pickle.loads(pickle.dumps(m, 2)),
    "save": lambda m: _save_and_load(m),
}


def _save_and_load(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", COPIES)
def test_copies(how, dtype):
    model = make()
    result = optimize(model, dtype=dtype)
    twin = COPIES[how](result)
    assert [type(m) for m in twin.modules()] == [type(m) for m in result.modules()]
    assert isinstance(twin.block.up.weight, PackedWeight) == (
        isinstance(result.block.up.weight, PackedWeight)
    )
    with torch.no_grad():
        want = result(X)
        assert torch.equal(twin(X), want)
        twin.load_state_dict(
            {k: v * 0 if v.is_floating_point() else v for k, v in model.state_dict().items()}
        )
        assert torch.equal(result(X), want)  # nothing is shared
    for p, q in zip(restore(COPIES[how](result)).parameters(), model.parameters(), strict=True):
        equal_bits(p, q)


def test_no_reference_cycle():
    model = optimize(make())
    assert "forward" in model.block.__dict__
    gone = weakref.ref(model)
    gone_block = weakref.ref(model.block)
    gc.disable()
    try:
        del model
        assert gone() is None and gone_block() is None
    finally:
        gc.enable()


def test_moving_and_casting():
    result = optimize(make(), dtype=torch.bfloat16)
    with torch.no_grad():
        want = result(X)
        assert torch.equal(result.to("cpu")(X), want)
        wide = copy.deepcopy(result).float()
        assert wide.block.up.weight.dtype == torch.float32
        torch.testing.assert_close(wide(X), want.float(), rtol=0.05, atol=0.05)
        meta = copy.deepcopy(result).to("meta")
        assert all(p.is_meta for p in meta.parameters())
        double = optimize(make()).double()
        torch.testing.assert_close(double(X.double()).float(), make()(X), rtol=1e-4, atol=1e-4)


def test_requires_grad_and_zero_grad():
    result = optimize(make())
    assert all(p.requires_grad for p in result.parameters())
    result.requires_grad_(False)
    assert not any(p.requires_grad for p in result.parameters())
    assert not result(X).requires_grad
    result.zero_grad()
    assert result.share_memory() is result
    with torch.no_grad():
        assert torch.equal(result(X), optimize(make())(X))


def test_weight_of_a_packed_layer():
    model = make()
    layer = optimize(model).block.up
    weight = layer.weight
    assert isinstance(weight, PackedWeight) and isinstance(weight, nn.Parameter)
    assert (
        weight.shape == (128, 64) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    )
    assert weight.numel() == 128 * 64 and "format=" in repr(weight)
    plain = model.block.up.weight
    assert (
        torch.equal(weight, plain)
        and torch.equal(weight + 0, plain)
        and torch.equal(weight[3:5].t(), plain[3:5].t())
    )
    assert torch.equal(weight.detach().clone(), plain) and isinstance(weight.detach(), PackedWeight)
    assert torch.equal(copy.deepcopy(weight), plain)
    assert torch.equal(pickle.loads(pickle.dumps(weight)), plain)
    assert weight.abs().max().item() == plain.abs().max().item()
    with (
        pytest.raises(RuntimeError, match="packed and cannot be changed in place"),
        torch.no_grad(),
    ):
        weight.mul_(2)
    assert torch.equal(weight, plain)


def test_a_weight_that_the_user_assigns_is_used():
    model = make()
    result = optimize(model)
    new = nn.Parameter(torch.randn(128, 64))
    result.block.up.weight = new
    model.block.up.weight = new
    with torch.no_grad():
        torch.testing.assert_close(result(X), model(X), rtol=1e-4, atol=1e-4)


def test_only_packed_layers_still_have_parameters():
    model = optimize(nn.Sequential(nn.Linear(64, 64, bias=False)).eval(), dtype=torch.bfloat16)
    first = next(model.parameters())
    assert first.dtype == torch.bfloat16 and first.device == torch.device("cpu")
    assert [n for n, _ in model.named_parameters()] == ["0.weight"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_special_values_are_given_back(dtype):
    patterns = torch.tensor(
        [  # zeros, subnormals, infinities, NaNs, ties, neighbors of ties, overflow to infinity
            0,
            -2147483648,
            1,
            -1,
            0x7F800000,
            -0x800000,
            0x7FC00000,
            0x7F800001,
            0x7FFFFFFF,
            0x3F808000,
            0x3F818000,
            0x3F807FFF,
            0x3F808001,
            0x7F7FFFFF,
            0x00008000,
            0x00018000,
        ],
        dtype=torch.int64,
    ).to(torch.int32)
    random = torch.randint(-(2**31), 2**31 - 1, (4080,), dtype=torch.int64).to(torch.int32)
    values = torch.cat([patterns, random]).view(torch.float32).view(64, 64)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).eval()
    model[0].weight.data = values.clone()
    result = optimize(model, dtype=dtype)
    equal_bits(result.state_dict()["0.weight"], values)
    equal_bits(restore(result)[0].weight, values)


def test_saved_tensor_memory_is_that_of_the_original():
    original = torch.randn(1000, 100)
    cast = original.to(torch.bfloat16)
    saved = SavedTensor()
    saved.capture(original, cast)
    assert saved.form == "split"
    assert saved.nbytes + cast.nbytes < 1.01 * original.nbytes
    exact = cast.float()
    saved.capture(exact, cast)
    assert saved.nbytes == 0 and torch.equal(saved.original(cast), exact)


def test_strided_parameters_come_back_strided():
    model = nn.Sequential(nn.Linear(64, 96, bias=False)).eval()
    model[0].weight.data = torch.randn(64, 96).t()
    want = model[0].weight.detach().clone(memory_format=torch.preserve_format)
    result = optimize(model, dtype=torch.bfloat16)
    got = result.state_dict()["0.weight"]
    assert got.stride() == want.stride() and torch.equal(got, want)
    assert restore(result)[0].weight.stride() == want.stride()


def test_gradients_through_an_optimized_model():
    model = make()
    result = optimize(model)
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    model(x).square().sum().backward()
    result(y).square().sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-4)
    up, want = result.block.up.weight.grad, model.block.up.weight.grad
    torch.testing.assert_close(up, want, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        result.block.norm.bias.grad, model.block.norm.bias.grad, rtol=1e-3, atol=1e-3
    )
    assert result.conv.weight.grad is not None


@pytest.mark.parametrize("dtype", DTYPES)
def test_assigning_unties_parameters(dtype):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(40, 64)
            self.head = nn.Linear(64, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    model = Tied().eval()
    result = optimize(model, dtype=dtype)
    values = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    result.load_state_dict({k: v.clone() for k, v in values.items()}, assign=True)
    ids = torch.arange(40)
    torch.testing.assert_close(result(ids).float(), model(ids), rtol=3e-2, atol=0.3)
    for saved in (result.state_dict(), restore(result).state_dict()):
        assert all(torch.equal(saved[k], v) for k, v in values.items())
    assert torch.equal(result(ids), model(ids))


@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), float("-inf"), 1e-39, 3.0])
def test_weights_written_to_after_the_cast_to_bfloat16(value):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4)).eval()
    fast = optimize(model, dtype=torch.bfloat16)
    with torch.no_grad():
        fast[0].weight[:3] = value
    for saved in (fast.state_dict()["0.weight"], restore(fast).state_dict()["0.weight"]):
        assert torch.equal(saved[3:], model[0].weight[3:])
        torch.testing.assert_close(saved[:3], torch.full((3, 4), value), rtol=4e-3, atol=1e-40)
        if value == 0.0:
            assert not saved[:3].any()

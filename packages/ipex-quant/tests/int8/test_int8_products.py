# SPDX-License-Identifier: Apache-2.0
"""Products of activations on 8-bit integers: matmul, bmm, @ and the interaction of recommendation models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.quantization import QConfigMapping
from torch.nn import functional

import ipex_core
from ipex_core.nn.embedding import MergedEmbeddingBagWithCat
from ipex_core.nn.functional import interaction
from ipex_quant import (
    Int8Linear,
    Int8MatMul,
    MatMul,
    convert,
    default_static_qconfig,
    default_static_qconfig_mapping,
    load,
    prepare,
    save,
)
from ipex_quant.int8.modules.matmul import Int8Interaction

#: Products of activations too.
ALL = QConfigMapping().set_global(default_static_qconfig)
ALL.set_object_type(torch.matmul, default_static_qconfig)
ALL.set_object_type(interaction, default_static_qconfig)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Attention(nn.Module):
    """Attention as it is written by hand."""

    def __init__(self, size=64, heads=2):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) * 0.2
        y = torch.softmax(scores, dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Gram(nn.Module):
    def forward(self, x):
        return x @ x.transpose(-1, -2)


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 16), nn.ReLU())
        self.bags = nn.ModuleList(nn.EmbeddingBag(20, 16, mode="sum") for _ in range(3))
        self.top = nn.Sequential(nn.Linear(16 + 6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        rows = [bag(indices, offsets) for bag in self.bags]
        return self.top(interaction(x, *rows))


def quantized(model, *inputs, mapping=ALL, **options):
    prepared = prepare(model.eval(), mapping, example_inputs=inputs)
    with torch.no_grad():
        for _ in range(3):
            prepared(*inputs)
    return convert(prepared, **options)


def close(got, want, least=0.999):
    assert functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > least


def kinds(model, kind):
    return [m for m in model.modules() if isinstance(m, kind)]


@torch.no_grad()
def test_attention():
    model, x = Attention().eval(), torch.randn(2, 40, 64)
    fast = quantized(model, x, check=x)
    assert len(kinds(fast, Int8MatMul)) == 2 and len(kinds(fast, Int8Linear)) == 4
    close(fast(x), model(x))
    assert type(fast) is Attention
    rows = [row for row in ipex_core.explain(fast).rows if row.kernel == "int8_matmul"]
    assert len(rows) == 2 and all("HistogramObserver" in row.text for row in rows)
    other = torch.randn(1, 23, 64)  # another length
    close(fast(other), model(other), 0.99)


@torch.no_grad()
def test_large_products_are_int8_by_default():
    """As in IPEX, where that is faster."""
    model, x = Attention(128).eval(), torch.randn(2, 128, 128)
    fast = quantized(nn.Sequential(model), x, mapping=default_static_qconfig_mapping)
    assert len(kinds(fast, Int8MatMul)) == 2
    close(fast(x), model(x), 0.99)
    one = fast[0].matmul_1(x[:, :1], x.transpose(1, 2))  # one row: float is faster
    assert torch.equal(one, x[:, :1] @ x.transpose(1, 2))
    linears = QConfigMapping().set_object_type(nn.Linear, default_static_qconfig)
    without = QConfigMapping().set_global(default_static_qconfig)
    without.set_object_type(torch.matmul, None)
    for mapping, text in (
        (linears, "if the configuration names them"),
        (without, "the configuration leaves it out"),
    ):
        plain = quantized(nn.Sequential(model), x, mapping=mapping)
        assert not kinds(plain, Int8MatMul) and len(kinds(plain, Int8Linear)) == 4
        texts = [row.text for row in ipex_core.explain(plain).rows if not row.done]
        assert any(text in it for it in texts)
    for rows in (127, 128):
        gram = nn.Sequential(nn.Linear(64, 64), Gram())
        found = quantized(gram, torch.randn(2, rows, 64), mapping=default_static_qconfig_mapping)
        assert bool(kinds(found, Int8MatMul)) == (rows == 128)


@torch.no_grad()
def test_interaction_by_another_name():
    """As IPEX's tests call it: an attribute of the model."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.f = interaction

        def forward(self, a, b, c):
            return self.f(a.relu(), b.relu(), c.relu())

    inputs = [torch.randn(20, 32) for _ in range(3)]
    fast = quantized(Model(), *inputs)
    assert len(kinds(fast, Int8Interaction)) == 1
    close(fast(*inputs), Model()(*inputs))


@torch.no_grad()
def test_merged_embedding_bag_with_cat(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            bags = [nn.EmbeddingBag(n, 16, mode="sum") for n in (20, 30, 7)]
            self.bags = MergedEmbeddingBagWithCat.from_embeddingbag_list(bags)
            self.bottom, self.top = nn.Linear(13, 16), nn.Linear(64, 4)

        def forward(self, dense, indices, offsets):
            return self.top(self.bags(indices, offsets, self.bottom(dense)))

    model, dense = Model().eval(), torch.randn(5, 13)
    indices = [torch.randint(0, n, (10,)) for n in (20, 30, 7)]
    inputs = (dense, indices, [torch.arange(0, 10, 2)] * 3)
    fast = quantized(model, *inputs, mapping=default_static_qconfig_mapping)
    tables = {n: b.dtype for n, b in fast.bags.named_buffers()}
    assert tables["weight_2"] == torch.int8 and tables["scale_2"] == torch.float32
    close(fast(*inputs), model(*inputs))
    save(fast, tmp_path / "m")
    again = load(tmp_path / "m", Model().eval())
    assert torch.equal(again(*inputs), fast(*inputs))


@pytest.mark.parametrize(
    "product",
    [torch.matmul, torch.bmm, lambda a, b: a @ b, lambda a, b: a.matmul(b), lambda a, b: a.bmm(b)],
    ids=["matmul", "bmm", "operator", "method", "bmm_method"],
)
@torch.no_grad()
def test_nothing_but_a_product(product):
    class Model(nn.Module):
        def forward(self, a, b):
            return product(a, b)

    a, b = torch.randn(2, 40, 50), torch.randn(2, 50, 60)
    fast = quantized(Model(), a, b)
    assert len(kinds(fast, Int8MatMul)) == 1
    close(fast(a, b), a @ b)


@torch.no_grad()
def test_module_of_users():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.product = nn.Linear(64, 64), MatMul()

        def forward(self, x, mask=None):
            y = self.product(self.linear(x), x.transpose(-1, -2))
            return y if mask is None else y + mask

    model, x = Model().eval(), torch.randn(40, 64)
    fast = quantized(model, x)
    assert isinstance(fast.product, Int8MatMul)
    close(fast(x, x @ x.T), model(x, x @ x.T))
    with pytest.raises(RuntimeError):
        fast.product(x, x)
    for shapes in (((2, 40, 64), (64, 5)), ((64,), (64, 3)), ((3, 1, 4, 64), (2, 64, 6))):
        a, b = (torch.randn(shape) for shape in shapes)
        assert fast.product(a, b).shape == (a @ b).shape
    assert fast.product(x.bfloat16(), x.bfloat16().T).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert fast.product(x, x.T).dtype == torch.bfloat16


@torch.no_grad()
def test_left_alone():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))

        def forward(self, x, mask=None):
            x = self.linear(x) @ self.weight.t()
            x = functional.scaled_dot_product_attention(x[None], x[None], x[None])[0]
            return x if mask is None else x + mask

    class Conditional(nn.Module):
        def forward(self, x):
            return x @ x.T if x.sum() > 0 else x

    x = torch.randn(6, 8)
    fast = quantized(Model().eval(), x)
    assert not kinds(fast, Int8MatMul)
    rows = {row.module: row.text for row in ipex_core.explain(fast).rows if not row.done}
    assert "scaled_dot_product_attention" in rows[""]
    fast = quantized(nn.Sequential(nn.Linear(8, 8), Conditional()).eval(), x.abs())
    rows = {row.module: row.text for row in ipex_core.explain(fast).rows if not row.done}
    assert "see MatMul" in rows["1"]
    without = QConfigMapping().set_global(default_static_qconfig)
    without.set_object_type(torch.matmul, None)
    model, x = Attention().eval(), torch.randn(2, 40, 64)
    for mapping, text in (
        (without, "the configuration leaves it out"),
        (default_static_qconfig_mapping, "if the configuration names them"),
    ):
        fast = quantized(model, x, mapping=mapping)
        assert not kinds(fast, Int8MatMul)
        texts = [row.text for row in ipex_core.explain(fast).rows if not row.done]
        assert any(text in it for it in texts)


@torch.no_grad()
def test_recommender():
    model = Recommender().eval()
    args = torch.randn(10, 13), torch.randint(0, 20, (30,)), torch.arange(0, 30, 3)
    fast = quantized(model, *args)
    (made,) = kinds(fast, Int8Interaction)
    assert made.output and len(made.scales) == 4
    x = model.bottom(args[0])
    rows = [bag(*args[1:]) for bag in model.bags]
    passed = made(x, *rows)
    assert passed.codes.dtype == torch.uint8
    close(passed + 0, interaction(x, *rows))  # a reader that was not recorded gets numbers
    close(fast(*args), model(*args), 0.99)
    plain = quantized(model, *args, mapping=default_static_qconfig_mapping)
    assert not kinds(plain, Int8Interaction)
    rows = {row.module: row.text for row in ipex_core.explain(plain).rows if not row.done}
    assert "if the configuration names them" in rows[""]


@pytest.mark.parametrize("case", ["attention", "recommender"])
@torch.no_grad()
def test_saved_and_loaded(case, tmp_path):
    if case == "attention":
        model, args = Attention().eval(), (torch.randn(2, 40, 64),)
    else:
        model = Recommender().eval()
        args = torch.randn(10, 13), torch.randint(0, 20, (30,)), torch.arange(0, 30, 3)
    prepared = prepare(model, ALL, example_inputs=args)
    prepared(*args)
    prepared.save_qconf_summary(tmp_path / "scales.json")
    fast = convert(prepared)
    want = fast(*args)
    again = prepare(model, ALL, example_inputs=args)
    again.load_qconf_summary(tmp_path / "scales.json")
    again = convert(again)
    assert torch.equal(again(*args), want)
    save(fast, tmp_path / "model")
    loaded = load(tmp_path / "model", type(model)())
    assert torch.equal(loaded(*args), want)
    assert ipex_core.explain(loaded).rows == ipex_core.explain(fast).rows
    state = copy.deepcopy(fast)
    for module in kinds(state, Int8MatMul):
        module.a = module.b
    state.load_state_dict(fast.state_dict())
    assert torch.equal(state(*args), want)


@torch.no_grad()
def test_graphs():
    model, x = Attention().eval(), torch.randn(2, 40, 64)
    fast = quantized(model, x)
    want = fast(x)
    traced = torch.jit.freeze(torch.jit.trace(fast, x))
    torch.testing.assert_close(traced(x), want, rtol=1e-3, atol=1e-3)
    compiled = torch.compile(fast, backend="ipex")
    torch.testing.assert_close(compiled(x), want, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_few_rows_stay_float():
    x = torch.randn(2, 3, 64)
    fast = quantized(nn.Sequential(nn.Linear(64, 64), Gram()), x)
    assert not kinds(fast, Int8MatMul)
    texts = [row.text for row in ipex_core.explain(fast).rows if not row.done]
    assert any("fewer than 4 rows are faster in float" in text for text in texts)


def test_no_data():
    model, x = Attention().eval(), torch.randn(2, 40, 64)
    with pytest.raises(ValueError, match="calibrated"):
        convert(prepare(nn.Sequential(Gram()).eval(), ALL, example_inputs=x))
    prepared = prepare(model, ALL, example_inputs=x)
    with pytest.raises(ValueError, match="NaN in run 1"), torch.no_grad():
        prepared(x * float("nan"))

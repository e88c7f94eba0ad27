# SPDX-License-Identifier: Apache-2.0
"""The quantized linear layer: numbers, operands, saving, copying, moving, errors."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    QConfigWoq,
    QuantizedWeight,
    WeightOnlyQuantizedLinear,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightFormat,
    WoqWeightQScheme,
    combine_linears,
    dequantize_per_block,
    quantize_per_block,
    woq_qconfig,
)

D = WoqWeightDtype
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def layer(
    k: int = 100, n: int = 48, bias: bool = True, seed: int = 0, **options: Any
) -> WeightOnlyQuantizedLinear:
    torch.manual_seed(seed)
    linear: Any = nn.Linear(k, n, bias).requires_grad_(False)
    linear.qconfig = woq_qconfig(**{"weight_dtype": D.INT4, "group_size": 32, **options})
    made = WeightOnlyQuantizedLinear.from_float(linear)
    assert isinstance(made, WeightOnlyQuantizedLinear)
    return made


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("x_dtype", list(TOLERANCE))
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", list(D))
@pytest.mark.parametrize("group", [-1, 32])
def test_equals_the_dequantized_weight(
    dtype: D, group: int, rows: int, x_dtype: torch.dtype
) -> None:
    m = layer(weight_dtype=dtype, group_size=-1 if dtype is D.MXFP4 else group)
    x = torch.randn(rows, 100).to(x_dtype)
    y = m(x)
    assert y.dtype == x_dtype
    assert m.bias is not None
    close(y, F.linear(x.float(), m.dequantize(), m.bias), TOLERANCE[x_dtype])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("dtype", [D.INT8, D.INT4, D.NF4])
def test_weight_is_that_of_quantize_per_block(dtype: D, symmetric: bool) -> None:
    linear: Any = nn.Linear(75, 33)
    weight = linear.weight.detach().clone()
    scheme = WoqWeightQScheme.SYMMETRIC if symmetric else WoqWeightQScheme.UNDEFINED
    linear.qconfig = woq_qconfig(weight_dtype=dtype, group_size=16, weight_qscheme=scheme)
    m = WeightOnlyQuantizedLinear.from_float(linear)
    parts = quantize_per_block(weight, dtype, 16, sym_quant=symmetric)
    assert torch.equal(m.dequantize(), dequantize_per_block(*parts, dtype, 16, [33, 75]))  # type: ignore[operator]
    given = nn.Linear(75, 33)
    given.weight = nn.Parameter(weight)
    given.qconfig = linear.qconfig  # type: ignore[assignment]
    again = WeightOnlyQuantizedLinear.from_float(given, parts[1], parts[2])
    assert torch.equal(again.packed_weight, m.packed_weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("lowp", list(WoqLowpMode))
def test_low_precision_modes(lowp: WoqLowpMode) -> None:
    m = layer(lowp_mode=lowp)
    x = torch.randn(4, 100)
    reference = F.linear(x, m.dequantize(), m.bias)
    assert m.modes[0] == lowp.name.lower()
    tolerance = {"none": 1e-4, "fp16": 4e-3, "bf16": 3e-2, "int8": 5e-2}[m.modes[0]]
    close(m(x), reference, tolerance)


@pytest.mark.parametrize("mode", [m for m in WoqActQuantMode if m is not WoqActQuantMode.NONE])
def test_activation_modes(mode: WoqActQuantMode) -> None:
    m = layer(lowp_mode=WoqLowpMode.INT8, act_quant_mode=mode)
    x = torch.randn(4, 100)
    assert m.modes == ("int8", mode.name.lower())
    close(m(x), F.linear(x, m.dequantize(), m.bias), 6e-2)


@pytest.mark.parametrize("post", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_fused_operands(post: str) -> None:
    m = layer()
    x = torch.randn(2, 3, 100)
    mul, first, second = (torch.randn(2, 3, 48) for _ in range(3))
    y = F.linear(x, m.dequantize(), m.bias)
    y = {
        "none": lambda t: t,
        "relu": F.relu,
        "gelu": F.gelu,
        "gelu_tanh": lambda t: F.gelu(t, approximate="tanh"),
        "silu": F.silu,
    }[post](y)
    close(m.fused(x, post), y, 1e-4)
    close(m.fused(x, post, first, mul, second), y * mul + first + second, 1e-4)
    close(m.fused(x, post, residual=first), y + first, 1e-4)


def test_operands_that_do_not_fit_the_op() -> None:
    m = layer()
    x = torch.randn(2, 3, 100).bfloat16()
    wide, row = torch.randn(2, 3, 48), torch.randn(48)
    y = m.fused(x, "relu", residual=wide)
    assert y.dtype == torch.float32  # as torch adds them
    close(y, m.fused(x, "relu") + wide, 1e-2)
    close(m.fused(x.float(), mul=row, residual2=wide), m(x.float()) * row + wide, 1e-4)


def test_bad_operands() -> None:
    m = layer()
    with pytest.raises(RuntimeError, match="activation must be one of"):
        m.fused(torch.randn(1, 100), "tanh")
    with pytest.raises(RuntimeError, match="packed_weight must be a weight of shape"):
        m(torch.randn(1, 99))
    with pytest.raises(RuntimeError, match="x must have dtype"):
        m(torch.randn(1, 100).double())


def test_autocast() -> None:
    m = layer()
    with torch.autocast("cpu", torch.bfloat16):
        assert m(torch.randn(2, 100)).dtype == torch.bfloat16


def test_gradient_of_the_input() -> None:
    m = layer()
    x = torch.randn(3, 100, requires_grad=True)
    m(x).sum().backward()
    assert x.grad is not None
    close(x.grad, m.dequantize().sum(0).expand(3, -1), 1e-4)
    assert not any(p.requires_grad for p in m.parameters())


def test_compiles_without_a_break() -> None:
    m = layer()
    x = torch.randn(2, 100)
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), m(x))


def test_weight_has_shape_and_dtype_and_can_be_used() -> None:
    linear: Any = nn.Linear(64, 32).bfloat16()
    linear.qconfig = woq_qconfig(weight_dtype=D.INT8)
    m: Any = WeightOnlyQuantizedLinear.from_float(linear)
    m.shows_codes = False
    assert m.weight.shape == (32, 64) and m.weight.dtype == torch.bfloat16
    assert torch.equal(m.weight + 0, m.dequantize(torch.bfloat16))
    assert [n for n, _ in m.named_parameters()] == ["bias"]


_CODES = [
    (D.INT8, torch.int8, 65),
    (D.INT4, torch.uint8, 33),
    (D.NF4, torch.uint8, 33),
    (D.FP8, torch.float8_e4m3fn, 65),
]


@pytest.mark.parametrize(("kind", "dtype", "columns"), _CODES, ids=[k.name for k, *_ in _CODES])
def test_weight_is_the_codes_as_in_ipex(kind: D, dtype: torch.dtype, columns: int) -> None:
    from ipex_quant import convert, get_weight_only_quant_qconfig_mapping, prepare

    mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=kind)
    x = torch.randn(2, 65)

    class Renamed(nn.Sequential):  # a model whose code casts to the dtype of weights
        __module__ = "transformers.models.none"

    for model in (nn.Sequential, Renamed):
        stock = model(nn.Linear(65, 8)).eval()
        made: Any = convert(prepare(stock, mapping, example_inputs=x, inplace=False))
        for layer in (made[0], copy.deepcopy(made)[0]):
            codes = layer.weight
            if model is Renamed:
                assert codes.dtype is torch.float32 and codes.shape == (8, 65)
                continue
            assert codes.dtype is dtype and codes.shape == (8, columns)
            torch.testing.assert_close(
                codes.view(torch.uint8), layer.quantized_weight().codes.view(torch.uint8)
            )
        torch.testing.assert_close(
            made(x),
            nn.functional.linear(x, made[0].dequantize(), stock[0].bias),
            rtol=0.02,
            atol=0.02,
        )


def test_frees_the_float_weight() -> None:
    linear: Any = nn.Linear(64, 32)
    linear.qconfig = woq_qconfig()
    WeightOnlyQuantizedLinear.from_float(linear)
    assert linear.weight.numel() == 0


def test_other_qconfigs_change_nothing() -> None:
    linear: Any = nn.Linear(64, 32)
    linear.qconfig = torch.ao.quantization.default_qconfig
    assert WeightOnlyQuantizedLinear.from_float(linear) is linear
    assert linear.weight.numel() == 64 * 32
    with pytest.raises(OpArgumentError, match="mod must have a qconfig, got Linear"):
        WeightOnlyQuantizedLinear.from_float(nn.Linear(2, 2))


def test_a_bias_of_zeros_is_dropped() -> None:
    linear: Any = nn.Linear(64, 32)
    nn.init.zeros_(linear.bias)
    linear.qconfig = woq_qconfig()
    assert WeightOnlyQuantizedLinear.from_float(linear).bias is None


def test_optimized_layers() -> None:
    """A layer that `ipex.optimize` has packed."""
    from ipex_core import optimize

    model = optimize(nn.Sequential(nn.Linear(64, 32)).eval(), inplace=True)
    linear: Any = model[0]
    weight = linear.weight.detach() + 0
    linear.qconfig = woq_qconfig(weight_qscheme=WoqWeightQScheme.SYMMETRIC)
    m: Any = WeightOnlyQuantizedLinear.from_float(linear)
    assert (m.dequantize() - weight).abs().max() <= weight.abs().max() / 127


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_must_be_finite(value: float) -> None:
    linear: Any = nn.Linear(64, 32)
    with torch.no_grad():
        linear.weight[3, 5] = value
    linear.qconfig = woq_qconfig()
    with pytest.raises(OpArgumentError, match=r"mod\.weight must be finite"):
        WeightOnlyQuantizedLinear.from_float(linear)
    assert linear.weight.numel() == 64 * 32


def test_small_groups() -> None:
    linear: Any = nn.Linear(64, 32)
    linear.qconfig = woq_qconfig(group_size=8)
    with pytest.raises(OpArgumentError, match=r"group_size must be -1, or at least 16"):
        WeightOnlyQuantizedLinear.from_float(linear)
    parts = quantize_per_block(linear.weight.detach(), D.INT4, 8)
    with pytest.raises(
        OpArgumentError, match=r"groups of 8 .* smaller than 16; quantize it with other groups"
    ):
        WeightOnlyQuantizedLinear.from_float_and_qweight(
            linear, parts[0], D.INT4, *parts[1:], group_size=8
        )


@pytest.mark.parametrize("group", [512, 1024])
def test_large_groups(group: int) -> None:
    """The packed format has groups of at most 256: larger ones are several with one scale."""
    linear: Any = nn.Linear(1300, 32)
    weight = linear.weight.detach().clone()
    linear.qconfig = woq_qconfig(weight_dtype=D.INT4, group_size=group)
    m: Any = WeightOnlyQuantizedLinear.from_float(linear)
    parts = quantize_per_block(weight, D.INT4, group)
    assert m.group_size == group
    assert torch.equal(m.dequantize(), dequantize_per_block(*parts, D.INT4, group, [32, 1300]))


# -- saving and moving ----------------------------------------------------------------------------------------


def cases() -> list[Any]:
    options: list[dict[str, Any]] = [
        {"weight_dtype": D.INT8, "group_size": -1},
        {"weight_dtype": D.INT4},
        {"weight_dtype": D.INT4, "bias": False, "lowp_mode": WoqLowpMode.INT8},
        {"weight_dtype": D.NF4},
        {"weight_dtype": D.FP8},
        {"weight_dtype": D.MXFP4},
        {"k": 33, "weight_dtype": D.INT4, "group_size": 16},
    ]
    return [pytest.param(o, id="-".join(map(str, o.values()))) for o in options]


@pytest.mark.parametrize("options", cases())
@pytest.mark.parametrize("lowp", [WoqLowpMode.NONE, WoqLowpMode.INT8])
def test_state_dict(options: dict[str, Any], lowp: WoqLowpMode) -> None:
    """What is saved does not depend on how it is computed with: it loads into a layer with another mode."""
    m = layer(**options)
    state = m.state_dict()
    assert {"qweight", "scales", "woq"} <= set(state)
    assert all(type(v) is torch.Tensor for v in state.values())
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    if lowp is WoqLowpMode.INT8 and m.dtype is D.FP8:
        return
    qconfig = woq_qconfig(weight_dtype=m.dtype, lowp_mode=lowp)
    other = WeightOnlyQuantizedLinear(m.in_features, m.out_features, True, D.INT8, qconfig)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.dequantize(), m.dequantize())
    assert (other.bias is None) == (m.bias is None)
    assert (other.dtype, other.group_size, other.weight_qscheme) == (
        *(m.dtype, m.group_size, m.weight_qscheme),
    )
    if lowp == m.lowp_mode:
        x = torch.randn(2, m.in_features)
        assert torch.equal(other(x), m(x))


def test_safetensors(tmp_path: Any) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    m = layer(weight_dtype=D.MXFP4)
    safetensors.save_file(m.state_dict(), tmp_path / "m.safetensors")
    other = WeightOnlyQuantizedLinear(100, 48)
    other.load_state_dict(safetensors.load_file(tmp_path / "m.safetensors"))
    assert torch.equal(other.dequantize(), m.dequantize())


def test_state_dict_inside_a_model() -> None:
    model = nn.Sequential(layer(), nn.ReLU(), layer(48, 8))
    state = model.state_dict()
    assert "0.qweight" in state and "2.zeros" in state
    other = nn.Sequential(layer(seed=5), nn.ReLU(), layer(48, 8, seed=6))
    other.load_state_dict(state)
    x = torch.randn(2, 100)
    assert torch.equal(other(x), model(x))


def test_state_dict_errors() -> None:
    m = layer()
    with pytest.raises(RuntimeError, match=r'Missing key.*"qweight", "scales", "woq"'):
        m.load_state_dict({})
    state = m.state_dict()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*strange"):
        m.load_state_dict({**state, "strange": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="scales must have shape"):
        m.load_state_dict({**state, "scales": torch.ones(3, 3)})
    with pytest.raises(RuntimeError, match="version must be 1, got 9"):
        m.load_state_dict({**state, "woq": torch.tensor([9, 4, 100, 32])})
    with pytest.raises(RuntimeError, match="out_features must be 7, got 48"):
        WeightOnlyQuantizedLinear(100, 7).load_state_dict(state)
    before = m.packed_weight
    m.load_state_dict({}, strict=False)
    assert m.packed_weight is before


@pytest.mark.parametrize("options", cases())
def test_copies(options: dict[str, Any]) -> None:
    m = layer(**options)
    x = torch.randn(2, m.in_features)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert torch.equal(other(x), m(x))
        assert other.packed_weight.data_ptr() != m.packed_weight.data_ptr()  # type: ignore[union-attr]
        assert repr(other) == repr(m)


def test_moving() -> None:
    m = layer()
    packed = m.packed_weight
    x = torch.randn(2, 100)
    m.to(torch.bfloat16)
    assert m.bias is not None and m.bias.dtype == torch.bfloat16
    assert m.packed_weight is packed
    assert m(x).dtype == torch.float32
    m.float().to("cpu")
    with pytest.raises(OpArgumentError, match="device must be cpu"):
        m.to("cuda")
    with pytest.raises(OpArgumentError, match="device must be cpu"):
        nn.Sequential(m).cuda()
    assert m.packed_weight is packed
    m.to("meta")
    assert m.packed_weight is not None and m.packed_weight.is_meta


def test_repr() -> None:
    assert repr(layer(lowp_mode=WoqLowpMode.BF16)) == (
        "WeightOnlyQuantizedLinear(in_features=100, out_features=48, dtype=INT4, bias=True,"
        " lowp_mode=BF16, act_quant_mode=NONE, group_size=32, cache_weight_for_large_batch=False,"
        " weight_qscheme=ASYMMETRIC)"
    )


def test_without_weight() -> None:
    m = WeightOnlyQuantizedLinear(4, 5)
    assert m.weight is None
    with pytest.raises(RuntimeError, match="has no weight yet"):
        m(torch.zeros(1, 4))
    with pytest.raises(OpArgumentError, match="in_features must be positive"):
        WeightOnlyQuantizedLinear(0, 5)
    with pytest.raises(OpArgumentError, match="dtype must be one of"):
        WeightOnlyQuantizedLinear(4, 5, dtype=77)


def test_from_float_and_qweight() -> None:
    linear: Any = nn.Linear(64, 24)
    weight = linear.weight.detach()
    codes, scales, zeros = quantize_per_block(weight, D.INT4, 32)
    m = WeightOnlyQuantizedLinear.from_float_and_qweight(
        linear, codes, D.INT4, scales, zeros, group_size=32
    )
    assert torch.equal(m.dequantize(), dequantize_per_block(codes, scales, zeros, D.INT4, 32))
    assert torch.equal(m.bias, linear.bias)  # type: ignore[arg-type]
    assert m.lowp_mode is WoqLowpMode.NONE
    linear.qconfig = woq_qconfig(weight_dtype=D.INT4, lowp_mode=WoqLowpMode.INT8)
    other = WeightOnlyQuantizedLinear.from_float_and_qweight(
        linear, codes, D.INT4, scales, zeros, torch.ones(24), 32
    )
    assert other.modes[0] == "int8" and torch.equal(other.dequantize(), m.dequantize())
    with pytest.warns(DeprecationWarning, match="use from_float_and_qweight"):
        old = WeightOnlyQuantizedLinear.from_float_and_int4_weight(
            linear, codes, scales, zeros, None, 32
        )
    assert torch.equal(old.dequantize(), m.dequantize())
    with pytest.raises(OpArgumentError, match="weight_format must"):
        WeightOnlyQuantizedLinear.from_float_and_qweight(
            linear, codes, D.INT4, scales, zeros, weight_format=5
        )
    with pytest.raises(OpArgumentError, match="codes must have dtype"):
        WeightOnlyQuantizedLinear.from_float_and_qweight(linear, codes, D.INT8, scales, zeros)
    assert WoqWeightFormat.AWQ_FORMAT == 2


def test_from_float_and_qweight_with_packed_zeros() -> None:
    """int32 zero points with eight in a word, as GPTQ's files become after a turn, with and without g_idx."""
    group, k, n = 16, 256, 24
    groups = k // group
    linear: Any = nn.Linear(k, n)
    codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8)
    scales = torch.rand(n, groups)
    zeros = torch.randint(0, 16, (n, groups), dtype=torch.int32)
    words = torch.zeros(n, groups // 8, dtype=torch.int32)
    for i in range(groups):
        words[:, i // 8] |= zeros[:, i] << (4 * (i % 8))
    for g_idx in (None, torch.arange(groups).repeat(group)):
        got, want = (
            WeightOnlyQuantizedLinear.from_float_and_qweight(
                linear, codes, D.INT4, scales, points, None, group, g_idx
            )
            for points in (words, zeros)
        )
        assert torch.equal(got.packed_weight, want.packed_weight)  # type: ignore[arg-type]
        assert torch.equal(want.quantized_weight().zeros.int(), zeros)  # type: ignore[union-attr]
    got = WeightOnlyQuantizedLinear.from_float_and_qweight(
        linear, codes, D.INT4, scales[:, 0], zeros[:, 0]
    )
    assert torch.equal(got.quantized_weight().zeros.int(), zeros[:, :1])  # type: ignore[union-attr]


def test_quantized_weight_checks() -> None:
    codes = torch.zeros(4, 8, dtype=torch.int8)
    with pytest.raises(OpArgumentError, match=r"scales must have shape \[4, 1\], got \[3, 1\]"):
        QuantizedWeight("int8", 8, codes, torch.ones(3, 1))
    with pytest.raises(OpArgumentError, match="format must be one of"):
        QuantizedWeight("int5", 8, codes, torch.ones(4, 1))
    with pytest.raises(OpArgumentError, match=r"codes must have shape \[N, 9\]"):
        QuantizedWeight("int8", 9, codes, torch.ones(4, 1))


# -- several as one -------------------------------------------------------------------------------------------


def run(packed: torch.Tensor, bias: Any, x: torch.Tensor, n: int, **kwargs: Any) -> torch.Tensor:
    y: torch.Tensor = torch.ops.ipex.woq_linear(x, packed, n, bias, **kwargs)
    return y


@pytest.mark.parametrize("dtype", list(D))
def test_combine(dtype: D) -> None:
    a, b, c = (
        layer(64, n, bias, seed=n, weight_dtype=dtype)
        for n, bias in ((40, True), (32, False), (8, True))
    )
    x = torch.randn(3, 64)
    made = combine_linears([a, b, c])
    assert made is not None
    whole = torch.cat([m(x) for m in (a, b, c)], dim=1)
    close(run(*made, x, 80), whole, 1e-5)
    order = torch.randperm(80)
    shuffled = combine_linears([a, b, c], order)
    assert shuffled is not None
    close(run(*shuffled, x, 80), whole[:, order], 1e-5)
    twice = torch.cat([order, order[:16]])  # outputs may come more than once
    longer = combine_linears([a, b, c], twice)
    assert longer is not None
    close(run(*longer, x, 96), whole[:, twice], 1e-5)
    for wrong, text in ((order.view(8, 10), "be 1-D"), (order + 1, r"be in \[0, 80\)")):
        with pytest.raises(OpArgumentError, match=text):
            combine_linears([a, b, c], wrong)


@pytest.mark.parametrize("n", [32, 40])
def test_combine_gate(n: int) -> None:
    gate, up = layer(64, n, seed=1), layer(64, n, seed=2, bias=False)
    x = torch.randn(3, 64)
    wanted = F.silu(gate(x)) * up(x)
    made = combine_linears([gate, up], gate=True)
    assert made is not None
    close(run(*made, x, n, gate="silu"), wanted, 1e-5)


def test_combine_what_differs() -> None:
    one = layer(64)
    assert combine_linears([one, layer(64, weight_dtype=D.NF4)]) is None
    assert combine_linears([one, layer(64, group_size=16)]) is None
    assert combine_linears([one, layer(64, lowp_mode=WoqLowpMode.BF16)]) is None
    plain: QConfigWoq = woq_qconfig(weight_dtype=D.INT4)
    symmetric = layer(64, weight_qscheme=WoqWeightQScheme.SYMMETRIC, seed=3)
    made = combine_linears([one, symmetric])  # only one has zero points
    assert plain is not None and made is not None
    x = torch.randn(2, 64)
    close(run(*made, x, 96), torch.cat([one(x), symmetric(x)], dim=1), 1e-5)
    with pytest.raises(OpArgumentError, match="linears must not be empty"):
        combine_linears([])

# SPDX-License-Identifier: Apache-2.0
"""Readers of other tools' checkpoints, against tensors packed code by code."""

from __future__ import annotations

import logging
from typing import Any

import packers as P
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ipex_core.errors import OpArgumentError
from ipex_quant import (
    QuantMethod,
    WeightOnlyQuantizedLinear,
    WoqLowpMode,
    WoqWeightDtype,
    linear_from,
    quantized_names,
    read_checkpoint,
    read_linear,
    woq_qconfig,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}


def check_layer(tensors: Any, wanted: Any, config: Any, bias: bool = True) -> Any:
    """Read a layer and compare its weight, and what it computes, with the weight it stands for."""
    n, k = wanted.shape
    state = P.state_of("a.up", tensors)
    if bias:
        state["a.up.bias"] = torch.randn(n)
    weight = read_linear(state, "a.up", config)
    assert (weight.name, weight.out_features, weight.in_features) == ("a.up", n, k)
    assert torch.equal(weight.dequantize(), wanted)
    layer: Any = linear_from(weight)
    assert type(layer) is WeightOnlyQuantizedLinear
    assert torch.equal(layer.dequantize(), wanted)
    x = torch.randn(3, k)
    expected = F.linear(x, wanted, state.get("a.up.bias"))
    torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-3)
    return layer


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [-1, 16, 32])
def test_gptq(group: int, act_order: bool, symmetric: bool, second: bool) -> None:
    tensors, wanted = P.gptq(
        group=group, act_order=act_order and group != -1, symmetric=symmetric, second=second
    )
    config = {**GPTQ, "group_size": group, "sym": symmetric, "desc_act": act_order}
    if second:
        config["checkpoint_format"] = "gptq_v2"
    layer = check_layer(tensors, wanted, config)
    assert (layer.quantized_weight().zeros is None) == symmetric


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_bits(bits: int, symmetric: bool) -> None:
    tensors, wanted = P.gptq(bits=bits, n=32, k=64, symmetric=symmetric)
    layer = check_layer(tensors, wanted, {**GPTQ, "bits": bits, "sym": symmetric})
    assert layer.dtype is (WoqWeightDtype.INT8 if bits == 8 else WoqWeightDtype.INT4)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_gptq_shapes(data: st.DataObject) -> None:
    bits = data.draw(st.sampled_from([2, 3, 4, 8]))
    n, k = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 90))
    group = data.draw(st.sampled_from([-1, 16, 24, 32, 512]))
    symmetric, second = data.draw(st.booleans()), data.draw(st.booleans())
    tensors, wanted = P.gptq(n, k, group, bits, symmetric, False, second, data.draw(st.integers(0)))
    config = {**GPTQ, "bits": bits, "group_size": group, "sym": symmetric}
    if second:
        config["checkpoint_format"] = "gptq_v2"
    weight = read_linear(P.state_of("x", tensors), "x", config)
    assert torch.equal(weight.dequantize(), wanted)
    layer: Any = linear_from(weight)
    assert torch.equal(layer.dequantize(), wanted)


def test_symmetric_zero_points_tell_their_version() -> None:
    """AutoRound and others store plain zero points without saying so."""
    tensors, wanted = P.gptq(symmetric=True, second=True)
    check_layer(tensors, wanted, {**GPTQ, "sym": True})


def test_a_zero_point_of_zero_survives_the_offset() -> None:
    tensors, _ = P.gptq(n=8, k=16, group=-1)
    tensors["qzeros"].fill_(-1)
    weight = read_linear(P.state_of("a", tensors), "a", {**GPTQ, "group_size": -1})
    assert weight.zeros is not None and not weight.zeros.any()


@pytest.mark.parametrize("group", [-1, 16])
@pytest.mark.parametrize("method", ["awq", "rtn", "auto-round"])
def test_awq(method: str, group: int) -> None:
    tensors, wanted = P.awq(group=group)
    config: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": group}
    if method == "awq":
        config |= {"zero_point": True, "version": "gemm"}
    if method == "auto-round":
        config |= {"packing_format": "auto_round:auto_awq"}
    check_layer(tensors, wanted, config)


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round", "rtn"])
@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:gptqmodel", None])
def test_auto_round(method: str, packing: str | None) -> None:
    tensors, wanted = P.gptq(second=packing == "auto_round:gptqmodel")
    config = {**GPTQ, "quant_method": method, "packing_format": packing or ""}
    check_layer(tensors, wanted, config)


def test_settings_of_single_layers() -> None:
    tensors, wanted = P.gptq(bits=8, group=32)
    for extra in (
        {"extra_config": {"a.up": {"bits": 8, "group_size": 32}}},
        {"extra_config": {r".*\.up|other": {"bits": 8, "group_size": 32}}},
        {"dynamic": {"-:.*down": {}, r"+:a\.u.*": {"bits": 8, "group_size": 32}}},
    ):
        check_layer(tensors, wanted, {**GPTQ, **extra})


def test_without_configuration() -> None:
    """IPEX takes a plain state dict as GPTQ with 4 bits."""
    tensors, wanted = P.gptq(group=32)
    check_layer(tensors, wanted, None)


@pytest.mark.parametrize("shape", ["[N]", "[N, 1]", "[1]"])
def test_int8(shape: str) -> None:
    tensors, wanted = P.int8(shape=shape)
    check_layer(tensors, wanted, {"quant_method": "int8"})


@pytest.mark.parametrize("block", [(128, 128), (64, 32), (128, 64), (1, 128)])
def test_fp8_blocks(block: tuple[int, int]) -> None:
    tensors, wanted = P.fp8(block=block)
    config = {"quant_method": "fp8", "weight_block_size": list(block)}
    layer = check_layer(tensors, wanted, config)
    if block == (128, 128):  # kept as few as they are
        assert list(layer.quantized_weight().scales.shape) == [2, 3]


def test_fp8_small_and_single_scale() -> None:
    tensors, wanted = P.fp8(40, 64)
    check_layer(tensors, wanted, {"quant_method": "fp8"})
    tensors["weight_scale"] = tensors.pop("weight_scale_inv").flatten()
    check_layer(tensors, wanted, {"quant_method": "fp8"})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [-1, 16])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_compressed_tensors(bits: int, group: int, symmetric: bool) -> None:
    tensors, wanted = P.compressed(group=group, bits=bits, symmetric=symmetric)
    check_layer(tensors, wanted, P.compressed_config(bits, group, symmetric, "pack-quantized"))


def test_compressed_tensors_odd_sizes_and_plain_zero_points() -> None:
    tensors, wanted = P.compressed(n=13, k=50, group=32, symmetric=False)
    config = P.compressed_config(4, 32, False, "pack-quantized")
    check_layer(tensors, wanted, config)
    codes, zeros, _, _ = P.draw(13, 50, 32, 4, False, 0)
    tensors["weight_zero_point"] = torch.tensor(zeros - 8, dtype=torch.int8)
    check_layer(tensors, wanted, config)
    assert codes.shape == (13, 50)


def test_compressed_tensors_bytes() -> None:
    tensors, wanted = P.int8(shape="[N, 1]")
    check_layer(tensors, wanted, P.compressed_config(8, -1, True, "int-quantized"))
    tensors, wanted = P.fp8(40, 64)
    tensors["weight_scale"] = tensors.pop("weight_scale_inv")
    tensors["input_scale"] = torch.ones(1)
    check_layer(tensors, wanted, P.compressed_config(8, -1, True, "float-quantized"))


def test_compressed_tensors_targets() -> None:
    tensors, wanted = P.compressed(bits=8, group=-1)
    config = P.compressed_config(4, 16, True, "pack-quantized")
    other = P.compressed_config(8, -1, True, "pack-quantized")["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = {**other, "targets": [r"re:.*\.up$"]}
    check_layer(tensors, wanted, config)


@pytest.mark.parametrize("form", ["mxfp4", "nf4"])
def test_codebooks(form: str) -> None:
    """As `ipex llm quantize` writes them."""
    from ipex_core import woq

    weight = torch.randn(24, 96)
    scale_dtype = torch.float8_e8m0fnu if form == "mxfp4" else torch.bfloat16
    kind = "fp4" if form == "mxfp4" else "nf4"
    codes, scales, _ = woq.quantize(weight, kind, 32, True, scale_dtype)
    tensors = {
        "weight_packed": codes,
        "weight_scale": scales,
        "weight_shape": torch.tensor([24, 96]),
    }
    if form == "mxfp4":
        tensors["weight_scale"] = scales.view(torch.uint8)
    config = P.compressed_config(4, 32, True, f"{form}-pack-quantized")
    config["quant_method"] = "ipex"
    layer: Any = linear_from(read_linear(P.state_of("a", tensors), "a", config))
    assert layer.dtype.name == form.upper()
    packed = woq.pack_weight(weight, kind, 32, True, scale_dtype)
    assert torch.equal(layer.packed_weight, packed)


def test_whole_checkpoint_is_taken_apart() -> None:
    state: dict[str, torch.Tensor] = {}
    weights = {}
    for i, name in enumerate(("m.a", "m.b")):
        tensors, weights[name] = P.gptq(seed=i)
        state |= P.state_of(name, tensors)
    state["m.norm.weight"] = torch.ones(4)
    assert quantized_names(state) == ["m.a", "m.b"]
    seen = []
    for weight in read_checkpoint(state, GPTQ, take=True):
        assert torch.equal(weight.dequantize(), weights[weight.name])
        seen.append(weight.name)
    assert seen == ["m.a", "m.b"]
    assert list(state) == ["m.norm.weight"]


# -- what the packed format cannot hold -----------------------------------------------------------------------


def test_uneven_groups_become_an_ordinary_layer(caplog: pytest.LogCaptureFixture) -> None:
    """Part of the input features of an act-order weight, as a rank of tensor parallelism has it."""
    tensors, wanted = P.gptq(act_order=True)
    part = {
        "qweight": tensors["qweight"][:4],
        "qzeros": tensors["qzeros"],
        "scales": tensors["scales"],
        "g_idx": tensors["g_idx"][:32],
    }
    weight = read_linear(P.state_of("a", part), "a", GPTQ)
    assert torch.equal(weight.dequantize(), wanted[:, :32])
    with caplog.at_level(logging.WARNING, "ipex"):
        layer: Any = linear_from(weight, dtype=torch.bfloat16)
    assert type(layer) is nn.Linear and layer.weight.dtype == torch.bfloat16
    assert torch.equal(layer.weight, wanted[:, :32].bfloat16())
    assert "a: dequantized to torch.bfloat16, since the groups of g_idx" in caplog.text


def test_small_groups_become_an_ordinary_layer(caplog: pytest.LogCaptureFixture) -> None:
    tensors, wanted = P.gptq(group=8)
    weight = read_linear(P.state_of("a", tensors), "a", {**GPTQ, "group_size": 8})
    with caplog.at_level(logging.WARNING, "ipex"):
        layer: Any = linear_from(weight)
    assert torch.equal(layer.weight, wanted)
    assert "smaller than 16" in caplog.text


def test_large_groups_with_act_order() -> None:
    tensors, wanted = P.gptq(n=8, k=1024, group=512, act_order=True)
    check_layer(tensors, wanted, {**GPTQ, "group_size": 512})


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_products(bits: int) -> None:
    tensors, wanted = P.gptq(bits=bits)
    weight = read_linear(P.state_of("a", tensors), "a", {**GPTQ, "bits": bits})
    layer: Any = linear_from(weight, woq_qconfig(lowp_mode=WoqLowpMode.INT8))
    assert layer.modes[0] == "int8" and torch.equal(layer.dequantize(), wanted)


def test_fp8_has_no_integer_products() -> None:
    tensors, _ = P.fp8(32, 32)
    weight = read_linear(P.state_of("a", tensors), "a", {"quant_method": "fp8"})
    with pytest.raises(OpArgumentError, match="a: lowp_mode must be NONE, FP16 or BF16"):
        linear_from(weight, woq_qconfig(lowp_mode=WoqLowpMode.INT8))


# -- IPEX's class method --------------------------------------------------------------------------------------


@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_from_weight_gptq(act_order: bool, bias: bool) -> None:
    tensors, wanted = P.gptq(act_order=act_order)
    b = torch.randn(40) if bias else None
    config = woq_qconfig(weight_dtype=WoqWeightDtype.INT4)
    g_idx = tensors["g_idx"] if act_order else None
    parts = (tensors["qweight"], tensors["scales"], tensors["qzeros"], 64, 40)
    layer = WeightOnlyQuantizedLinear.from_weight(*parts, config, b, 16, g_idx, 0, 0)
    assert torch.equal(layer.dequantize(), wanted)
    x = torch.randn(2, 64)
    torch.testing.assert_close(layer(x), F.linear(x, wanted, b), rtol=1e-4, atol=1e-3)
    other = WeightOnlyQuantizedLinear.from_int4_weight(*parts, 0, config, b, 16, g_idx)
    assert torch.equal(other.packed_weight, layer.packed_weight)  # type: ignore[arg-type]


def test_from_weight_awq_and_defaults() -> None:
    tensors, wanted = P.awq()
    parts = (tensors["qweight"], tensors["scales"], tensors["qzeros"], 64, 40)
    layer = WeightOnlyQuantizedLinear.from_weight(
        *parts, group_size=16, quant_method=QuantMethod.AWQ_GEMM
    )
    assert torch.equal(layer.dequantize(), wanted)
    other = WeightOnlyQuantizedLinear.from_weight(  # IPEX does not read these two numbers
        *parts[:3], 786, 1024, group_size=16, quant_method=QuantMethod.AWQ_GEMM
    )
    assert (other.in_features, other.out_features) == (64, 40)
    assert torch.equal(other.dequantize(), wanted)
    assert layer.lowp_mode is WoqLowpMode.BF16
    second, wanted = P.gptq(second=True)
    parts = (second["qweight"], second["scales"], second["qzeros"], 64, 40)
    layer = WeightOnlyQuantizedLinear.from_weight(*parts, group_size=16, zero_offset=False)
    assert torch.equal(layer.dequantize(), wanted)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quant_method": 2}, "quant_method must be one of QuantMethod's GPTQ_GEMM"),
        ({"dtype": 1}, "dtype must be one of QuantDtype's INT4"),
        ({"group_size": 32}, "scales must have 2 groups of 32 for 64 input features, got 4"),
        ({"group_size": 17}, "groups of 17 features cannot be divided into groups of a multiple"),
        ({"in_features": 128}, r"qweight must have shape \[16, 40\], got \[8, 40\]"),
        ({"out_features": 48}, "out_features must be 48, got 40"),
        ({"qconfig": "int4"}, "qconfig must be a QConfigWoq"),
        ({"bias": torch.zeros(3)}, r"bias must have shape \[40\]"),
        ({"g_idx": torch.arange(64)}, r"g_idx must be in 0\.\.3, got 0\.\.63"),
        ({"zero_points": torch.zeros(4, 4, dtype=torch.int32)}, r"qzeros must have shape \[4, 5\]"),
        ({"qweight": torch.zeros(8, 40)}, "qweight must have dtype int32"),
    ],
)
def test_from_weight_errors(change: dict[str, Any], message: str) -> None:
    tensors, _ = P.gptq()
    arguments: dict[str, Any] = {
        "qweight": tensors["qweight"],
        "scales": tensors["scales"],
        "zero_points": tensors["qzeros"],
        "in_features": 64,
        "out_features": 40,
        "group_size": 16,
    }
    with pytest.raises(OpArgumentError, match=message):
        WeightOnlyQuantizedLinear.from_weight(**{**arguments, **change})


# -- errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "group_size": 32}, "m.a.scales: scales must have 2 groups of 32"),
        ({**GPTQ, "bits": 8}, r"m\.a\.qzeros: qzeros must have shape|m\.a\.scales"),
        ({**GPTQ, "bits": 5}, "bits of m.a must be one of 2, 3, 4, 8, got 5"),
        ({**GPTQ, "bits": 4.0}, r"bits of m.a must be one of 2, 3, 4, 8, got 4\.0"),
        ({**GPTQ, "group_size": 0}, "group_size of m.a must be -1 or positive"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2"),
        (
            {"quant_method": "X"},
            "quant_method must be one of auto-round, .*, got X",
        ),
        ({}, "quant_method must"),
        ({"quant_method": "awq", "version": "gemv"}, "version must be gemm"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, "weight_block_size must"),
        ({"quant_method": "compressed-tensors"}, "config_groups must have a group"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": "16"}}},
            },
            "group_size of m.a must be -1 or positive, got 16",
        ),
    ],
)
def test_bad_configurations(config: dict[str, Any], message: str) -> None:
    tensors, _ = P.gptq()
    with pytest.raises(OpArgumentError, match=message):
        list(read_checkpoint(P.state_of("m.a", tensors), config))


@pytest.mark.parametrize("part", ["qweight", "scales", "qzeros"])
def test_missing_tensors(part: str) -> None:
    tensors, _ = P.gptq()
    del tensors[part]
    with pytest.raises(OpArgumentError, match=rf"state_dict must have m\.a\.{part}, got none"):
        read_linear(P.state_of("m.a", tensors), "m.a", GPTQ)


def test_nothing_quantized() -> None:
    with pytest.raises(OpArgumentError, match="state_dict must have quantized layers for method"):
        list(read_checkpoint({"a.weight": torch.ones(2, 2)}, GPTQ))


@pytest.mark.parametrize(
    ("method", "weight", "message"),
    [
        ("fp8", torch.zeros(4, 4), "weight must have dtype float8_e4m3fn"),
        ("int8", torch.zeros(4, 4), "weight must have dtype int8"),
        ("int8", torch.zeros(4, dtype=torch.int8), "weight must be 2-D"),
        ("int8", torch.zeros(5, 4, dtype=torch.int8), r"scales must have shape \[5, G\]"),
    ],
)
def test_bad_bytes(method: str, weight: torch.Tensor, message: str) -> None:
    state = {"a.weight": weight, "a.weight_scale": torch.ones(4)}
    with pytest.raises(OpArgumentError, match=message):
        read_linear(state, "a", {"quant_method": method})


def _with_scales(kind: str, scales: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return a layer of 8 outputs and 32 inputs with these scales, ``[8]``."""
    if kind == "gptq":
        words = torch.zeros(4, 8, dtype=torch.int32)
        state = {"a.qweight": words, "a.qzeros": words[:1, :1], "a.scales": scales.view(1, 8)}
        return state, {**GPTQ, "group_size": -1}
    if kind == "awq":
        words = torch.zeros(32, 1, dtype=torch.int32)
        state = {"a.qweight": words, "a.qzeros": words[:1], "a.scales": scales.view(1, 8)}
        return state, {"quant_method": "awq", "bits": 4, "group_size": -1}
    if kind == "packed":
        groups = {"g": {"weights": {"num_bits": 4, "strategy": "channel"}}}
        words = torch.zeros(8, 4, dtype=torch.int32)
        state = {"a.weight_packed": words, "a.weight_scale": scales.view(8, 1)}
        return state, {"quant_method": "compressed-tensors", "config_groups": groups}
    if kind == "ours":
        about = torch.tensor([1, 0, 32, -1])
        from ipex_core.packing.quantize import FORMATS

        about[1] = FORMATS["int8"]
        codes = torch.zeros(8, 32, dtype=torch.int8)
        return {"a.qweight": codes, "a.scales": scales.view(8, 1), "a.woq": about}, {
            "quant_method": "ipex"
        }
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    codes = torch.zeros(8, 32).to(dtype)
    return {"a.weight": codes, "a.weight_scale": scales}, {"quant_method": kind}


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "int8", "fp8", "ours"])
def test_scales_that_are_none(kind: str) -> None:
    good = torch.ones(8)
    state, config = _with_scales(kind, good.half())
    assert len(list(read_checkpoint(state, config))) == 1
    for dtype in (
        torch.float64,
        torch.int64,
        torch.int32,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ):
        state, config = _with_scales(kind, good.to(dtype))
        with pytest.raises(OpArgumentError, match=r"scales must (have dtype|be floating)"):
            list(read_checkpoint(state, config))
    for value in (float("nan"), float("inf"), float("-inf")):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            scales = good.to(dtype)
            scales[5] = value
            state, config = _with_scales(kind, scales)
            with pytest.raises(OpArgumentError, match="scales must be finite"):
                list(read_checkpoint(state, config))


def test_exponents_and_zero_points_that_are_none() -> None:
    groups = {
        "g": {
            "weights": {"num_bits": 4, "type": "float", "group_size": 32},
            "format": "mxfp4-pack-quantized",
        }
    }
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    scales = torch.full((8, 1), 127, dtype=torch.uint8)
    state = {"a.weight_packed": torch.zeros(8, 16, dtype=torch.uint8), "a.weight_scale": scales}
    assert len(list(read_checkpoint(state, config))) == 1
    scales[3] = 255
    with pytest.raises(OpArgumentError, match="scales must be finite"):
        list(read_checkpoint(state, config))
    state, config = _with_scales("ours", torch.ones(8))
    for zeros, message in (
        (torch.zeros(8, 1, dtype=torch.int64), "zeros must have dtype int8 or float32"),
        (torch.full((8, 1), float("nan")), "zeros must be finite"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            list(read_checkpoint({**state, "a.zeros": zeros}, config))


@pytest.mark.parametrize("kind", ["gptq", "awq", "packed", "int8", "fp8", "ours"])
def test_tensors_that_no_reader_can_look_into(kind: str) -> None:
    state, config = _with_scales(kind, torch.ones(8).half())
    state["a.bias"] = torch.ones(8)
    assert len(list(read_checkpoint(state, config))) == 1
    for key, value in state.items():
        found: list[Any] = [value.to("meta"), [1.0]]
        if value.dtype not in (torch.int8, torch.float8_e4m3fn):
            found.append(value.to_sparse())
        for wrong in found:
            with pytest.raises(OpArgumentError, match=f"{key}: .* must (have values|be a tensor)"):
                list(read_checkpoint({**state, key: wrong}, config))
    for bias, message in (
        (torch.ones(8, dtype=torch.int64), "bias must be floating point, got torch.int64"),
        (torch.ones(8, dtype=torch.complex64), "bias must be floating point"),
        (torch.full((8,), float("nan")), "bias must be finite"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            list(read_checkpoint({**state, "a.bias": bias}, config))


def test_groups_of_features_that_are_none() -> None:
    tensors, _ = P.gptq(act_order=True)
    state = P.state_of("a", tensors)
    good = state["a.g_idx"]
    for wrong, message in (
        (good.float(), "g_idx must have integers"),
        (good.bool(), "g_idx must have integers"),
        (torch.full_like(good, 1 << 30), "g_idx must be in 0..3"),
        (good - 1, "g_idx must be in 0..3"),
    ):
        with pytest.raises(OpArgumentError, match=message):
            read_linear({**state, "a.g_idx": wrong}, "a", GPTQ)
    # More scales than groups: counts of groups that a number of the file names would take terabytes.
    more = {
        **state,
        "a.scales": state["a.scales"].repeat(2, 1),
        "a.qzeros": state["a.qzeros"].repeat(2, 1),
    }
    more["a.g_idx"] = torch.full_like(good.long(), 1 << 40)
    with pytest.raises(OpArgumentError, match=r"g_idx must be in|scales must have"):
        read_linear(more, "a", GPTQ)
    layer: Any = linear_from(read_linear(state, "a", GPTQ))
    saved = {f"a.{key}": value for key, value in layer.state_dict().items()}
    assert "a.g_idx" in saved
    for wrong in (saved["a.g_idx"] + 100, saved["a.g_idx"] - 1, saved["a.g_idx"].float()):
        with pytest.raises(OpArgumentError, match="g_idx must"):
            read_linear({**saved, "a.g_idx": wrong}, "a", {"quant_method": "ipex"})


@pytest.mark.parametrize(
    "shape",
    [
        torch.tensor(40),
        torch.tensor([]),
        torch.tensor([40]),
        torch.tensor([[40, 64]]),
        torch.tensor([40.0, 64.0]),
        torch.tensor([-40, 64]),
        torch.tensor([40, 64, 1]),
    ],
)
def test_weight_shapes_that_are_none(shape: torch.Tensor) -> None:
    tensors, _ = P.compressed()
    state = P.state_of("a", {**tensors, "weight_shape": shape})
    with pytest.raises(OpArgumentError, match="weight_shape must be"):
        read_linear(state, "a", P.compressed_config(4, 16, True, "pack-quantized"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bool])
def test_zero_points_of_bytes_that_are_none(dtype: torch.dtype) -> None:
    tensors, _ = P.int8(shape="[N, 1]")
    state = P.state_of("a", {**tensors, "weight_zero_point": torch.ones(40, 1).to(dtype)})
    config = P.compressed_config(8, -1, False, "int-quantized")
    with pytest.raises(OpArgumentError, match="zero points must be integers from -128 to 127"):
        read_linear(state, "a", config)
    state["a.weight_zero_point"] = torch.full((40, 1), 300)
    with pytest.raises(OpArgumentError, match="zero points must be integers from -128 to 127"):
        read_linear(state, "a", config)

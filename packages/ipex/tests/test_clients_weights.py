# SPDX-License-Identifier: Apache-2.0
"""What projects that quantize, or read quantized weights, call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from clients import conv, gptq, mlp, needs_llm, needs_quant

import intel_extension_for_pytorch as ipex

Tensor = torch.Tensor


@needs_llm
@pytest.mark.parametrize("client", ["gptqmodel", "vllm", "tgi", "numbers"])
def test_gptq_clients(client: str) -> None:
    from intel_extension_for_pytorch.llm.quantization import (
        IPEXWeightOnlyQuantizedLinear,
        QuantDtype,
        QuantMethod,
    )

    qweight, scales, qzeros, g_idx, weight = gptq()
    bias, x = torch.randn(16), torch.randn(3, 64)
    expected = torch.nn.functional.linear(x, weight, bias)
    make = IPEXWeightOnlyQuantizedLinear.from_weight
    method, dtype = QuantMethod.GPTQ_GEMM, QuantDtype.INT4
    if client == "gptqmodel":
        layer = make(
            *(qweight, scales, qzeros, 64, 16, None, bias, 32, g_idx),
            quant_method=method,
            dtype=dtype,
        )
    elif client == "vllm":
        config = ipex.quantization.get_weight_only_quant_qconfig_mapping(
            weight_dtype=ipex.quantization.WoqWeightDtype.INT4,
            lowp_mode=ipex.quantization.WoqLowpMode.INT8,
            act_quant_mode=ipex.quantization.WoqActQuantMode.PER_BATCH_IC_BLOCK,
            group_size=32,
        )
        layer = ipex.llm.quantization.woq_linear.IPEXWeightOnlyQuantizedLinear.from_weight(
            qweight,
            scales,
            qzeros,
            qweight.size(0),  # not 64
            16,
            qconfig=config,
            g_idx=g_idx,
            bias=bias,
            group_size=32,
            quant_method=0,
            weight_qscheme="asym",
        )
        assert (layer.in_features, layer.out_features) == (64, 16)
    elif client == "tgi":
        layer = make(
            *(qweight, scales, qzeros, 64, 16),
            bias=bias,
            group_size=32,
            g_idx=g_idx,
            quant_method=method,
            dtype=dtype,
        )
    else:
        layer = make(*(qweight, scales, qzeros, 64, 16, None, bias, 32, g_idx, 0, 0))
    torch.testing.assert_close(layer(x), expected, rtol=0.05, atol=0.15)
    with pytest.raises(ValueError, match="bias must be None for a layer that has one"):
        layer(x, bias)
    layer = make(qweight, scales, qzeros, 64, 16, None, None, 32, g_idx, quant_method=method)
    for given in (layer(x, bias), layer(x, bias=bias), layer(x) + bias):
        torch.testing.assert_close(given, expected, rtol=0.05, atol=0.15)


@needs_llm
def test_autoawq() -> None:
    from intel_extension_for_pytorch.llm.quantization import IPEXWeightOnlyQuantizedLinear

    torch.manual_seed(4)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes = torch.randint(0, 16, (64, 16), dtype=torch.int32)
    zeros = torch.randint(0, 16, (2, 16), dtype=torch.int32)
    scales = torch.rand(2, 16) / 16

    def pack(values: Tensor) -> Tensor:
        parts = values.view(values.shape[0], 2, 8)[:, :, order]
        return (parts << torch.arange(0, 32, 4, dtype=torch.int32)).sum(-1, dtype=torch.int32)

    groups = torch.arange(64) // 32
    weight = ((codes - zeros[groups]) * scales[groups]).T
    layer = IPEXWeightOnlyQuantizedLinear.from_weight(
        pack(codes), scales, pack(zeros), 64, 16, None, None, 32, None, 1, 0
    )
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ weight.T, rtol=0.05, atol=0.15)
    hidden = ipex.llm.functional.rms_norm(x, torch.ones(64), 1e-6)
    assert hidden.shape == x.shape


def test_bitsandbytes() -> None:
    assert ipex._C._has_cpu() in (
        True,
        False,
    ) and ipex._C._has_xpu() in (True, False)
    torch.manual_seed(5)
    codes = torch.randint(0, 256, (16, 32), dtype=torch.uint8)
    absmax = torch.rand(16, 2) + 0.1
    packed, scales, zeros, bias, compensation = torch.ops.ipex_prepack.woq_linear_pack_weight(
        codes, "nf4", [16, 64], absmax, None, None, None, 32, 3
    )
    back = torch.ops.ipex_prepack.woq_linear_unpack_weight(packed, "nf4", [16, 64], 3)
    assert torch.equal(back, codes)
    x = torch.randn(2, 64)
    y = torch.ops.torch_ipex.woq_linear(
        x, packed, "nf4", [16, 64], scales, zeros, bias, None, 32, 3, 1, compensation
    )
    weight = torch.ops.torch_ipex.dequantize_4bit(codes, "nf4", [16, 64], absmax, None, 32)
    torch.testing.assert_close(y, x @ weight.T, rtol=0.1, atol=0.3)
    with pytest.raises(NotImplementedError, match="dequantize_4bit"):
        ipex.xpu.bitsandbytes.cdequantize_blockwise_fp16  # noqa: B018


@needs_quant
def test_neural_compressor(tmp_path: Path) -> None:
    from intel_extension_for_pytorch.quantization import convert, prepare

    x = torch.randn(4, 16)
    mapping = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
    for config in (mapping, ipex.quantization.default_static_qconfig_mapping):
        model = prepare(mlp().eval(), config, example_inputs=x, inplace=True)
        model(x)
        path = str(tmp_path / "best_configure.json")
        model.save_qconf_summary(qconf_summary=path)
        model.load_qconf_summary(qconf_summary=path)
        result = convert(model, inplace=True)
        with torch.no_grad():
            traced = torch.jit.freeze(torch.jit.trace(result, x, check_trace=False))
            torch.testing.assert_close(traced(x), mlp()(x), rtol=0.1, atol=0.1)
    from intel_extension_for_pytorch.nn.utils._model_convert import replace_dropout_with_identity

    plain = conv().eval()
    replace_dropout_with_identity(plain)
    assert type(plain[3]) is torch.nn.Identity
    fast = ipex.optimize(conv().eval(), replace_dropout_with_identity=True)
    image = torch.randn(1, 3, 8, 8)
    for model in (plain, fast):
        torch.testing.assert_close(model(image), conv().eval()(image), rtol=1e-4, atol=1e-5)
    training = conv().train()
    replace_dropout_with_identity(training)
    assert type(training[3]) is torch.nn.Dropout
    assert ipex.nn.modules.MergedEmbeddingBagWithSGD and ipex.nn.functional.interaction


@needs_quant
def test_wenet_dynamic_int8() -> None:
    from intel_extension_for_pytorch.quantization import convert, prepare

    config = ipex.quantization.default_dynamic_qconfig
    x = torch.randn(4, 16)
    with pytest.warns(DeprecationWarning, match="QConfigMapping"):
        model = prepare(mlp().eval(), config, example_inputs=x, inplace=False)
    model = convert(model)
    torch.testing.assert_close(model(x), mlp()(x), rtol=0.1, atol=0.1)

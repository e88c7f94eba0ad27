# SPDX-License-Identifier: Apache-2.0
"""What projects call that optimize a model through the front door."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from clients import conv, mlp, needs_llm, needs_runtime, trains

import intel_extension_for_pytorch as ipex


def test_accelerate() -> None:
    model = mlp().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = ipex.optimize(
        model, optimizer=optimizer, dtype=torch.bfloat16, inplace=True, level="O1"
    )
    trains(model, optimizer)
    reference = mlp().eval()
    model = ipex.optimize(reference, optimizer=None, dtype=torch.bfloat16, inplace=True, level="O1")
    assert model(torch.randn(2, 16).bfloat16()).shape == (2, 4)
    assert callable(ipex.xpu.mem_get_info)
    assert not (hasattr(torch, "xpu") and torch.xpu.is_available()) or ipex.xpu.is_available()


def test_transformers_trainer() -> None:
    model = mlp().eval()
    x = torch.randn(2, 16)
    expected = model(x)
    dtype = torch.bfloat16
    result = ipex.optimize(model, dtype=dtype, level="O1", conv_bn_folding=False, inplace=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        torch.testing.assert_close(result(x).float(), expected, rtol=0.05, atol=0.05)
    model = mlp().train()
    model, optimizer = ipex.optimize(
        model,
        dtype=dtype,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inplace=True,
        level="O1",
    )
    trains(model, optimizer)


def test_diffusers_community() -> None:
    unet = conv().eval()
    x = torch.randn(1, 3, 8, 8)
    expected = unet(x)
    unet = ipex.optimize(
        unet.eval(),
        dtype=torch.bfloat16,
        inplace=True,
        level="O1",
        weights_prepack=True,
        auto_kernel_selection=False,
    )
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        traced = torch.jit.trace(unet, x, check_trace=False, strict=False)
        traced = torch.jit.freeze(traced)
        torch.testing.assert_close(traced(x).float(), expected, rtol=0.05, atol=0.05)


def test_fastchat_wenet_opea_torchserve() -> None:
    model = ipex.optimize(mlp().eval(), dtype=torch.bfloat16)
    assert model(torch.randn(1, 16).bfloat16()).dtype == torch.bfloat16
    ipex._C.disable_jit_linear_repack()
    try:
        x = torch.randn(1, 16)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            traced = torch.jit.freeze(torch.jit.trace(model, x, check_trace=False))
            assert traced(x).shape == (1, 4)
    finally:
        ipex._C.enable_jit_linear_repack()
    model = ipex.optimize(mlp().eval(), torch.float32, inplace=True)
    assert model(torch.randn(1, 16)).dtype == torch.float32


@needs_runtime
def test_ai_reference_models() -> None:
    from intel_extension_for_pytorch.cpu.runtime import CPUPool, MultiStreamModule

    ipex.set_fp32_math_mode(mode=ipex.FP32MathMode.BF32, device="cpu")
    assert ipex.get_fp32_math_mode(device="cpu") == ipex.FP32MathMode.BF32
    ipex.set_fp32_math_mode(mode=ipex.FP32MathMode.FP32, device="cpu")
    pool = CPUPool(node_id=0)
    model = ipex.optimize(mlp().eval(), dtype=torch.float32)
    x = torch.randn(4, 16)
    with torch.no_grad():
        traced = torch.jit.freeze(torch.jit.trace(model, x))
        streams = MultiStreamModule(traced, num_streams=1, cpu_pool=pool)
        torch.testing.assert_close(streams(x), mlp()(x))


def test_ai_reference_models_layers() -> None:
    from intel_extension_for_pytorch.cpu.nn._roi_align import RoIAlign
    from intel_extension_for_pytorch.nn import FrozenBatchNorm2d
    from intel_extension_for_pytorch.nn.functional import interaction
    from intel_extension_for_pytorch.nn.modules import MergedEmbeddingBagWithSGD
    from intel_extension_for_pytorch.optim._lamb import Lamb
    from intel_extension_for_pytorch.optim._lars import create_optimizer_lars

    pooled = RoIAlign((2, 2), 1.0, 2)(torch.ones(1, 3, 8, 8), torch.tensor([[0.0, 0, 0, 4, 4]]))
    torch.testing.assert_close(pooled, torch.ones(1, 3, 2, 2))
    assert FrozenBatchNorm2d(3)(torch.ones(1, 3, 2, 2)).shape == (1, 3, 2, 2)
    assert interaction(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)).shape == (2, 7)
    tables = [torch.nn.EmbeddingBag(10, 4, mode="sum", sparse=True) for _ in range(2)]
    merged = MergedEmbeddingBagWithSGD.from_embeddingbag_list(tables, lr=0.1)
    indices = [torch.tensor([0, 1, 2]), torch.tensor([3, 4])]
    offsets = [torch.tensor([0, 2]), torch.tensor([0, 1])]
    assert [out.shape for out in merged(indices, offsets)] == [(2, 4), (2, 4)]
    model = mlp()
    Lamb(model.parameters(), lr=1e-3)
    create_optimizer_lars(
        model, lr=0.1, momentum=0.9, weight_decay=1e-4, bn_bias_separately=True, epsilon=1e-5
    )
    scores = torch.tensor([0.1, 0.9, 0.8, 0.3])
    assert ipex._C.roc_auc_score(torch.tensor([0.0, 1.0, 1.0, 0.0]), scores)[0] == 1.0
    assert len(ipex._C.roc_auc_score_all(torch.tensor([0.0, 1.0, 1.0, 0.0]), scores)) == 3


@needs_llm
def test_torchserve_and_ipex_llm() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=64
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    qconfig = ipex.quantization.get_weight_only_quant_qconfig_mapping(
        weight_dtype=ipex.quantization.WoqWeightDtype.INT8,
        lowp_mode=ipex.quantization.WoqLowpMode.BF16,
    )
    ipex._C.disable_jit_linear_repack()
    model = ipex.llm.optimize(
        model.eval(),
        dtype=torch.bfloat16,
        quantization_config=qconfig,
        inplace=True,
        deployment_mode=True,
    )
    ipex._C.enable_jit_linear_repack()
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.generate(ids, max_new_tokens=3, min_new_tokens=3, num_beams=1, do_sample=False)
    assert out.shape == (1, 6)
    with pytest.raises(NotImplementedError, match=r"ipex\.llm\.optimize"):
        from intel_extension_for_pytorch.transformers.optimize import (  # noqa: F401
            lowering_class_cpu,
        )


def test_deepspeed() -> None:
    assert ipex._C._has_xpu() in (True, False)
    from intel_extension_for_pytorch.xpu.deepspeed import has_deepspeed

    assert has_deepspeed() is False
    with pytest.raises(NotImplementedError, match="DeepSpeed"):
        ipex.xpu.deepspeed.softmax_fp16(torch.randn(2, 2))


def test_sdnext_and_comfyui() -> None:
    assert importlib.util.find_spec("intel_extension_for_pytorch") is not None
    assert hasattr(ipex, "xpu") and ipex.xpu.is_available() in (True, False)
    assert not hasattr(ipex._C, "_getCurrentRawStream")  # probed
    model = ipex.optimize(mlp().eval(), dtype=torch.float32, inplace=True, weights_prepack=False)
    assert model(torch.randn(1, 16)).shape == (1, 4)


def test_metadata_wheel(tmp_path: Path) -> None:
    testing = pytest.importorskip("typer.testing")
    from ipex_cli.app import app

    folders = tmp_path / "one", tmp_path / "two"
    results = [
        testing.CliRunner().invoke(app, ["migrate", "--metadata", str(path)]) for path in folders
    ]
    first, second = (Path(result.stdout.strip()) for result in results)
    assert first.parent == folders[0] and first.read_bytes() == second.read_bytes()
    # What accelerate and transformers compare.
    (found,) = importlib.metadata.distributions(
        name="intel_extension_for_pytorch", path=[str(first)]
    )
    installed = importlib.metadata.version("torch")
    assert found.version.split(".")[:2] == installed.split(".")[:2]
    assert found.requires is not None and found.requires[0].startswith("ipex==")
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    target = tmp_path / "site"
    # By its metadata: setuptools listens to whoever looks for the module.
    if any(importlib.metadata.distributions(name="pip")):
        subprocess.run([*pip, str(target), str(first)], check=True, capture_output=True)
        assert [path.suffix for path in target.iterdir()] == [".dist-info"]
    assert testing.CliRunner().invoke(app, ["migrate"]).exit_code == 2

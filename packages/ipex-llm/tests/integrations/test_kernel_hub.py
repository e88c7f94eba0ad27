# SPDX-License-Identifier: Apache-2.0
"""The kernel repository, loaded by the library ``kernels`` and by transformers from a folder; nothing is fetched."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ipex_llm.integrations.kernel_hub import flash_attn_forward, layers, write_kernel_hub

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
IDS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hub") / "ipex-kernels"
    write_kernel_hub(target)
    return target


@pytest.fixture
def kernels() -> Any:
    module = pytest.importorskip("kernels")
    if not hasattr(module, "get_local_kernel"):  # a folder of that name on the path
        pytest.skip("kernels is not installed")
    return module


@pytest.fixture
def known_to_transformers(kernels: Any) -> None:
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip(f"transformers {transformers.__version__} takes another release of kernels")


def llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **changes)).eval()


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config).eval()


def ran(monkeypatch: pytest.MonkeyPatch, layer: type[nn.Module]) -> list[str]:
    """Return a list that gets the name of the layer whenever its forward runs."""
    calls: list[str] = []
    forward = layer.forward

    @functools.wraps(forward)  # its signature is compared
    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(layer.__name__)
        return forward(*args, **kwargs)

    monkeypatch.setattr(layer, "forward", noted)
    return calls


def test_the_folder(folder: Path, tmp_path: Path) -> None:
    variant = folder / "build" / "torch-universal"
    assert json.loads((variant / "metadata.json").read_text())["version"] == 1
    (tmp_path / "file").touch()
    for taken in (folder, tmp_path / "file"):
        with pytest.raises(FileExistsError, match="must not exist or be empty, got"):
            write_kernel_hub(taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_are_what_they_replace(dtype: torch.dtype) -> None:
    from transformers.models.llama import modeling_llama as stock

    torch.manual_seed(1)
    config = transformers.LlamaConfig(**SIZES)
    x = torch.randn(2, 5, 32, dtype=dtype)
    bound = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    norm = stock.LlamaRMSNorm(32).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 2)
    mlp = stock.LlamaMLP(config).to(dtype)
    with torch.no_grad():
        for module, name in ((norm, "RMSNorm"), (mlp, "SiLUMLP"), (nn.SiLU(), "SiLU")):
            got = getattr(layers, name).forward(module, x)
            torch.testing.assert_close(got, module(x), **bound)
    for dim, shape in ((1, (2, 4, 5, 8)), (2, (2, 5, 4, 8))):
        q, k = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
        for batch in (1, 2):
            half = torch.randn(batch, 5, 4)
            angles = torch.cat([half, half], -1)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            got = layers.rotary_pos_emb()(q, k, cos, sin, dim)
            want = stock.apply_rotary_pos_emb(q, k, cos, sin, dim)
            torch.testing.assert_close(got, want, **bound)


def test_experts_follow_their_parameters() -> None:
    block = mixtral().model.layers[0].mlp
    torch.manual_seed(2)
    x, ids = torch.randn(7, 32), torch.randint(0, 4, (7, 2))
    weights = torch.rand(7, 2)
    with torch.no_grad():
        for _ in range(2):
            got = layers.Experts.forward(block.experts, x, ids, weights)
            torch.testing.assert_close(got, block.experts(x, ids, weights), rtol=1e-4, atol=1e-5)
            block.experts.down_proj.mul_(2)


def test_kernels_loads_it(kernels: Any, folder: Path) -> None:
    module = kernels.get_local_kernel(folder, backend="cpu")
    assert module.layers is layers and module.flash_attn_forward is flash_attn_forward


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (llama, {"LlamaRMSNorm": "RMSNorm", "LlamaMLP": "SiLUMLP"}),
        (mixtral, {"MixtralRMSNorm": "RMSNorm", "MixtralExperts": "Experts"}),
    ],
)
def test_kernelize(
    kernels: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, make: Any, names: dict[str, str]
) -> None:
    model = make()
    with torch.no_grad():
        want = model(IDS).logits
    calls = [ran(monkeypatch, getattr(layers, name)) for name in names.values()]
    module = __import__(type(model).__module__, fromlist=["_"])
    mapping = {}
    for kind, name in names.items():
        # What the decorator of transformers does for the first of them.
        stock = getattr(module, kind)
        if not hasattr(stock, "kernel_layer_name"):
            monkeypatch.setattr(stock, "kernel_layer_name", name, raising=False)
            kernels.replace_kernel_forward_from_hub(stock, name)
        repository = kernels.LocalLayerRepository(folder, layer_name=name)
        mapping[name] = {"cpu": {kernels.Mode.INFERENCE: repository}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(model, device="cpu", mode=kernels.Mode.INFERENCE)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert all(calls)


def test_kernel_config_of_transformers(
    known_to_transformers: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils import kernel_config

    devices = kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES
    monkeypatch.setattr(kernel_config, "KERNELS_SUPPORTED_DEVICE_TYPES", [*devices, "cpu"])
    model = llama()
    with torch.no_grad():
        want = model(IDS).logits
    calls = [ran(monkeypatch, layer) for layer in (layers.RMSNorm, layers.rotary_pos_emb)]
    names = ("RMSNorm", "rotary_pos_emb")
    config = transformers.KernelConfig(
        {name: f"{folder}:{name}" for name in names}, use_local_kernel=True
    )
    model.set_use_kernels(True, config)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert all(calls)


def test_attention_of_transformers(
    known_to_transformers: None, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"ipex/kernels={folder}")
    with torch.no_grad():
        want = llama()(IDS).logits
        model = llama()
        model.set_attn_implementation("ipex/kernels")
        assert model.config._attn_implementation == "ipex/kernels"
        torch.testing.assert_close(model(IDS).logits, want, rtol=1e-4, atol=1e-5)

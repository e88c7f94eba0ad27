# SPDX-License-Identifier: Apache-2.0
"""Models on the device: the same losses as on the host."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.usefixtures("needs_device")


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1, groups=2)
        self.group = nn.GroupNorm(2, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.group(self.b(F.silu(self.norm(self.a(x))))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, bidirectional=True, batch_first=True)
        self.gru = nn.GRU(16, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.lstm(x)[0])[0][:, -1])


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.norm = nn.RMSNorm(16)
        self.qkv = nn.Linear(16, 48, bias=False)
        self.out = nn.Linear(16, 16, bias=False)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embedding(x)
        q, k, v = self.qkv(self.norm(h)).view(*x.shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head((h + self.out(a.transpose(1, 2).flatten(2)))[:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2),
        Residual(4),
        nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
    return nn.Sequential(
        nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(96, 5)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "cnn": (cnn, lambda: torch.randn(4, 3, 17, 17)),
    "recurrent": (Recurrent, lambda: torch.randn(4, 7, 6)),
    "encoder": (encoder, lambda: torch.randn(4, 6, 16)),
    "decoder": (Decoder, lambda: torch.randint(20, (4, 6))),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}


def losses(
    model: nn.Module, batches: list[torch.Tensor], optimizer: str, device: str
) -> list[float]:
    model = copy.deepcopy(model).to(device)
    step = OPTIMIZERS[optimizer](model.parameters())
    found = []
    for batch in batches:
        step.zero_grad()
        loss = F.cross_entropy(model(batch.to(device)), torch.arange(4, device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_the_host(name: str, optimizer: str) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, batches = make(), [data() for _ in range(5)]
    expected = losses(model, batches, optimizer, "cpu")
    assert losses(model, batches, optimizer, "xpu") == pytest.approx(expected, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, data = MODELS[name]
    model, batch = make().eval(), data()
    with torch.no_grad():
        expected = model(batch)
        with torch.autocast("xpu", dtype=dtype):
            actual = model.to("xpu")(batch.to("xpu"))
    assert actual.dtype == dtype
    assert F.cosine_similarity(actual.float().cpu().flatten(), expected.flatten(), dim=0) > 0.99


def test_scaler_and_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    model = encoder().to("xpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("xpu", init_scale=128.0)
    x = torch.randn(4, 6, 16, device="xpu", requires_grad=True)
    with torch.autocast("xpu", dtype=torch.float16):
        loss = checkpoint(model, x, use_reentrant=False).float().square().mean()
    before = [p.detach().clone() for p in model.parameters()]
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert any(not a.equal(b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float", "gqa"])
def test_attention(mask: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 8)
    if mask == "gqa":
        k, v = k[:, :2], v[:, :2]
    keywords: dict[str, object] = {
        "causal": {"is_causal": True},
        "bool": {"attn_mask": torch.rand(5, 7) > 0.3},
        "float": {"attn_mask": torch.randn(2, 1, 5, 7)},
        "gqa": {"enable_gqa": True, "scale": 0.3},
    }.get(mask, {})
    results = []
    for device in ("cpu", "xpu"):
        leaves = [t.detach().to(device).requires_grad_() for t in (q, k, v)]
        moved = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in keywords.items()}
        out = F.scaled_dot_product_attention(*leaves, **moved)  # type: ignore[arg-type]
        results.append(
            [
                out.detach().cpu(),
                *(g.cpu() for g in torch.autograd.grad(out.square().sum(), leaves)),
            ]
        )
    for actual, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_compiled_attention_with_a_mask() -> None:
    def function(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, scale=0.25, enable_gqa=True)

    torch.manual_seed(0)
    arguments = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 13, 16), torch.rand(2, 1, 1, 13) > 0.3
    expected = function(*arguments)
    on_device = [t.to("xpu") for t in arguments]
    for backend in ("ipex", "aot_eager"):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        for no_grad in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
            with no_grad:
                torch.testing.assert_close(compiled(*on_device).cpu(), expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_encoder_with_padding() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 5, 16)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [1]])
    for grad in (torch.enable_grad(), torch.no_grad()):
        with grad:
            expected = model.cpu()(x, src_key_padding_mask=padding)
            actual = model.to("xpu")(x.to("xpu"), src_key_padding_mask=padding.to("xpu")).cpu()
        # The host drops padding, and fills it with zeros.
        torch.testing.assert_close(actual[~padding], expected[~padding], rtol=1e-4, atol=1e-5)

# SPDX-License-Identifier: Apache-2.0
"""Inference with TorchScript: the optimized model is traced and frozen; saved, it is loaded by C++ as well."""

import io

import torch

import intel_extension_for_pytorch as ipex


class Net(torch.nn.Module):
    """Stands for a ResNet-50, which torchvision has; weights are random."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(3, 16, 3, stride=2, bias=False),
            torch.nn.BatchNorm2d(16),
            torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1),
        )
        self.classifier = torch.nn.Linear(16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(images).flatten(1))


model = Net()
model.eval()
data = torch.rand(1, 3, 64, 64)

model = ipex.optimize(model, dtype=torch.bfloat16)

with torch.no_grad(), torch.amp.autocast("cpu", dtype=torch.bfloat16):
    traced = torch.jit.trace(model, data, check_trace=False)
    traced = torch.jit.freeze(traced)
    result = traced(data)

file = io.BytesIO()
torch.jit.save(traced, file)
file.seek(0)
again = torch.jit.load(file)
with torch.no_grad():
    assert torch.equal(again(data), result)

print("output:", tuple(result.shape), result.dtype)

# SPDX-License-Identifier: Apache-2.0
"""Inference in float32."""

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

model = ipex.optimize(model)

with torch.no_grad():
    result = model(data)

print("output:", tuple(result.shape))

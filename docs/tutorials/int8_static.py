# SPDX-License-Identifier: Apache-2.0
"""Static INT8: observe the activations of a few inputs, then compute in 8 bits."""

import torch

import intel_extension_for_pytorch as ipex
from intel_extension_for_pytorch.quantization import convert, prepare


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


model = Net().eval()
data = torch.rand(4, 3, 64, 64)
expected = model(data)

qconfig_mapping = ipex.quantization.default_static_qconfig_mapping
prepared = prepare(model, qconfig_mapping, example_inputs=data, inplace=False)

for _ in range(4):  # calibration
    prepared(torch.rand(4, 3, 64, 64))

prepared.save_qconf_summary(qconf_summary="configure.json")
prepared.load_qconf_summary(qconf_summary="configure.json")

converted = convert(prepared)
with torch.no_grad():
    traced = torch.jit.freeze(torch.jit.trace(converted, data, check_trace=False))
    result = traced(data)

torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
print("output:", tuple(result.shape))

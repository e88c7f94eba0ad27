# SPDX-License-Identifier: Apache-2.0
"""Training in bfloat16: the optimizer keeps the other half of the bits of float32 weights."""

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


torch.manual_seed(0)
images, labels = torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,))

model = Net()
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.train()
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)

losses = []
for _ in range(20):
    optimizer.zero_grad()
    with torch.amp.autocast("cpu", dtype=torch.bfloat16):
        loss = criterion(model(images), labels)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

assert losses[-1] < losses[0]
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, "checkpoint.pth")
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f}")

# SPDX-License-Identifier: Apache-2.0
"""Inference and training on an XPU, if there is one.

`pip install 'ipex[xpu]'` brings a device to a torch that has none.
"""

import torch

import intel_extension_for_pytorch as ipex

device = "xpu" if ipex.xpu.is_available() else "cpu"

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
data, labels = torch.rand(8, 64).to(device), torch.randint(0, 10, (8,)).to(device)
model = model.to(device).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.float32)
for _ in range(3):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimizer.step()

model = ipex.optimize(model.eval(), dtype=torch.bfloat16)
with torch.no_grad(), torch.autocast(device, dtype=torch.bfloat16):
    result = model(data)

print("device:", device, "output:", tuple(result.shape))

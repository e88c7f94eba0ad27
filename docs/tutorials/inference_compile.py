# SPDX-License-Identifier: Apache-2.0
"""Inference with torch.compile and the backend "ipex"."""

import torch

import intel_extension_for_pytorch as ipex

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
model.eval()
data = torch.rand(4, 64)

model = ipex.optimize(model, weights_prepack=False)
compiled = torch.compile(model, backend="ipex")

with torch.no_grad():
    result = compiled(data)
    torch.testing.assert_close(result, model(data), rtol=1e-4, atol=1e-4)

print("output:", tuple(result.shape))

# SPDX-License-Identifier: Apache-2.0
"""A script that knows nothing of ipex; its model is optimized without a change to it:

python -m intel_extension_for_pytorch.cpu.auto_ipex codeless.py
"""

import torch

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
with torch.no_grad():
    for _ in range(4):
        result = model(torch.rand(4, 64))
print("output:", tuple(result.shape))

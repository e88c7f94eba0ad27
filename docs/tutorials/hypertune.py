# SPDX-License-Identifier: Apache-2.0
"""A script for the search of launcher options; it prints what is to be made small:

python -m intel_extension_for_pytorch.cpu.hypertune --conf-file hypertune.yaml hypertune.py
"""

import time

import torch

import intel_extension_for_pytorch as ipex

model = ipex.optimize(torch.nn.Linear(64, 64).eval())
data = torch.rand(4, 64)
with torch.no_grad():
    model(data)
    start = time.perf_counter()
    for _ in range(50):
        model(data)
    milliseconds = (time.perf_counter() - start) / 50 * 1000

print("@hypertune {'name': 'latency (ms)'}")
print(milliseconds)

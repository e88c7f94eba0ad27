# SPDX-License-Identifier: Apache-2.0
"""A script for the launcher, which chooses cores, threads and memory:

python -m intel_extension_for_pytorch.cpu.launch --ninstances 1 --ncores-per-instance 1 launcher.py
"""

import os

import torch

import intel_extension_for_pytorch as ipex

model = ipex.optimize(torch.nn.Linear(64, 64).eval())
with torch.no_grad():
    model(torch.rand(4, 64))
print("threads:", torch.get_num_threads(), "cores:", len(os.sched_getaffinity(0)))

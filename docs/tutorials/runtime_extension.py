# SPDX-License-Identifier: Apache-2.0
"""The runtime extension: pools of cores, streams and tasks."""

import torch

import intel_extension_for_pytorch as ipex

model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).eval()
data = torch.rand(4, 64)
cpu_pool = ipex.cpu.runtime.CPUPool(node_id=0)

with torch.no_grad():
    expected = model(data)
    traced = torch.jit.freeze(torch.jit.trace(model, data))

    # The batch is split over streams, each on cores of its own.
    streams = ipex.cpu.runtime.MultiStreamModule(traced, num_streams=1, cpu_pool=cpu_pool)
    torch.testing.assert_close(streams(data), expected)

    # A task runs beside the caller.
    task = ipex.cpu.runtime.Task(traced, cpu_pool)
    future = task(data)
    torch.testing.assert_close(future.get(), expected)

    # A block, or a function, on the cores of a pool.
    with ipex.cpu.runtime.pin(cpu_pool):
        torch.testing.assert_close(traced(data), expected)

print("cores:", cpu_pool.core_ids)

# SPDX-License-Identifier: Apache-2.0
"""SmoothQuant: static INT8 for activations with outliers, a part of which moves into the weights."""

import torch

import intel_extension_for_pytorch as ipex
from intel_extension_for_pytorch.quantization import convert, prepare

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 32)).eval()
data = torch.randn(8, 64)
expected = model(data)

qconfig = ipex.quantization.get_smooth_quant_qconfig_mapping(alpha=0.5)
prepared = prepare(model, qconfig, example_inputs=data, inplace=False)
for _ in range(4):  # calibration
    prepared(torch.randn(8, 64))
converted = convert(prepared)

with torch.no_grad():
    traced = torch.jit.freeze(torch.jit.trace(converted, data, check_trace=False))
    result = traced(data)

torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
print("output:", tuple(result.shape))

# SPDX-License-Identifier: Apache-2.0
"""Dynamic INT8: the activations get their scale at each call, so nothing is calibrated."""

import torch

import intel_extension_for_pytorch as ipex
from intel_extension_for_pytorch.quantization import convert, prepare

model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
model.eval()
data = torch.rand(4, 64)
expected = model(data)

dynamic_qconfig = ipex.quantization.default_dynamic_qconfig_mapping
prepared = prepare(model, dynamic_qconfig, example_inputs=data)
converted = convert(prepared)

with torch.no_grad():
    result = converted(data)

torch.testing.assert_close(result, expected, rtol=0.1, atol=0.1)
print("output:", tuple(result.shape))

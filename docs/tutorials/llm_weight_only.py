# SPDX-License-Identifier: Apache-2.0
"""A language model in bfloat16, and one with weights in 8 bits.

The model is made here, small and with random weights; `AutoModelForCausalLM.from_pretrained` loads a real one.
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import intel_extension_for_pytorch as ipex

config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
torch.manual_seed(0)
prompt = torch.tensor([[1, 17, 42, 5]])
settings = {"max_new_tokens": 8, "do_sample": False, "num_beams": 1}

model = AutoModelForCausalLM.from_config(config).eval()
model = ipex.llm.optimize(model, dtype=torch.bfloat16)
with torch.inference_mode():
    tokens = model.generate(prompt, **settings)
print("bfloat16:", tokens[0].tolist())

qconfig = ipex.quantization.get_weight_only_quant_qconfig_mapping(
    weight_dtype=ipex.quantization.WoqWeightDtype.INT8,
    lowp_mode=ipex.quantization.WoqLowpMode.BF16,
)
model = AutoModelForCausalLM.from_config(config).eval()
model = ipex.llm.optimize(model, dtype=torch.bfloat16, quantization_config=qconfig)
with torch.inference_mode():
    tokens = model.generate(prompt, **settings)
print("8-bit weights:", tokens[0].tolist())

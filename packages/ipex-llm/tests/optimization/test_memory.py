# SPDX-License-Identifier: Apache-2.0
"""Memory that `optimize` takes: weights are exchanged one by one, so that no moment has the model twice."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ipex_core.kernels.providers import provider_for

CLEAR = Path("/proc/self/clear_refs")

SCRIPT = """
import re, sys
from pathlib import Path
import torch, transformers
import ipex_llm
from ipex_core.util import return_free_memory
from ipex_quant import WoqLowpMode, WoqWeightDtype, get_weight_only_quant_qconfig_mapping

def status(key):
    return int(re.search(key + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def weights(model):
    return sum(p.nbytes for p in model.parameters())

source, mode, tied = sys.argv[1:]
tied = tied == "tied"

def make(hidden, layers):
    config = transformers.LlamaConfig(vocab_size=40960 if tied else 2048, hidden_size=hidden,
        num_hidden_layers=layers, num_attention_heads=16, num_key_value_heads=4,
        intermediate_size=hidden * 11 // 4, max_position_embeddings=256, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config).eval().to(getattr(torch, source))

qconfig = None
if mode != "bfloat16":
    qconfig = get_weight_only_quant_qconfig_mapping(
        weight_dtype=WoqWeightDtype[mode], lowp_mode=WoqLowpMode.BF16)
ipex_llm.optimize(make(64, 1), dtype=torch.bfloat16, quantization_config=qconfig)  # imports what it needs
model = make(1024, 8)
before = weights(model)
return_free_memory()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
start = status("VmRSS")
ipex_llm.optimize(model, dtype=torch.bfloat16, inplace=True, quantization_config=qconfig)
peak = status("VmHWM") - start + before
return_free_memory()
after = status("VmRSS") - start + before
largest = max(weights(model.model.layers[0]), weights(model.lm_head))
print(before, largest, peak, after)
"""


@pytest.mark.parametrize(
    ("source", "mode", "tied"),
    [
        ("bfloat16", "bfloat16", "own"),
        ("bfloat16", "bfloat16", "tied"),  # a head and an embedding of the size of four layers
        ("float32", "bfloat16", "own"),
        ("bfloat16", "INT8", "own"),
        ("bfloat16", "INT4", "own"),
    ],
)
def test_peak_is_that_of_the_model_and_a_layer(source, mode, tied):
    if provider_for("cpu") is None:
        pytest.skip("packed weights of the reference are no denser than floats")
    try:
        CLEAR.write_text("5")
    except OSError:
        pytest.skip("the peak of this process cannot be reset")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, source, mode, tied],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    before, layer, peak, after = map(int, done.stdout.split())
    # What a process has beside weights (scratch, stacks of threads) is a constant; twice the weights would be far more.
    constant = 40 << 20
    assert peak < 1.1 * before + layer + constant
    # Of float32 the bits that bfloat16 lacks are kept, for `ipex.restore`.
    packed = 1 if source == "float32" else {"bfloat16": 2, "INT8": 1, "INT4": 0.6}[mode] / 2
    assert after < 1.1 * packed * before + constant

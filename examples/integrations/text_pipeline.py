# SPDX-License-Identifier: Apache-2.0
"""A pipeline of transformers on ipex: the attention function by its name, or the whole model by one call.

python text_pipeline.py --model FOLDER     # without --model: a tiny model with random weights
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import models
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

import ipex
from ipex.llm.integrations import IpexConfig, register_transformers


def main() -> None:
    """Generate with three forms of one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", default="the cat sat on")
    parser.add_argument("--new", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = options.model or models.llama(Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        register_transformers()  # once in a program; transformers knows "ipex" from here on

        # 1. Only the attention: for models and tasks that nothing else of ipex knows.
        attention = AutoModelForCausalLM.from_pretrained(
            place, trust_remote_code=False, attn_implementation="ipex"
        )
        # 2. Quantized while it is loaded.
        small = AutoModelForCausalLM.from_pretrained(
            place,
            trust_remote_code=False,
            quantization_config=IpexConfig("int8", group_size=-1),
        )
        # 3. The whole decoder as one program, in bfloat16.
        whole = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False).eval()
        whole = ipex.llm.optimize(whole, dtype=torch.bfloat16)

        for name, model in (("attention", attention), ("int8", small), ("optimize", whole)):
            generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
            with torch.inference_mode():
                found = generate(options.prompt, max_new_tokens=options.new, do_sample=False)
            print(f"{name}: {found[0]['generated_text']}")


if __name__ == "__main__":
    main()

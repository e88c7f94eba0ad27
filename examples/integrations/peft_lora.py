# SPDX-License-Identifier: Apache-2.0
"""Inference with a LoRA adapter of PEFT, merged into the weights.

python peft_lora.py --model FOLDER --adapter FOLDER     # without them: a tiny model and a random adapter
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import models
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import ipex


def random_adapter(model_folder: Path, folder: Path) -> Path:
    """Write an adapter whose values are not zero into a folder."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=False), config
    )
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained(folder)
    return folder


def main() -> None:
    """Compare the merged model with the one of PEFT, and generate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--prompt", default="the cat sat on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = options.model or models.llama(Path(temporary) / "model")
        adapter = options.adapter or random_adapter(place, Path(temporary) / "adapter")
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)

        def load() -> PeftModel:
            base = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False).eval()
            return PeftModel.from_pretrained(base, adapter).eval()

        with torch.inference_mode():
            wanted = load()(**inputs).logits

            # One adapter for all requests: merge it, then optimize what is an ordinary model again.
            merged = ipex.llm.optimize(load().merge_and_unload(), dtype=torch.float32)
            got = merged(**inputs).logits
            print(f"merged: largest difference {(got - wanted).abs().max():.1e}")
            text = merged.generate(**inputs, max_new_tokens=8, do_sample=False)
            print(tokenizer.decode(text[0]))


if __name__ == "__main__":
    main()

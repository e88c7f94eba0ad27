# SPDX-License-Identifier: Apache-2.0
"""Inference with a language model that DeepSpeed has divided over processes; one process works, too.

DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 deepspeed_inference.py --model FOLDER   # without: a tiny model
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is imported

import deepspeed
import models
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ipex


def main() -> None:
    """Generate with the model as it is and with the divided one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", default="the cat sat on")
    options = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    # Before the processes know each other: transformers lets only the first of them write a model.
    with tempfile.TemporaryDirectory() as temporary:
        place = options.model or models.llama(
            Path(temporary) / "model", width=128
        )  # DeepSpeed divides by 64
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False).eval()
    if ranks > 1:
        deepspeed.init_distributed("gloo")
    inputs = tokenizer(options.prompt, return_tensors="pt", return_token_type_ids=False)
    wanted = model.generate(**inputs, max_new_tokens=8, do_sample=False)

    # DeepSpeed divides the linear layers; its own kernels stay off.
    engine = deepspeed.init_inference(
        model,
        tensor_parallel={"tp_size": ranks},
        dtype=torch.float32,
        replace_with_kernel_inject=False,
    )
    fast = ipex.llm.optimize(engine.module, dtype=torch.float32)
    got = fast.generate(**inputs, max_new_tokens=8, do_sample=False)

    print(f"the same tokens: {torch.equal(got, wanted)}: {tokenizer.decode(got[0])}")


if __name__ == "__main__":
    main()

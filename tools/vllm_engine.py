# SPDX-License-Identifier: Apache-2.0
"""An engine of vLLM in this process, and how its tokens compare with the tokens of transformers, for `vllm_check`."""

from __future__ import annotations

import copy
import gc
import os
from pathlib import Path
from typing import Any

__all__ = [
    "NEW_TOKENS",
    "Tokens",
    "behind",
    "compare",
    "generate",
    "near_as_rounded",
    "prompts",
    "reference",
    "start",
    "stop",
]

NEW_TOKENS = 24
Tokens = list[list[int]]


def prompts() -> Tokens:
    """Return prompts of different lengths, one longer than a window and several blocks."""
    from families import tokens

    return [tokens(1, length, seed=length)[0].tolist() for length in (5, 40, 3, 130)]


def start(folder: Path, **options: Any) -> Any:
    """Return an engine of vLLM in this process."""
    from vllm import LLM

    settings = {
        "dtype": "float32",
        "max_model_len": 192,
        "max_num_seqs": 4,
        "kv_cache_memory_bytes": 1 << 25,
        "skip_tokenizer_init": True,
        "enforce_eager": not os.environ.get("VLLM_CHECK_COMPILED"),
        **options,
    }
    return LLM(str(folder), **settings)


def stop(engine: Any) -> None:
    """End an engine and the state that it leaves in the process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    engine.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


def generate(engine: Any, wanted: Tokens, **options: Any) -> Tokens:
    """Return the greedy tokens of vLLM for prompts that run together."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    given = [TokensPrompt(prompt_token_ids=one) for one in wanted]
    outputs = engine.generate(given, params, use_tqdm=False, **options)
    return [list(one.outputs[0].token_ids) for one in outputs]


def reference(model: Any, wanted: Tokens) -> Tokens:
    """Return the greedy tokens of transformers."""
    import torch

    found = []
    for one in wanted:
        ids = torch.tensor([one])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        found.append(out[0, len(one) :].tolist())
    return found


def compare(got: Tokens, wanted: Tokens) -> str:
    """Return an empty string for equal tokens, or how many are equal before the first that differs."""
    if got == wanted:
        return ""
    equal = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), len(b))
        for a, b in zip(got, wanted, strict=True)
    ]
    return f"equal tokens before the first that differs: {equal} of {NEW_TOKENS}"


def behind(model: Any, got: Tokens) -> float:
    """Return by how many nats a token of vLLM is behind the favorite of a float model, at most.

    The model gets the prompts and the tokens of vLLM, so that one that differs has no further consequence.
    """
    import torch

    worst = 0.0
    for one, more in zip(prompts(), got, strict=True):
        with torch.no_grad():
            scores = model(torch.tensor([one + more])).logits[0, len(one) - 1 : -1]
        scores = scores.log_softmax(-1)
        taken = scores.gather(1, torch.tensor(more)[:, None])[:, 0]
        worst = max(worst, float((scores.amax(-1) - taken).max()))
    return worst


def near_as_rounded(model: Any, got: Tokens) -> str:
    """Return an empty string for tokens that are at most 0.5 nats further behind than the model's in bfloat16."""
    # What rounding to bfloat16 alone costs, which may send a token to another expert.
    rounded = behind(model, reference(copy.deepcopy(model).bfloat16(), prompts()))
    worst = behind(model, got)
    if worst < rounded + 0.5:
        return ""
    return (
        f"a token is {worst:.2f} nats behind the best, with transformers in bfloat16 {rounded:.2f}"
    )

# SPDX-License-Identifier: Apache-2.0
"""Model folders with random weights and a small tokenizer, made without a download, to try the commands on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from ipex_llm.arch.seeded import seeded

#: Shapes of Llama-like models.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "max_position_embeddings": 512,
    },
    "small": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
    },
}

_TEXT = """
A model with random weights writes nothing that makes sense, but it takes as long as one that does.
The quick brown fox jumps over the lazy dog. How vexingly quick daft zebras jump!
Once upon a time there was a small computer that wanted to read every book in the library.
What is the capital of France? The capital of France is Paris. One, two, three, four, five.
Tell me a story about the sea, the sun and the moon, and the wind that moves between them.
"""

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SPECIAL = ["<s>", "</s>", "<pad>", "<|system|>", "<|user|>", "<|assistant|>"]


def make_tokenizer(vocab_size: int = 512) -> Any:
    """Return a byte-level tokenizer with at most this many tokens, trained on a few sentences."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT.strip().splitlines(), trainer)
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", start)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=_CHAT_TEMPLATE,
    )


def make_folder(
    folder: Path,
    shape: str = "tiny",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    shard_size: str = "2GB",
) -> int:
    """Write a model folder: config, random weights, tokenizer.

    Args:
        folder: Must not exist, or be empty.
        shape: One of `SHAPES`.
        dtype: Of the weights.
        seed: Of the weights.
        shard_size: Most bytes of a file, as ``save_pretrained`` takes it.

    Returns:
        The number of parameters.

    Raises:
        ValueError: The shape is unknown.
        FileExistsError: The folder exists.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if shape not in SHAPES:
        raise ValueError(f"make_folder: shape must be one of {', '.join(SHAPES)}, got {shape!r}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder: choose a new one")
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        **SHAPES[shape],
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    before = torch.get_default_dtype()
    with seeded(seed):
        torch.set_default_dtype(dtype)
        try:
            model = LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(before)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    # As folders of chat models have it; the rest of the file is what save_pretrained wrote.
    path = folder / "generation_config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())

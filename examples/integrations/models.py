# SPDX-License-Identifier: Apache-2.0
"""Tiny models with random weights, for trying the examples without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

__all__ = ["llama", "words"]

_WORDS = (
    *("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and"),
    *("then", "it", "was", "is", "very", "happy", "sad", "today"),
)


def words(folder: Path) -> Any:
    """Return a tokenizer of whole words, saved in a folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    table = {word: i for i, word in enumerate(["<pad>", "<unk>", "</s>", *_WORDS])}
    inner = Tokenizer(WordLevel(table, unk_token="<unk>"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def llama(folder: Path, width: int = 64) -> Path:
    """Write a language model and its tokenizer into a folder; return the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(words(folder)),
        max_position_embeddings=128,
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder

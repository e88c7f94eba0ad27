# SPDX-License-Identifier: Apache-2.0
"""A small model of the shape of Llama and input of it, for the tests with transformers."""

from __future__ import annotations

import pytest
import torch

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}


def llama(**changes):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, **changes})
    # With the attention that from_pretrained takes: old releases have another one without.
    return transformers.LlamaForCausalLM._from_config(config).eval()


def padded():
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}

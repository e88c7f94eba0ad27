# SPDX-License-Identifier: Apache-2.0
"""GGUF files of Llama-like models, with the names and the order of rows that Hugging Face's models have."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ipex_core.library.spec import check
from ipex_quant.formats.gguf import GgufFile, entries, files_of

__all__ = ["is_gguf", "load_gguf"]

Tensor = torch.Tensor

#: Architectures whose tensors have these names; the second group has rotary heads interleaved.
_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_INTERLEAVED = ("llama",)
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: What follows from the model's configuration.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)$")


def is_gguf(pathname: str | os.PathLike[str]) -> bool:
    """Return whether it is a GGUF file, or a folder whose weights are in one."""
    path = Path(pathname)
    if path.is_dir():
        others = any(next(path.glob(pattern), None) for pattern in ("*.safetensors", "*.bin"))
        return not others and next(path.glob("*.gguf"), None) is not None
    return path.suffix == ".gguf"


def load_gguf(
    op: str, pathname: str | os.PathLike[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return ``(state_dict, quant_config)`` of a GGUF file; linear layers stay mapped bytes.

    Raises:
        OpArgumentError: The file is damaged, of another architecture, or has a tensor that is not known.
    """
    files = files_of(op, pathname)
    metadata = files[0].metadata
    architecture = metadata.get("general.architecture")
    what = f"be one of {', '.join(_ARCHITECTURES)}"
    check(architecture in _ARCHITECTURES, op, "general.architecture", what, architecture)
    heads = _heads(op, metadata, str(architecture))
    state: dict[str, Tensor] = {}
    for file in files:
        for name in file.tensors:
            if name not in _COMPUTED:
                _add(op, state, file, name, heads if architecture in _INTERLEAVED else None)
    return state, {"quant_method": "gguf", "metadata": metadata}


def _heads(op: str, metadata: Mapping[str, Any], architecture: str) -> tuple[int, int]:
    """Return the numbers of query and of key/value heads."""
    found: list[int] = []
    for key in ("head_count", "head_count_kv"):
        name = f"{architecture}.attention.{key}"
        value = metadata.get(name, found[0] if found else None)
        check(isinstance(value, int) and value > 0, op, name, "be a positive number", value)
        found.append(int(value))
    return found[0], found[1]


def _add(
    op: str, state: dict[str, Tensor], file: GgufFile, name: str, heads: tuple[int, int] | None
) -> None:
    base, _, last = name.rpartition(".")
    match = _BLOCK.match(base)
    module = _NAMES.get(match[2] if match else base)
    known = module is not None and last in ("weight", "bias")
    check(known, op, str(file.path), "have tensors of a Llama-like model only", name)
    assert module is not None
    prefix = f"model.layers.{match[1]}." if match else ""
    order = None
    if heads is not None and module in ("self_attn.q_proj", "self_attn.k_proj"):
        order = _order(op, name, file.tensors[name].shape[0], heads[module.endswith("k_proj")])
    dense = module == "model.embed_tokens"  # looked up, not multiplied
    state.update(entries(file, name, f"{prefix}{module}.{last}", order, dense))


def _order(op: str, name: str, rows: int, heads: int) -> Tensor:
    """Return where row i of Hugging Face's weight is in llama.cpp's.

    In a head llama.cpp rotates neighbors, Hugging Face's models rotate a row and the one half a head away.
    """
    check(rows % (2 * heads) == 0, op, name, f"have rows for {heads} heads of even size", rows)
    return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).flatten()

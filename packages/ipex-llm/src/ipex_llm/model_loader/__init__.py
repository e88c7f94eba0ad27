# SPDX-License-Identifier: Apache-2.0
"""The files of a quantized checkpoint: which there are, and their tensors one at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.formats.gguf import GgufFile, entries, files_of
from ipex_quant.util.safetensors import NAMES, is_file_name

__all__ = ["is_gguf", "load_gguf", "model_config", "quantization_config", "read_file", "tensors"]

_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
#: Where tools have put the configuration when it was not in config.json.
_CONFIGS = ("quantize_config.json", "quantization_config.json", "quant_config.json")
#: A name that tells of more files is no name of a shard.
_MOST_SHARDS = 100_000
_SHARD = re.compile(r"^(.*-)(\d+)-of-(\d+)(\.\w+)$")


def _json(op: str, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise OpArgumentError(f"{op}: {path} must be a readable JSON file, got {error}") from error
    check(isinstance(found, dict), op, str(path), "hold a JSON object", type(found).__name__)
    return found  # type: ignore[no-any-return]


def model_config(op: str, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return config.json of a model folder."""
    path = Path(folder)
    check(path.is_dir(), op, "pathname", "be a model folder", str(folder))
    config = path / "config.json"
    check(config.is_file(), op, "pathname", "have a config.json", str(folder))
    return _json(op, config)


def quantization_config(op: str, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json or a file beside it says about the quantization."""
    for source in (config, config.get("text_config") or {}):
        found = source.get("quantization_config") or source.get("compression_config")
        if isinstance(found, dict):
            return found
    for name in _CONFIGS:
        if (folder / name).is_file():
            return _json(op, folder / name)
    raise OpArgumentError(
        f"{op}: pathname must have a quantization_config in config.json or a {_CONFIGS[0]}, got {folder}"
    )


def tensors(op: str, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a model folder; tensors of safetensors files are read when they are used.

    Raises:
        OpArgumentError: There are no weights, a shard is missing or damaged, or lacks what the index promises.
    """
    files, promised = _files(op, folder)
    # Path.is_file raises for a name that is too long for the file system.
    missing = sorted(name for name in files if not os.path.isfile(folder / name))
    check(not missing, op, "pathname", f"have all shards of {folder}", f"no {', '.join(missing)}")
    seen: set[str] = set()
    for name in files:
        for key, tensor in read_file(op, folder / name):
            seen.add(key)
            yield key, tensor
    absent = sorted(promised - seen)
    check(
        not absent,
        op,
        "pathname",
        "have every tensor of its index",
        f"no {', '.join(absent[:3])}" + (f" and {len(absent) - 3} more" if len(absent) > 3 else ""),
    )


def _files(op: str, folder: Path) -> tuple[list[str], set[str]]:
    """Return the names of the files and the names of the tensors that an index promises."""
    for name in _INDEXES:
        if (folder / name).is_file():
            table = _json(op, folder / name).get("weight_map")
            check(isinstance(table, dict), op, str(folder / name), "have a weight_map", table)
            assert isinstance(table, dict)
            files = sorted(set(map(str, table.values())))
            outside = next((file for file in files if not is_file_name(file)), None)
            check(outside is None, op, str(folder / name), "name files beside it", outside)
            return files, set(table)
    for suffix in (".safetensors", ".bin", ".pt"):
        found = sorted(p.name for p in folder.glob(f"*{suffix}") if "training_args" not in p.name)
        if found:
            return _complete(found), set()
    raise OpArgumentError(f"{op}: pathname must have weights (*.safetensors, *.bin), got {folder}")


def _complete(names: list[str]) -> list[str]:
    """Add the shards that the names of the others tell of."""
    every = dict.fromkeys(names)
    for name in names:
        match = _SHARD.match(name)
        if match:
            head, number, count, tail = match.groups()
            if int(count) > _MOST_SHARDS:
                continue
            for i in range(1, int(count) + 1):
                every[f"{head}{i:0{len(number)}}-of-{count}{tail}"] = None
    return sorted(every)


def read_file(op: str, path: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of one file."""
    damaged = f"{op}: {path} must be a complete weight file, got"
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (not a dictionary)
                    yield key, file.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise OpArgumentError(f"{damaged} {error}") from error
        return
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise OpArgumentError(f"{damaged} {type(error).__name__}: {error}") from error
    check(isinstance(state, dict), op, str(path), "hold a dictionary of tensors", type(state))
    for key, value in state.items():
        check(isinstance(key, str), op, f"names in {path}", "be texts", repr(key)[:80])
        check(isinstance(value, torch.Tensor), op, f"{key} of {path}", "be a tensor", type(value))
        wrong = _wrong(value)
        check(wrong is None, op, f"{key} of {path}", "be a tensor that safetensors can hold", wrong)
        yield key, value


def _wrong(value: Tensor) -> str | None:
    """Return what is wrong with a tensor of a pickle, where there are more kinds than in safetensors."""
    if value.layout != torch.strided or value.is_quantized or value.is_nested:
        return (
            f"one of layout {value.layout}" if value.layout != torch.strided else "a quantized one"
        )
    if value.is_meta:
        return "one on the meta device"
    if value.dtype not in NAMES:
        return f"one of {value.dtype}"
    # With strides of zero a small file would stand for any amount of memory.
    if value.numel() * value.itemsize > value.untyped_storage().nbytes():
        return f"one of shape {list(value.shape)} with {value.untyped_storage().nbytes()} bytes"
    return None


# -- GGUF files of Llama-like models, with the names and the order of rows that Hugging Face's models have


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

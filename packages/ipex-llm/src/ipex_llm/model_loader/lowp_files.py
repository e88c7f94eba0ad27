# SPDX-License-Identifier: Apache-2.0
"""The files of a quantized checkpoint: which there are, and their tensors one at a time."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check
from ipex_quant.util.safetensors import NAMES, is_file_name

__all__ = ["model_config", "quantization_config", "read_file", "tensors"]

Tensor = torch.Tensor

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

# SPDX-License-Identifier: Apache-2.0
"""Quantizing a model folder, a few rows at a time: no model is built, and no tensor is ever whole in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from ipex_core.library.spec import FLOATS
from ipex_llm.model_loader.schemes import Scheme
from ipex_quant.util.safetensors import (
    CheckpointError,
    Entry,
    ShardWriter,
    read_bytes,
    read_config,
    read_header,
    read_rows,
    stored_quantization,
    weight_files,
)

#: Modules that stay as they are: lookups, norms, routers, positions, and heads (whose errors are not averaged out).
_KEPT = re.compile(
    r"(^|[._])(embed\w*|wte|wpe|word_embeddings\w*|shared|norm\w*|\w*norm|ln_\w+|layernorm\w*|router|gate|"
    r"shared_expert_gate|lm_head|embed_out|output_layer|score|conv1d|conv|x_proj|dt_proj|relative_attention_bias|"
    r"rotary_emb|vision_\w+|visual|multi_modal_projector|kv_b_proj)(\.|$)"
)
_HEADS = re.compile(r"(^|\.)(lm_head|embed_out|output_layer)$")

#: Models that store weights of linear layers transposed, ``[K, N]``.
_TRANSPOSED = {"gpt2", "openai-gpt", "decision_transformer", "imagegpt"}

#: Elements of a weight that are in memory at a time.
_PART = 1 << 19
_COPY = 8 << 20

_PLAN = "ipex_quantize.json"

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is: bytes of the source that are done, of all, and the tensor that comes next."""

    done: int
    total: int
    name: str
    resumed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What a run has done."""

    quantized: int  # weights
    kept: int  # tensors
    source_bytes: int
    result_bytes: int
    shards: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    name: str
    entry: Entry
    outputs: dict[str, tuple[torch.dtype, tuple[int, ...]]]
    quantized: bool

    @property
    def size(self) -> int:
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in self.outputs.values())


def quantize_folder(
    source: Path,
    target: Path,
    scheme: Scheme,
    *,
    skip: Sequence[str] = (),
    head: bool = False,
    shard_bytes: int = 2 << 30,
    on_progress: Callable[[Progress], None] | None = None,
) -> Summary:
    """Write a model folder with quantized weights.

    Work goes on in ``TARGET.partial``, which becomes the target when it is complete. If a run is killed, the next one
    with the same arguments and source goes on behind the last tensor that was written.

    Args:
        source: Folder with ``config.json`` and safetensors files.
        target: Must not exist, or be empty.
        scheme: See `make_scheme`.
        skip: Regular expressions; weights whose module name contains one stay as they are.
        head: Quantize the head too.
        shard_bytes: Most bytes of an output file.
        on_progress: Called for each tensor, and some times within large ones.

    Returns:
        What was done.

    Raises:
        CheckpointError: The source is incomplete, damaged, already quantized or of a kind that is not supported.
        FileExistsError: The target exists.
        re.error: One of ``skip`` is no regular expression.
    """
    config = read_config(source)
    about = stored_quantization(source, config)
    if about is not None:
        method = about.get("quant_method", "unknown")
        raise CheckpointError(f"{source} must not be quantized already, got method {method!r}")
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointError(f"{source} must have a text as model_type, got {type(kind).__name__}")
    if kind in _TRANSPOSED:
        raise CheckpointError(
            f"{source} must store linear weights as [out, in], got model type {kind!r}"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder: choose a new one")
    patterns = [re.compile(pattern) for pattern in skip]
    items = _plan(source, scheme, patterns, head)
    shards = _shards(items, shard_bytes)
    work = target.with_name(target.name + ".partial")
    _start(work, source, scheme, skip, head, shard_bytes)
    total = sum(item.entry.size for item in items)
    done = 0
    names: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file_name = (
            f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            if len(shards) > 1
            else "model.safetensors"
        )
        names |= {output: file_name for item in shard for output in item.outputs}
        done = _write_shard(work / file_name, shard, scheme, done, total, on_progress)
    _finish(work, source, config, scheme, items, names, len(shards))
    if target.exists():
        target.rmdir()
    work.rename(target)
    return Summary(
        quantized=sum(item.quantized for item in items),
        kept=sum(not item.quantized for item in items),
        source_bytes=total,
        result_bytes=sum(item.size for item in items),
        shards=len(shards),
    )


def _plan(source: Path, scheme: Scheme, skip: Sequence[re.Pattern[str]], head: bool) -> list[_Item]:
    items: dict[str, _Item] = {}
    for path in weight_files(source):
        for name, entry in read_header(path).items():
            quantized = _is_linear(name, entry, skip, head)
            outputs = {name: (entry.dtype, entry.shape)}
            if quantized:
                outputs = scheme.tensors(name, entry.shape, entry.dtype)
            items[name] = _Item(name, entry, outputs, quantized)
    if not any(item.quantized for item in items.values()):
        raise CheckpointError(
            f"{source} must have 2-D float weights of linear layers to quantize, got none"
        )
    # By name, with numbers as numbers: the same order in each run, and layers one after the other.
    return sorted(items.values(), key=lambda item: _natural(item.name))


def _natural(name: str) -> list[Any]:
    return [
        (0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)
    ]


def _is_linear(name: str, entry: Entry, skip: Sequence[re.Pattern[str]], head: bool) -> bool:
    module = name.removesuffix(".weight")
    if module == name or len(entry.shape) != 2 or min(entry.shape) < 16:
        return False
    if entry.dtype not in FLOATS:
        return False
    if any(pattern.search(module) for pattern in skip):
        return False
    return (head and _HEADS.search(module) is not None) or _KEPT.search(module) is None


def _shards(items: Sequence[_Item], most: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        if shards[-1] and size + item.size > most:
            shards.append([])
            size = 0
        shards[-1].append(item)
        size += item.size
    return shards


def _start(
    work: Path, source: Path, scheme: Scheme, skip: Sequence[str], head: bool, shard_bytes: int
) -> None:
    """Make the folder of a run, or reuse the folder of an earlier run that did the same."""
    plan = {
        "scheme": dataclasses.asdict(scheme),
        "skip": list(skip),
        "head": head,
        "shard_bytes": shard_bytes,
        "source": [
            [path.name, (stat := path.stat()).st_size, stat.st_mtime_ns]
            for path in weight_files(source)
        ],
    }
    text = json.dumps(plan, indent=2)
    record = work / _PLAN
    if work.exists():
        if not record.exists() and any(work.iterdir()):
            raise FileExistsError(f"{work} exists and is no unfinished run: remove it")
        if not record.exists() or record.read_text(encoding="utf-8") != text:
            shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    record.write_text(text, encoding="utf-8")


def _write_shard(
    path: Path,
    shard: Sequence[_Item],
    scheme: Scheme,
    done: int,
    total: int,
    on_progress: Callable[[Progress], None] | None,
) -> int:
    def tell(extra: int, name: str, resumed: bool = False) -> None:
        if on_progress is not None:
            on_progress(Progress(done + extra, total, name, resumed))

    if path.exists():
        done += sum(item.entry.size for item in shard)
        tell(0, shard[-1].name, True)
        return done
    writer = ShardWriter(
        path, {name: kind for item in shard for name, kind in item.outputs.items()}
    )
    with writer.writing() as written, contextlib.ExitStack() as stack:
        files: dict[Path, BinaryIO] = {}
        for item in shard:
            if item.entry.path not in files:
                files[item.entry.path] = stack.enter_context(item.entry.path.open("rb"))
            missing = [name for name in item.outputs if name not in written]
            if missing:
                tell(0, item.name)
                file = files[item.entry.path]
                if item.quantized:
                    _quantize(writer, file, item, scheme, missing, tell)
                else:
                    _copy(writer, file, item.entry)
            done += item.entry.size
            tell(0, item.name, not missing)
    return done


def _copy(writer: ShardWriter, file: BinaryIO, entry: Entry) -> None:
    for first in range(0, entry.size, _COPY):
        writer.write(read_bytes(file, entry, first, min(_COPY, entry.size - first)))


def _quantize(
    writer: ShardWriter,
    file: BinaryIO,
    item: _Item,
    scheme: Scheme,
    missing: Sequence[str],
    tell: Callable[[int, str], None],
) -> None:
    """Write codes as they come, then the scales; what an earlier run wrote is computed again, but not written."""
    n, k = item.entry.shape
    codes_name, scale_name, *shape_name = item.outputs
    rows = max(1, _PART // k)
    scales = []
    if codes_name in missing or scale_name in missing:
        for first in range(0, n, rows):
            part = read_rows(file, item.entry, first, min(first + rows, n))
            if not bool(part.isfinite().all()):
                raise CheckpointError(
                    f"{item.entry.path} must have finite weights, got {item.name}"
                )
            codes, scale = scheme.encode(part)
            if codes_name in missing:
                writer.write(codes)
            scales.append(scale)
            tell(item.entry.size * min(first + rows, n) // n, item.name)
        if scale_name in missing:
            writer.write(torch.cat(scales))
    if shape_name and shape_name[0] in missing:
        writer.write(torch.tensor([n, k]))


def _finish(
    work: Path,
    source: Path,
    config: dict[str, Any],
    scheme: Scheme,
    items: Sequence[_Item],
    names: dict[str, str],
    shards: int,
) -> None:
    """Write what is not weights: tokenizer and other small files as they are, config and index."""
    for path in sorted(source.iterdir()):
        weights = path.suffix in _WEIGHTS
        if path.is_file() and not weights and not path.name.endswith(".index.json"):
            shutil.copyfile(path, work / path.name)
    ignore = [
        item.name.removesuffix(".weight")
        for item in items
        if not item.quantized
        and item.name.endswith(".weight")
        and len(item.entry.shape) == 2
        and (_HEADS.search(item.name.removesuffix(".weight")) or not _is_lookup(item.name))
    ]
    config = {k: v for k, v in config.items() if k != "quantization_config"}  # null
    text = json.dumps({**config, "quantization_config": scheme.config(ignore)}, indent=2)
    (work / "config.json").write_text(text + "\n", encoding="utf-8")
    if shards > 1:
        index = {
            "metadata": {"total_size": sum(item.size for item in items)},
            "weight_map": dict(sorted(names.items())),
        }
        text = json.dumps(index, indent=2)
        (work / "model.safetensors.index.json").write_text(text + "\n", encoding="utf-8")
    (work / _PLAN).unlink()
    for path in work.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_lookup(name: str) -> bool:
    """Return whether a 2-D weight is no linear layer that a reader would look for."""
    return re.search(r"(^|[._])(embed\w*|wte|wpe|word_embeddings\w*|shared)\.", name) is not None

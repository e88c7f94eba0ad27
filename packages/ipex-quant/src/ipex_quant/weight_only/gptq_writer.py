# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in GPTQ's format, written layer by layer while a model is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ipex_core.library.spec import check
from ipex_quant.util.safetensors import ShardWriter
from ipex_quant.weight_only.convert import is_conv1d, is_linear, matches, stacks
from ipex_quant.weight_only.gptq_solve import Solved
from ipex_quant.weight_only.saving import (
    Kinds,
    entries,
    identity,
    model_config,
    modules,
    write_json,
)

__all__ = ["GptqWriter", "pack_words"]

Tensor = torch.Tensor

_FILE = "model.safetensors"
_NOTE = "quantize_config.json"
#: Columns whose bits are in memory at a time.
_COLUMNS = 1024


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return int32 words ``[ceil(R * bits / 32), C]`` of codes ``[R, C]``, each column a stream of bits."""
    rows = -(-codes.shape[0] * bits // 32)
    words = torch.zeros(rows, codes.shape[1], dtype=torch.int32)
    shifts = torch.arange(bits, dtype=torch.uint8).view(1, bits, 1)
    for start in range(0, codes.shape[1], _COLUMNS):
        part = codes[:, start : start + _COLUMNS]
        planes = ((part.unsqueeze(1) >> shifts) & 1).flatten(0, 1)
        padded = torch.nn.functional.pad(planes, (0, 0, 0, rows * 32 - planes.shape[0]))
        view = padded.view(rows, 32, -1)
        for bit in range(32):
            words[:, start : start + _COLUMNS] |= view[:, bit].int() << bit
    return words


class GptqWriter:
    """Writes ``model.safetensors``, ``config.json`` and ``quantize_config.json``.

    The quantized layers come first, in the order in which they are done, then everything else.

    Args:
        folder: Where.
        model: The model before anything is quantized.
        settings: The ``quantization_config``.
        skip: Layers that stay as they are.
        scale_dtype: Of the scales.

    Raises:
        FileExistsError: The folder has weights of another kind.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        settings: dict[str, Any],
        skip: Sequence[str],
        scale_dtype: torch.dtype,
    ) -> None:
        self.folder, self.model, self.settings = folder, model, settings
        self.bits: int = settings["bits"]
        names = [p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pt")]
        ours = not names or (names == [_FILE] and (folder / _NOTE).is_file())
        if not ours:
            raise FileExistsError(
                f"gptq: save_dir must have no weights of others, got {folder / names[0]}"
            )
        kinds: Kinds = {}
        self._layers: dict[str, list[str]] = {}
        replaced: set[str] = set()
        for name, layer in _targets(model, skip).items():
            found = self._kinds(name, layer, scale_dtype)
            kinds |= found
            self._layers[name] = list(found)
            replaced.add(f"{name}.weight")
        self._rest: dict[str, list[str]] = {}
        seen: set[tuple[Any, ...]] = set()
        for name, module in modules(model):
            for key, value in entries("gptq", name, module).items():
                place = identity(value)
                if key in replaced or (value.numel() and place in seen):
                    continue
                seen.add(place)
                kinds[key] = value.dtype, tuple(value.shape)
                self._rest.setdefault(name, []).append(key)
        self._about = kinds
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = ShardWriter(folder / _FILE, kinds)

    def _kinds(self, name: str, layer: Any, scale_dtype: torch.dtype) -> Kinds:
        k, n = layer.weight.shape if is_conv1d(layer) else reversed(layer.weight.shape)
        size = self.settings["group_size"]
        groups = 1 if size == -1 else -(-k // size)
        return {
            f"{name}.qweight": (torch.int32, (-(-k * self.bits // 32), n)),
            f"{name}.qzeros": (torch.int32, (groups, -(-n * self.bits // 32))),
            f"{name}.scales": (scale_dtype, (groups, n)),
            f"{name}.g_idx": (torch.int32, (k,)),
        }

    def __enter__(self) -> GptqWriter:
        (self.folder / f"{_FILE}.part").unlink(missing_ok=True)
        self._writer.open()
        return self

    def layer(self, name: str, solved: Solved) -> None:
        """Write the next layer."""
        following = next(iter(self._layers), None)
        check(following == name, "gptq", "model", f"run {following} next", name)
        del self._layers[name]
        stored = (solved.zeros - 1) & ((1 << self.bits) - 1)  # the first version of the format
        self._writer.write(pack_words(solved.codes.t(), self.bits))
        self._writer.write(pack_words(stored, self.bits).t())
        self._writer.write(solved.scales.t())
        self._writer.write(solved.g_idx)

    def finish(self) -> None:
        """Write everything else, then the configuration."""
        places = dict(self.model.named_modules())
        for name, keys in self._rest.items():
            values = entries("gptq", name, places[name])
            for key in keys:
                value = values.get(key)  # a quantized layer drops a bias of zeros
                dtype, shape = self._about[key]
                self._writer.write(torch.zeros(shape, dtype=dtype) if value is None else value)
        self._writer.close(True)
        config = {**model_config(self.model), "quantization_config": self.settings}
        write_json(self.folder / "config.json", config)
        write_json(self.folder / _NOTE, self.settings)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._writer.close(False)
            (self.folder / f"{_FILE}.part").unlink(missing_ok=True)


def _targets(model: nn.Module, skip: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that will be quantized, in the order in which they will be."""
    found: dict[str, nn.Module] = {}
    for stack in stacks(model):
        for name, block in stack:
            for inner, module in block.named_modules():
                full = ".".join(part for part in (name, inner) if part)
                if is_linear(module) and not matches(full, skip) and module not in found.values():
                    found[full] = module
    return found

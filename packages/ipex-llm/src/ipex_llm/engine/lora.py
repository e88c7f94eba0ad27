# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of an engine: reading the folders that peft writes, and the set of those that are loaded."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ipex_llm.model_runner.lora import Adapter, features_of
from ipex_llm.records import record_of
from ipex_quant.util.safetensors import CheckpointError, Entry, read_config, read_header, read_rows

#: Largest rank and most adapters, where nothing else is said.
MAX_RANK, MAX_LORAS = 64, 8

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: How peft names a factor: the module inside its wrappers, which factor, and perhaps the name of the adapter.
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)(?:\.\w+)?\.weight")
#: What changes the computation beyond two factors: the field of the config, and the values that leave it alone.
_REFUSED: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("use_dora", (None, False)),
    ("bias", (None, "none")),
    ("lora_bias", (None, False)),
    ("modules_to_save", (None, [])),
    ("alpha_pattern", (None, {})),
    ("layer_replication", (None, [])),
    ("trainable_token_indices", (None, [], {})),
    ("target_parameters", (None, [])),
    ("use_qalora", (None, False)),
    ("arrow_config", (None,)),
    ("alora_invocation_tokens", (None, [])),
)

_numbers = itertools.count(1)


def _new_key() -> bytes:
    return f"lora {next(_numbers)}:".encode()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LoadedAdapter:
    """An adapter that was read.

    Attributes:
        path: Its folder.
        base: The base model that it names, or None.
        weights: Its factors.
        key: What keys of the prefix cache begin with, of its own for each time it is read.
    """

    path: str
    base: str | None
    weights: Adapter
    key: bytes = dataclasses.field(default_factory=_new_key)


@dataclasses.dataclass(frozen=True, slots=True)
class _Target:
    id: int
    inputs: int
    outputs: int


def _targets(model: Any, runner: Any) -> tuple[dict[str, _Target], set[str]]:
    """Return the linear layers of a model that can have adapters by name, and the names of all other modules.

    Raises:
        ValueError: The model has no names for them, or its parts are on several ranks.
    """
    if not hasattr(model, "named_modules") or not hasattr(runner, "linears"):
        raise ValueError(
            "LoRA: model must be one that ipex.llm.optimize has prepared, got a runner without modules"
        )
    if record_of(model).parallel is not None:
        raise ValueError("LoRA: model must be whole on each rank, got one that is divided")
    known: dict[int, bool] = {
        id(module): plan.transposed
        for packed in runner.linears()
        for plan in packed.plans
        for module in plan.modules
    }
    found, rest = {}, set()
    for name, module in model.named_modules():
        if id(module) in known:
            found[name] = _Target(id(module), *features_of(module, known[id(module)]))
        else:
            rest.add(name)
    return found, rest


def read_adapter(
    model: Any,
    runner: Any,
    path: str | Path,
    *,
    max_rank: int = MAX_RANK,
    base_names: Iterable[str] = (),
) -> LoadedAdapter:
    """Read a folder that peft has written: ``adapter_config.json`` and ``adapter_model.safetensors``.

    Args:
        model: The base model, prepared by `ipex.llm.optimize`.
        runner: Its runner.
        path: The folder.
        max_rank: Largest rank.
        base_names: Names that the base model has; the adapter must name one of them or none. Empty: no check.

    Raises:
        ValueError: It is no such folder, of another kind or for another model; the text names ``lora_path``.
    """
    folder = Path(path)
    try:
        config = read_config(folder, _CONFIG)
        base = _check_config(config, base_names)
        entries = read_header(folder / _WEIGHTS)
    except (CheckpointError, OSError) as error:
        raise ValueError(f"lora_path must be the folder of a LoRA adapter, got: {error}") from None
    targets, rest = _targets(model, runner)
    pairs = _pairs(entries, targets, rest)
    factors: dict[int, tuple[Tensor, Tensor]] = {}
    for name, (down, up) in pairs.items():
        target = targets[name]
        rank = _check_shapes(name, target, down, up, max_rank)
        scale = _scale(config, rank)
        factors[target.id] = (
            _read(down).to(runner.dtype),
            (_read(up).float() * scale).to(runner.dtype),
        )
    return LoadedAdapter(str(folder), base, Adapter(factors))


def _check_config(config: Mapping[str, Any], base_names: Iterable[str]) -> str | None:
    """Check what a config says, and return the base model that it names."""
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ValueError(f"lora_path must have the peft_type LORA, got {str(kind)[:40]!r}")
    for name, fine in _REFUSED:
        value = config.get(name)
        if value not in fine:
            got = str(value)[:60]
            raise ValueError(
                f"lora_path must have an adapter of two factors for each layer, got {name} = {got}, which is not"
                " supported"
            )
    for name in ("lora_alpha", "r"):
        number: Any = config.get(name)
        good = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not good or not abs(number) <= 1e9 or (name == "r" and number < 1):
            raise ValueError(f"lora_path must have a number as {name}, got {str(number)[:40]!r}")
    base = config.get("base_model_name_or_path")
    if base is None or base == "":
        return None
    if not isinstance(base, str):
        got = type(base).__name__
        raise ValueError(f"lora_path must have a text as base_model_name_or_path, got {got}")
    names = list(base_names)
    if names and _short(base) not in map(_short, names):
        served = ", ".join(sorted({repr(name) for name in names}))
        raise ValueError(
            f"lora_path must have an adapter of this model ({served}), got one of {base[:200]!r}"
        )
    return base


def _short(name: str) -> str:
    """Return the last part of the name or the path of a model, in small letters."""
    parts = [part for part in re.split(r"[/\\]", name) if part]
    snapshot = next((part for part in parts if part.startswith("models--")), None)
    last = snapshot.rpartition("--")[2] if snapshot is not None else (parts or [""])[-1]
    return last.lower()


def _pairs(
    entries: Mapping[str, Entry], targets: Mapping[str, _Target], rest: set[str]
) -> dict[str, tuple[Entry, Entry]]:
    """Return both factors of each layer."""
    found: dict[str, dict[str, Entry]] = {}
    for key, entry in entries.items():
        match = _NAME.fullmatch(key)
        if match is None:
            raise ValueError(
                "lora_path must have tensors named base_model.model.LAYER.lora_A.weight and lora_B, got"
                f" {key[:200]!r}"
            )
        name = match[1]
        if name not in targets:
            what = (
                "which takes no adapter here" if name in rest else "which the model does not have"
            )
            raise ValueError(
                "lora_path must have factors of linear layers of attention and feed-forward blocks, got"
                f" {name[:200]!r}, {what}"
            )
        found.setdefault(name, {})[match[2]] = entry
    if not found:
        raise ValueError("lora_path must have factors of at least one layer, got none")
    for name, both in found.items():
        if len(both) != 2:
            raise ValueError(
                f"lora_path must have both factors of {name!r}, got lora_{next(iter(both))}"
            )
    return {name: (both["A"], both["B"]) for name, both in found.items()}


def _check_shapes(name: str, target: _Target, down: Entry, up: Entry, max_rank: int) -> int:
    """Check the factors of a layer, and return their rank."""
    for entry in (down, up):
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise ValueError(
                f"lora_path must have factors of floats, got {entry.dtype} in {name!r}"
            )
    rank = down.shape[0] if down.shape else 0
    wanted = ((rank, target.inputs), (target.outputs, rank))
    if (down.shape, up.shape) != wanted or rank == 0:
        raise ValueError(
            f"lora_path must have an adapter of this model, with factors [r, {target.inputs}] and"
            f" [{target.outputs}, r] of {name!r}, got {list(down.shape)} and {list(up.shape)}"
        )
    most = min(max_rank, target.inputs)
    if rank > most:
        raise ValueError(f"lora_path must have a rank of at most {most}, got {rank} in {name!r}")
    return int(rank)


def _scale(config: Mapping[str, Any], rank: int) -> float:
    return float(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))


def _read(entry: Entry) -> Tensor:
    with entry.path.open("rb") as file:
        found = read_rows(file, entry, 0, entry.shape[0])
    if not bool(found.float().isfinite().all()):
        raise ValueError("lora_path must have finite factors, got NaN or infinity")
    return found


class Loras:
    """The adapters of an engine, by name; those without a name any more stay while requests use them.

    Args:
        runner: Runs the model.
        most: Most adapters, and most that are there at the same time.
    """

    def __init__(self, runner: Any, most: int) -> None:
        self._runner = runner
        self._most = most
        self._numbers: list[LoadedAdapter | None] = [None] * most
        #: A new mapping with each change: other threads may read it.
        self.loaded: Mapping[str, LoadedAdapter] = {}

    def load(self, name: str, adapter: LoadedAdapter, used: Iterable[LoadedAdapter]) -> None:
        """Add an adapter.

        Raises:
            ValueError: The name is in use, or there are too many.
        """
        if name in self.loaded:
            raise ValueError(f"lora_name must not be in use, got {name[:200]!r}")
        self._forget(used)
        if None not in self._numbers:
            raise ValueError(
                f"lora_name must be one of at most {self._most} adapters, got one more"
            )
        self._numbers[self._numbers.index(None)] = adapter
        self.loaded = {**self.loaded, name: adapter}
        self._changed()

    def unload(self, name: str, used: Iterable[LoadedAdapter]) -> bool:
        """Drop the name of an adapter, and its weights if nothing uses them; return whether there was one."""
        if name not in self.loaded:
            return False
        self.loaded = {other: a for other, a in self.loaded.items() if other != name}
        if self._forget(used):
            self._changed()
        return True

    def number(self, adapter: LoadedAdapter | None) -> int:
        """Return the number of an adapter for the runner, -1 for none."""
        return -1 if adapter is None else self._numbers.index(adapter)

    def _forget(self, used: Iterable[LoadedAdapter]) -> bool:
        """Drop weights without a name that nothing uses."""
        kept = [*self.loaded.values(), *used]
        before = list(self._numbers)
        self._numbers = [a if a is not None and a in kept else None for a in before]
        return before != self._numbers

    def _changed(self) -> None:
        weights = [None if a is None else a.weights for a in self._numbers]
        self._runner.set_adapters(weights)


def adapters_of_rows(numbers: Sequence[int], starts: Tensor) -> Tensor | None:
    """Return the number for each row of a batch, int64 ``[T]``; None if no request has an adapter."""
    if all(number < 0 for number in numbers):
        return None
    return torch.tensor(numbers).repeat_interleave(starts.diff().long())

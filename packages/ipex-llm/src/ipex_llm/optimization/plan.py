# SPDX-License-Identifier: Apache-2.0
"""`OptimizePlan`: what `ipex.llm.optimize` has decided to do with a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ipex_core.optimization.records import Record

__all__ = ["OptimizePlan", "PlannedShard"]


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard:
    """What this rank has of one decoder layer, or of the head.

    Attributes:
        module: Name of the layer, or of the head.
        heads: Query heads, 0 for the head.
        kv_heads: Key/value heads, 0 for the head.
        features: Inner features of the mlp, or logits of the head.
        of: How many heads, key/value heads and features (or logits) the whole layer has; None if it is not known.
    """

    module: str
    heads: int
    kv_heads: int
    features: int
    of: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizePlan:
    """What `ipex.llm.optimize` does with a model: the answer of `ipex.llm.plan`; ``str()`` gives a table.

    It names modules and holds no tensors, so it can be kept, compared and saved.

    Attributes:
        model: Class of the model.
        device: ``"cpu"`` or ``"xpu"``.
        dtype: dtype that parameters are cast to, or None.
        depth: What becomes one call: 3 the decoder stack, 2 some of the decoder layers, 1 neither.
        reason: Why it is less than 3, or None.
        layers: One `Record` per decoder layer: whether a program runs it, and why not. Empty if none is looked for.
        linears: One `Record` per linear layer where weights are quantized: its scheme, or why it stays.
        experts: One `Record` per mixture of experts.
        kv_cache: dtype and scales of cached keys and values.
        ranks: Ranks that divide the model, 1 for a whole one.
        rank: The own one.
        shards: What this rank has, layer by layer, where the model is divided.
        rest: Classes of the modules that ``ipex.optimize`` sees, since no program runs them, and their number.
        bytes_before: Bytes of all parameters and buffers.
        bytes_after: About how many they will be, without what keeps exact originals of cast parameters (see
            `ipex.explain`); None if it is not known.
        notes: Further remarks.
    """

    model: str
    device: str
    dtype: str | None
    depth: int
    reason: str | None
    layers: tuple[Record, ...] = ()
    linears: tuple[Record, ...] = ()
    experts: tuple[Record, ...] = ()
    kv_cache: str = "dtype of the model"
    ranks: int = 1
    rank: int = 0
    shards: tuple[PlannedShard, ...] = ()
    rest: tuple[tuple[str, int], ...] = ()
    bytes_before: int = 0
    bytes_after: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line about the whole model, as `ipex.explain` has it."""
        if self.depth == 3:
            cache = "" if self.kv_cache == "dtype of the model" else f"; cache in {self.kv_cache}"
            return f"the whole decoder stack runs as one program per step{cache}"
        done = sum(layer.done for layer in self.layers)
        if done:
            count = len(self.layers)
            return f"{done} of {count} decoder layers run as one program each: {self.reason}"
        return f"layer by layer: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, ready for JSON."""
        return _plain(dataclasses.asdict(self)) | {"summary": self.summary}  # type: ignore[no-any-return]

    def __str__(self) -> str:
        cast = "unchanged" if self.dtype is None else self.dtype
        after = "" if self.bytes_after is None else f", about {_size(self.bytes_after)} after"
        rows = [
            (f"{self.model} on {self.device}", self.summary.partition("; cache in ")[0]),
            ("dtype", cast),
            ("weights", f"{_size(self.bytes_before)} before{after}"),
            *_grouped("linear", self.linears),
            *_grouped("experts", self.experts),
            *_grouped("layer", self.layers if self.depth < 3 else ()),
        ]
        if self.depth == 3:
            rows.append(("cache", self.kv_cache))
        if self.ranks > 1:
            rows.append(("ranks", f"this is rank {self.rank} of {self.ranks}"))
            rows += [(shard.module, _shard(shard)) for shard in self.shards]
        rest = ", ".join(f"{count} {kind}" for kind, count in self.rest)
        rows.append(("ipex.optimize", f"gets {rest}" if rest else "gets nothing"))
        rows += [("note", note) for note in self.notes]
        first, *others = rows
        width = max(len(name) for name, _ in others)
        return "\n".join([": ".join(first), *(f"  {n.ljust(width)}  {text}" for n, text in others)])


def _plain(value: Any) -> Any:
    """Return a value with lists instead of tuples, as JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _grouped(title: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a line for each thing that is said of modules, with how many these are and the first of them."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for record in records:
        groups.setdefault((record.done, record.text), []).append(record.module or "(model)")
    lines = []
    for (_, text), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append((title, f"{names[0]}{more}: {text}"))
    return lines


def _shard(shard: PlannedShard) -> str:
    own = (shard.heads, shard.kv_heads, shard.features)
    whole = shard.of or ("?", "?", "?")
    if not shard.heads:
        return f"{own[2]} of {whole[2]} logits"
    names = ("heads", "key/value heads", "features")
    return ", ".join(f"{a} of {b} {n}" for a, b, n in zip(own, whole, names, strict=True))


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count / 1024:.1f} KiB"

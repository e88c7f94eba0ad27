# SPDX-License-Identifier: Apache-2.0
"""What ipex-llm keeps on objects of the user: one attribute, which holds a `Record`.

Objects are models, decoders, layers, caches of transformers, and tensors that pass through a forward.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from ipex_core.module_swap.state_dict import keep

#: Name of the attribute.
KEY = "_ipex_llm"


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """What is known of one object; None: nothing.

    Attributes:
        parallel: Of a model that is divided among ranks: its `TensorParallel`.
        patch: Of a model, decoder or layer that runs as programs: its `Patch`.
        runner: Of the same: its `Runner`. It belongs to this object; a copy has none.
        part: Of a quantized linear layer: the part of a packed weight that is its weight.
        experts: Of a module with quantized experts: their stacks.
        cache: Of a cache of a whole decoder: its `CacheState`.
        rows: Of a cache that layers fill one by one: by their numbers, the memory of each.
        call: Of a mask or cache: key and place of the rows of the last call.
        pads: Of a mask: key, version and padding that was read from it.
        wide: Of an input: the product that the next part of a packed weight takes its columns from.
    """

    parallel: Any = None
    patch: Any = None
    runner: Any = None
    part: Any = None
    experts: Any = None
    cache: Any = None
    rows: Any = None
    call: Any = None
    pads: Any = None
    wide: Any = None


_EMPTY = Record()
_NOTHING: dict[str, Any] = {}


def record_of(value: Any) -> Record:
    """Return the record of an object, an empty one if it has none. It must not be changed: see `update`."""
    record: Record = getattr(value, "__dict__", _NOTHING).get(KEY, _EMPTY)
    return record


def hooks_of(module: Any) -> list[Any]:
    """Return the hooks around a module's forward, but for idle ones.

    A call for attentions leaves hooks of transformers on modules, which do nothing in calls that ask for none.
    """
    every = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    capturing: Any = every and sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    if collector is None or collector.get():
        return every
    return [one for one in every if getattr(one, "__module__", "") != capturing.__name__]


def is_sharded(model: Any) -> bool:
    """Return whether a model has been divided among ranks."""
    return record_of(model).parallel is not None


def recorded(value: Any) -> Record:
    """Return the record of an object without shallow copies, such as a tensor or a cache; it may be changed."""
    record: Record | None = value.__dict__.get(KEY)
    if record is None:
        record = value.__dict__[KEY] = Record()
    return record


def update(value: Any, **fields: Any) -> None:
    """Change the record of an object. Shallow copies of the object keep theirs. An empty record is removed."""
    keep(value, KEY, dataclasses.replace(record_of(value), **fields))


def without(content: dict[str, Any], *names: str) -> dict[str, Any]:
    """Return the ``__dict__`` of an object for a copy of it, without these fields of its record."""
    record = content.get(KEY)
    if record is None:
        return dict(content)
    return {**content, KEY: dataclasses.replace(record, **dict.fromkeys(names))}

# SPDX-License-Identifier: Apache-2.0
"""Ops that write to their arguments: functional ops in their place, or calls on memory of their own.

AOTAutograd wraps such an op in the higher-order op ``auto_functionalized_v2``. It takes the tensors that own the memory
(``_all_bases``), says for each argument that is written which part of which of them it is, and returns the result of
the op and then the memory.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.fusion.aten import val
from ipex_core.library.spec import FUNCTIONAL

WRAPPED = torch.ops.higher_order.auto_functionalized_v2

_aten = torch.ops.aten
#: What says where the written argument lies, after its name.
_STRIDED = ("size", "stride", "storage_offset")
_SLICED = ("slice_dim", "slice_start", "slice_end")
_EMPTY = (_aten.empty.memory_format, _aten.empty_strided.default, _aten.new_empty.default)


def drop_writes(graph: fx.Graph) -> None:
    """Put ops that write nothing in the place of those that overwrite an argument which is not read afterwards."""
    for node in graph.find_nodes(op="call_function", target=WRAPPED):
        written: Any = node.args[0]
        op = FUNCTIONAL.get(written)
        given = dict(node.kwargs)
        bases: Any = given.pop("_all_bases", ())
        names = _written(written)
        places = {name: given.pop(f"_{name}_base_index", None) for name in names}
        for name in names:
            given.pop(f"_{name}_alias", None)
        read = [user for user in node.users if user.users]
        first = all(u.target is operator.getitem and u.args[1] == 0 for u in read)
        if op is None or not first or None in places.values():
            continue
        if any(name.startswith("_") for name in given):  # what is written is a part of a tensor
            continue
        given.update({name: bases[place] for name, place in places.items()})
        with graph.inserting_before(node):
            new = graph.call_function(op, (), given)
        new.meta["val"] = node.meta["val"][0]
        for user in read:
            user.replace_all_uses_with(new)
        for user in list(node.users):
            graph.erase_node(user)
        graph.erase_node(node)


def _written(op: Any) -> list[str]:
    """Return the names of the arguments that an op writes to."""
    arguments = op._schema.arguments
    return [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]


@dataclasses.dataclass(frozen=True, eq=False)
class Writing:
    """A wrapped op, called with the keywords of the wrapper.

    Attributes:
        op: The op that writes.
        places: Name of a written argument, the index of its memory, and the keywords that say which part it is.
        made: Which memories hold nothing yet: they are not copied.
        dense: Arguments that were contiguous when the graph was recorded.
    """

    op: Any
    places: tuple[tuple[str, int, tuple[str, ...]], ...]
    made: frozenset[int]
    dense: frozenset[str]

    @property
    def namespace(self) -> str:
        """The namespace of the op."""
        return str(self.op.namespace)

    @property
    def _opname(self) -> str:
        return str(self.op._opname)

    @property
    def _overloadname(self) -> str:
        return str(self.op._overloadname)

    def __call__(self, *, _all_bases: Sequence[Tensor | None], **given: Any) -> tuple[Any, ...]:
        """Run the op on copies of the memories; return its result and the memories."""
        memories = [
            None
            if one is None
            else torch.empty_like(one)
            if i in self.made
            else one.clone(memory_format=torch.contiguous_format)
            for i, one in enumerate(_all_bases)
        ]
        for name in self.dense:
            given[name] = given[name].contiguous()
        for name, index, keys in self.places:
            memory: Any = memories[index]
            part = [given.pop(key) for key in keys]
            if len(keys) == 0:
                given[name] = memory
            elif keys[0].endswith("_size"):
                given[name] = memory.as_strided(*part)
            else:
                given[name] = _aten.slice.Tensor(memory, *part)
        result = self.op(**given)
        return (*(result if isinstance(result, tuple) else (result,)), *memories)


def why_not(node: fx.Node) -> str:
    """Return why a wrapped op cannot be called on memory of its own; "" if it can."""
    op: Any = node.args[0]
    if not isinstance(op, torch._ops.OpOverload):
        return f"{op} is no op of its own"
    if any(key.endswith("_length") and key.startswith("_") for key in node.kwargs):
        return f"{op.name()} writes to a list of tensors"
    if any(f"_{name}_base_index" not in node.kwargs for name in _written(op)):
        return f"{op.name()} writes to an argument for its result"
    bases: Any = node.kwargs["_all_bases"]
    for base in bases:
        memory = val(base) if isinstance(base, fx.Node) else None
        if isinstance(base, fx.Node) and base.op != "call_function":
            return f"{op.name()} writes to an input"  # Inductor does so in place, here it would be copied
        if base is not None and (memory is None or not memory.is_contiguous()):
            return f"{op.name()} writes to a tensor that is not contiguous"
    return ""


def writing(node: fx.Node) -> tuple[Writing, dict[str, Any]]:
    """Return what calls a wrapped op, and its keywords."""
    op: Any = node.args[0]
    given = dict(node.kwargs)
    bases: Any = given["_all_bases"]
    places = []
    for name in _written(op):
        index: Any = given.pop(f"_{name}_base_index")
        given.pop(f"_{name}_alias", None)
        if index is None:
            given[name] = None
            continue
        keys = tuple(f"_{name}_{key}" for key in (*_STRIDED, *_SLICED) if f"_{name}_{key}" in given)
        places.append((name, index, keys))
    made = frozenset(
        i for i, one in enumerate(bases) if isinstance(one, fx.Node) and one.target in _EMPTY
    )
    dense = frozenset(
        name
        for name, value in given.items()
        if isinstance(value, fx.Node) and (t := val(value)) is not None and t.is_contiguous()
    )
    return Writing(op, tuple(places), made, dense), given

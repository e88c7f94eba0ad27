# SPDX-License-Identifier: Apache-2.0
"""A compiled step of vLLM as one program, attention to the paged cache and sums over ranks among its instructions.

vLLM calls its op of attention from Python for each layer, which looks up cache and metadata by the name of the layer.
These are known before a step runs. Steps that need more than two instructions for it run the op: while vLLM measures
memory there is no metadata, and other kinds of attention, padded batches and transfers of caches are left to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm import forward_context
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.attention.backend import AttentionType

from ipex_core.precompiled.lower import Call, Plan, Size, Slot
from ipex_core.precompiled.whole import RUNNERS, NotWholeError, WholePlan
from ipex_core.precompiled.writes import Writing
from ipex_core.program import Program, Register
from ipex_llm.distributed import TensorParallel
from ipex_llm.integrations.vllm.attention import IpexAttentionImpl, IpexMetadata

OP = "vllm::unified_attention_with_output.default"
#: vLLM's sum over the ranks of a group, which it names.
_SUM = "vllm::all_reduce.default"
#: Arguments of the op that must be missing or None.
_NONE = ("output_scale", "output_block_scale", "kv_cache_dummy_dep")
#: What a group of layers with the same metadata gives the program.
_TENSORS = ("query_start_loc", "key_start_loc", "block_table", "slot_mapping")
_NUMBERS = ("max_query_len", "max_seq_len")


def register() -> None:
    """Let plans with vLLM's op of attention run as one program in this process."""
    RUNNERS[OP] = WholeStep


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """An input of the program from the metadata of a group."""

    group: int
    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Bound:
    """A program with the caches of its layers.

    Attributes:
        inputs: For each input of the program the list of the values that it is in, and its place or name there: 0 the
            tensors of the plan, 1 the numbers, 2 and more the metadata of the groups.
        caches: The cache of each layer, as vLLM holds it.
        groups: For each layer the first one with the same metadata.
        firsts: The first layer of each group.
    """

    whole: WholePlan
    program: Program
    inputs: tuple[tuple[int, Any], ...]
    caches: tuple[Tensor, ...]
    groups: tuple[int, ...]
    firsts: tuple[int, ...]


class WholeStep:
    """Runs a plan as one program where that can be; see `ipex_core.precompiled.whole`.

    Args:
        plan: A plan that calls vLLM's op of attention.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._names: list[Any] = []  # of the layers: a text, or the position of vLLM's object of it
        self._rows: Size | None = None  # the number of tokens
        self._bound: _Bound | None = None
        self._never = False
        try:
            self._read()
        except NotWholeError:
            self._never = True

    def _read(self) -> None:
        """Find names of layers and the number of tokens."""
        made: dict[int, Size] = {}
        for step in self._plan.steps:
            if not isinstance(step, Call):
                continue
            if step.op is torch.ops.aten.empty.memory_format:
                rows = step.args[0][0]
                if not isinstance(rows, Size):
                    raise _not_whole("a number of tokens that varies", "another")
                made[step.results[0]] = rows
                continue
            if step.name == _SUM:
                continue
            given = dict(step.kwargs)
            if not isinstance(step.op, Writing) or step.name != OP:
                raise _not_whole("calls of attention alone", step.name)
            bases = given["_all_bases"]
            if len(bases) != 1 or any(given.get(name) is not None for name in _NONE):
                raise _not_whole("attention that writes its result", "one with more arguments")
            rows = made.get(bases[0].index)
            if rows is None or rows != (self._rows or rows):
                raise _not_whole("new memory for each result", "other memory")
            self._rows = rows
            name = given["layer_name"]
            self._names.append(
                self._plan.inputs.index(name.index) if isinstance(name, Slot) else name
            )

    def __call__(self, tensors: Sequence[Any], numbers: Sequence[int]) -> list[Any] | None:
        """Run a step; None where the plan has to."""
        if self._never or not forward_context.is_forward_context_available():
            return None
        context = forward_context.get_forward_context()
        known = context.attn_metadata
        if type(known) is not dict or has_kv_transfer_group():
            return None
        names = [_text(tensors[one]) if isinstance(one, int) else one for one in self._names]
        layers = [context.no_compile_layers[name] for name in names]
        steps: list[Any] = [known[name] for name in names]
        bound = self._bound
        if bound is None or not _holds(bound, layers, steps):
            bound = self._bind(layers, steps)
            if bound is None:
                return None
        assert self._rows is not None
        rows = numbers[self._rows.index]
        if not all(_fits(steps[i], rows) for i in bound.firsts):
            return None
        values: list[Any] = [tensors, numbers, *(vars(steps[i]) for i in bound.firsts)]
        given = [values[where][what] for where, what in bound.inputs]
        return bound.whole.results(bound.program.run(*given), numbers)

    def _bind(self, layers: Sequence[Any], steps: Sequence[Any]) -> _Bound | None:
        """Write the program for the caches that the layers have now."""
        first: dict[int, int] = {}
        groups = tuple(first.setdefault(id(step), i) for i, step in enumerate(steps))
        firsts = tuple(first.values())
        whole = WholePlan(self._plan)
        inputs = [
            {
                name: whole.input(_Given(group, name), "tensor" if name in _TENSORS else "int")
                for name in (*_TENSORS, *_NUMBERS)
            }
            for group in range(len(firsts))
        ]
        at = iter(range(len(layers)))

        def call(step: Call) -> Sequence[Register | None]:
            if step.name == _SUM:
                return [_sum(whole, *step.args, **dict(step.kwargs))]
            if not isinstance(step.op, Writing):
                return [None]  # new memory, which only the next op has
            i = next(at)
            if type(steps[i]) is not IpexMetadata:
                raise _not_whole("the attention of ipex", type(steps[i]).__name__)
            group = firsts.index(groups[i])
            return [None, _attention(whole, dict(step.kwargs), layers[i], inputs[group])]

        try:
            program = whole.write(call)
        except NotWholeError:
            self._never = True
            return None
        place = {slot: i for i, slot in enumerate(self._plan.inputs)}
        read = tuple(
            (2 + one.group, one.name)
            if isinstance(one, _Given)
            else (0, place[one.index])
            if isinstance(one, Slot)
            else (1, one.index)
            for one in whole.given
        )
        caches = tuple(layer.kv_cache for layer in layers)
        self._bound = _Bound(whole, program, read, caches, groups, firsts)
        return self._bound


def _not_whole(wanted: str, given: Any) -> NotWholeError:
    return NotWholeError(f"a whole step must have {wanted}, got {given}: run its calls")


def _text(name: Any) -> str:
    """Return the name of a layer from vLLM's object of it."""
    return str(getattr(name, "value", name))


def _fits(step: IpexMetadata, rows: int) -> bool:
    """Return whether a step is causal and has no padding."""
    return step.causal and step.num_actual_tokens == rows == step.slot_mapping.shape[0]


def _holds(bound: _Bound, layers: Sequence[Any], steps: Sequence[Any]) -> bool:
    """Return whether the layers have the caches, and share the metadata, that a program is written for."""
    same = all(layer.kv_cache is cache for layer, cache in zip(layers, bound.caches, strict=True))
    return same and all(step is steps[i] for step, i in zip(steps, bound.groups, strict=True))


def _sum(whole: WholePlan, x: Slot, group_name: str) -> Register:
    """Write the sum of a tensor over the ranks that divide the layers; return it.

    Raises:
        NotWholeError: It is the sum over another group.
    """
    group = parallel_state.get_tp_group()
    if group.unique_name != group_name:
        raise _not_whole(f"sums over {group.unique_name}", group_name)
    term = whole.tensor(x)
    total: Register = whole.builder.call("empty_like", term)  # others may read the term
    whole.builder.call("copy_", total, term)
    return TensorParallel.of(group.device_group).emit_all_reduce(whole.builder, total)


def _attention(
    whole: WholePlan, given: dict[str, Any], layer: Any, inputs: dict[str, Register]
) -> Register:
    """Write the keys and values to the cache and the attention to it; return the result, tokens by features.

    Raises:
        NotWholeError: It is another kind of attention.
    """
    impl, b = layer.impl, whole.builder
    shared = getattr(impl, "kv_sharing_target_layer_name", None) is not None
    if type(impl) is not IpexAttentionImpl or impl.attn_type != AttentionType.DECODER or shared:
        raise _not_whole("attention to a cache of its own", impl.attn_type)
    query, key, value = (
        b.call("reshape", whole.tensor(given[name]), [0, heads, impl.head_size])
        for name, heads in (
            ("query", impl.num_heads),
            ("key", impl.num_kv_heads),
            ("value", impl.num_kv_heads),
        )
    )
    dtype = layer.dtype
    caches = [b.constant(cache) for cache in impl.caches(layer.kv_cache, dtype)]
    scales = ("auto", layer._k_scale_float, layer._v_scale_float)
    sinks = impl._sinks(dtype)
    b.call("reshape_and_cache", key, value, *caches, inputs["slot_mapping"], *scales)
    out = b.call("empty_like", query)
    b.call(
        "flash_attn_varlen_func",
        *(out, query, *caches, inputs["query_start_loc"], inputs["key_start_loc"]),
        *(inputs["max_query_len"], inputs["max_seq_len"], impl.scale, True, inputs["block_table"]),
        None if impl.alibi_slopes is None else b.constant(impl.alibi_slopes),
        *(impl.window, -1, *scales, impl.softcap),
        None if sinks is None else b.constant(sinks),
    )
    result: Register = b.call("reshape", out, [0, impl.num_heads * impl.head_size])
    return result

# SPDX-License-Identifier: Apache-2.0
"""Each rank's part of a quantized checkpoint for tensor parallelism.

Projections to heads and into the MLP are split by output features, those out of them by input features, so that the
sum over the ranks is the result. The unit is a key/value head with its query heads, or a piece of the MLP; where units
do not divide evenly the first ranks have one more (4 units on 3 ranks: 2, 1, 1).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import check

_OP = "shard_low_precision_checkpoint"

_METHODS = ("gptq", "awq", "rtn", "auto-round", "int8")
_ATTENTION_IN = frozenset({"q_proj", "k_proj", "v_proj"})
_ATTENTION_OUT = frozenset({"o_proj", "out_proj"})
_MLP_IN = frozenset({"gate_proj", "up_proj", "fc1", "fc_in", "w1", "w3"})
_MLP_OUT = frozenset({"down_proj", "fc2", "fc_out", "w2"})
#: Layers that hold several projections, whose rows this module does not know the order of.
_FUSED = frozenset(
    {"query_key_value", "c_attn", "Wqkv", "W_pack", "qkv", "in_proj", "dense_h_to_4h", "c_fc"}
)
_COLUMN = _ATTENTION_IN | _MLP_IN | {"qkv_proj", "gate_up_proj"}
_ROW = _ATTENTION_OUT | _MLP_OUT
#: Far more than any model has.
_MOST_HEADS = 1 << 20


def split_sizes(units: int, world_size: int) -> list[int]:
    """Return how many units each rank has: as evenly as possible, the first ones more.

    Example:
        >>> split_sizes(4, 3)
        [2, 1, 1]
    """
    return [units // world_size + (rank < units % world_size) for rank in range(world_size)]


def split_range(units: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the first unit of a rank and the one after its last.

    Example:
        >>> split_range(4, 1, 3)
        (2, 3)
    """
    sizes = split_sizes(units, world_size)
    start = sum(sizes[:rank])
    return start, start + sizes[rank]


def _value(config: Any, *names: str) -> Any:
    for source in (config, _get(config, "text_config")):
        for name in names:
            found = None if source is None else _get(source, name)
            if found is not None:
                return found
    return None


def _get(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


@dataclasses.dataclass(frozen=True, slots=True)
class Splitter:
    """Cuts tensors, one at a time.

    Attributes:
        rank: Whose part.
        world_size: Number of ranks.
        heads: Query heads of the model.
        kv_heads: Key/value heads of the model.
        method: The quantization method.
        grain: Input features of the MLP that stay together.
        group_size: Input features that share a scale, or -1.
        desc_act: Whether input features are grouped in another order than theirs.
        bits: Bits of a code.
    """

    rank: int
    world_size: int
    heads: int
    kv_heads: int
    method: str
    grain: int = 1
    group_size: int = -1
    desc_act: bool = False
    bits: int = 4

    @classmethod
    def make(
        cls,
        model_config: Any,
        rank: int,
        world_size: int,
        method: str,
        tp_grain_size: int,
        desc_act: bool,
        bits: int,
        group_size: int,
    ) -> Splitter:
        """Return a splitter for a model; raises OpArgumentError if it cannot be split among so many ranks."""
        check(world_size >= 1, _OP, "world_size", "be positive", world_size)
        check(0 <= rank < world_size, _OP, "rank", f"be in 0..{world_size - 1}", rank)
        fits = method in _METHODS
        check(fits, _OP, "quantization_method", f"be one of {', '.join(_METHODS)}", method)
        check(tp_grain_size >= 1, _OP, "tp_grain_size", "be positive", tp_grain_size)
        heads = _value(model_config, "num_attention_heads", "n_head")
        kv_heads = _value(model_config, "num_key_value_heads") or heads
        for name, number in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
            positive = isinstance(number, int) and 0 < number <= _MOST_HEADS
            check(positive, _OP, "model_config", f"have {name}, a positive number", number)
        known = type(bits) is int and bits in (2, 3, 4, 8)
        check(known, _OP, "bits", "be one of 2, 3, 4, 8", bits)
        grouped = isinstance(group_size, int) and (group_size == -1 or group_size > 0)
        check(grouped, _OP, "group_size", "be -1 or positive", group_size)
        check(heads % kv_heads == 0, _OP, "num_key_value_heads", f"divide {heads}", kv_heads)
        text = f"be at most the number of key/value heads, {kv_heads}"
        check(world_size <= kv_heads, _OP, "world_size", text, world_size)
        return cls(
            rank, world_size, heads, kv_heads, method, tp_grain_size, group_size, desc_act, bits
        )

    def split(self, key: str, tensor: Tensor, state: Mapping[str, Tensor]) -> Tensor | None:
        """Return this rank's part of a tensor: itself if it is not split, None if the rank has none of it.

        Args:
            key: Its name in the checkpoint.
            tensor: The tensor.
            state: All tensors by name.
        """
        name, _, part = key.rpartition(".")
        layer = name.rpartition(".")[2]
        if self.world_size == 1 or not name:
            return tensor
        text = "belong to a layer with one projection"
        check(layer not in _FUSED, _OP, key, text, f"{layer}, which holds several")
        try:
            if layer in _COLUMN:
                return self._column(layer, name, part, tensor, state)
            return self._row(layer, name, part, tensor, state) if layer in _ROW else tensor
        except (IndexError, ZeroDivisionError) as error:
            what = f"have the dimensions of a layer's {part}"
            raise OpArgumentError(f"{_OP}: {key} must {what}, got {list(tensor.shape)}") from error

    # -- by output features ---------------------------------------------------------------------------------

    def _column(
        self, layer: str, name: str, part: str, tensor: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor:
        n = self._shape(name, state)[0]
        ranges = self._output_ranges(layer, n, name)
        if part in ("qweight", "qzeros"):
            per = n // tensor.shape[1] if n % tensor.shape[1] == 0 else n
            aligned = not any(edge % per for r in ranges for edge in r)
            check(aligned, _OP, f"{name}.{part}", f"be cut at multiples of {per}", ranges)
            return torch.cat([tensor[:, a // per : b // per] for a, b in ranges], dim=1)
        if part == "scales":
            return torch.cat([tensor[:, a:b] for a, b in ranges], dim=1)
        if part in ("weight", "bias", "weight_scale") and tensor.dim() and tensor.shape[0] == n:
            return torch.cat([tensor[a:b] for a, b in ranges])
        return tensor

    def _output_ranges(self, layer: str, n: int, name: str) -> list[tuple[int, int]]:
        if layer in _ATTENTION_IN:
            return [self._part(n, self.kv_heads, name)]
        if layer == "qkv_proj":
            width = self.heads + 2 * self.kv_heads
            check(n % width == 0, _OP, name, f"have a multiple of {width} output features", n)
            head = n // width
            first, last = split_range(self.kv_heads, self.rank, self.world_size)
            per = self.heads // self.kv_heads
            key = self.heads * head
            value = key + self.kv_heads * head
            return [
                (first * per * head, last * per * head),
                *((base + first * head, base + last * head) for base in (key, value)),
            ]
        if layer == "gate_up_proj":
            check(n % 2 == 0, _OP, name, "have an even number of output features", n)
            a, b = self._part(n // 2, self._mlp_units(n // 2, name), name)
            return [(a, b), (a + n // 2, b + n // 2)]
        return [self._part(n, self._mlp_units(n, name), name)]

    # -- by input features ----------------------------------------------------------------------------------

    def _row(
        self, layer: str, name: str, part: str, tensor: Tensor, state: Mapping[str, Tensor]
    ) -> Tensor | None:
        if part == "bias":  # the sum over the ranks has it once
            return tensor if self.rank == 0 else None
        k = self._shape(name, state)[1]
        units = self.kv_heads if layer in _ATTENTION_OUT else self._mlp_units(k, name)
        a, b = self._part(k, units, name)
        if part == "weight":
            return tensor[:, a:b].contiguous()
        if part == "qweight":
            per = k // tensor.shape[0] if k % tensor.shape[0] == 0 else k
            aligned = a % per == 0 and b % per == 0
            check(aligned, _OP, f"{name}.qweight", f"be cut at multiples of {per}", (a, b))
            return tensor[a // per : b // per].contiguous()
        if part == "g_idx":
            ordered = self._in_order(name, state)
            return tensor[a:b] - tensor[a] if ordered else tensor[a:b].contiguous()
        if part in ("scales", "qzeros") and tensor.shape[0] > 1 and self._in_order(name, state):
            group = self._group(k, tensor.shape[0])
            return tensor[a // group : -(-b // group)].contiguous()
        return tensor

    def extra(self, key: str, state: Mapping[str, Tensor]) -> tuple[str, Tensor] | None:
        """Return the ``g_idx`` that a layer without one needs, because a rank's part begins within a group."""
        name, _, part = key.rpartition(".")
        layer = name.rpartition(".")[2]
        if part != "scales" or self.world_size == 1 or layer not in _ROW:
            return None
        if f"{name}.g_idx" in state or f"{name}.qweight" not in state:
            return None
        k = self._shape(name, state)[1]
        units = self.kv_heads if layer in _ATTENTION_OUT else self._mlp_units(k, name)
        a, b = self._part(k, units, name)
        groups = state[key].shape[0]
        group = self._group(k, groups)
        if groups == 1 or a % group == 0:
            return None
        index = torch.arange(a, b, dtype=torch.int32) // group
        return f"{name}.g_idx", index - int(index[0])

    # -- sizes ----------------------------------------------------------------------------------------------

    def _part(self, size: int, units: int, name: str) -> tuple[int, int]:
        check(size % units == 0, _OP, name, f"have a multiple of {units} features to split", size)
        a, b = split_range(units, self.rank, self.world_size)
        return a * (size // units), b * (size // units)

    def _mlp_units(self, size: int, name: str) -> int:
        align = 32 // math.gcd(32, self.bits) if self.method != "int8" else 1
        group = 1 if self.group_size == -1 or self.desc_act else self.group_size
        for grain in (math.lcm(self.grain, group, align), math.lcm(group, align), align):
            units = size // grain
            if size % grain == 0 and units >= self.world_size:
                return units
        what = f"be divisible among {self.world_size} ranks in pieces of {align}"
        check(False, _OP, f"features of {name}", what, size)
        raise AssertionError

    def _in_order(self, name: str, state: Mapping[str, Tensor]) -> bool:
        """Return whether the input features are grouped in their order."""
        index = state.get(f"{name}.g_idx")
        if index is None or not index.numel():
            return not self.desc_act
        return bool((index[1:] >= index[:-1]).all())

    def _group(self, k: int, groups: int) -> int:
        if self.group_size != -1:
            return self.group_size
        return -(-k // groups)

    def _shape(self, name: str, state: Mapping[str, Tensor]) -> tuple[int, int]:
        """Return N and K of a layer."""
        for part in ("weight", "qweight"):
            tensor = state.get(f"{name}.{part}")
            if tensor is None:
                continue
            shape = list(tensor.shape)
            check(len(shape) == 2, _OP, f"{name}.{part}", "be 2-D", shape)
            if part == "weight":
                return shape[0], shape[1]
            scales = state.get(f"{name}.scales")
            check(scales is not None, _OP, "low_precision_checkpoint", f"have {name}.scales", None)
            assert scales is not None
            n = scales.shape[1]
            if shape[1] == n and self.method != "awq":
                index = state.get(f"{name}.g_idx")
                k = shape[0] * 32 // self.bits
                return n, k if index is None or not index.numel() else index.numel()
            return n, shape[0]
        check(False, _OP, "low_precision_checkpoint", f"have a weight for {name}", None)
        raise AssertionError

# SPDX-License-Identifier: Apache-2.0
"""A step of a language model with the cache as plain tensors, for engines that run graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import workloads
from .task import Task


def past(tensors: tuple[Tensor, ...]) -> Any:
    """Return a cache that begins with the tensors of a graph's inputs; ``tensors`` of it are what it holds."""
    from transformers import DynamicCache

    class Past(DynamicCache):
        def __init__(self) -> None:
            super().__init__()
            self.tensors = list(tensors)

        def update(
            self,
            key_states: Tensor,
            value_states: Tensor,
            layer_idx: int,
            *args: Any,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor]:
            first = 2 * layer_idx
            both = (
                torch.cat((self.tensors[first], key_states), 2),
                torch.cat((self.tensors[first + 1], value_states), 2),
            )
            self.tensors[first : first + 2] = both
            return both

    return Past()


class Step(nn.Module):
    """Tokens, their positions, an additive mask, the order of the texts and the cache in; logits and the cache out.

    Args:
        model: A Llama of transformers, float32.
        reorder: Whether the graph picks the texts of the cache, as OpenVINO's fused attention wants it.
    """

    def __init__(self, model: Any, reorder: bool = False) -> None:
        super().__init__()
        self.model = model
        self.reorder = reorder
        config = model.config
        width = config.hidden_size // config.num_attention_heads
        self.cache_shape = (1, config.num_key_value_heads, 0, width)
        pairs = [(f"past.{i}.key", f"past.{i}.value") for i in range(config.num_hidden_layers)]
        self.past_names = [name for pair in pairs for name in pair]
        self.input_names = [
            *("input_ids", "position_ids", "mask"),
            *(["order"] if reorder else []),
            *self.past_names,
        ]
        self.output_names = ["logits", *(name.replace("past", "new") for name in self.past_names)]

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor, *before: Tensor) -> Any:
        """Return the logits of the last token and the cache."""
        if self.reorder:
            before = tuple(x.index_select(0, before[0]) for x in before[1:])
        cache = past(before)
        hidden = self.model.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        )[0]
        return (self.model.lm_head(hidden[:, -1]), *cache.tensors)

    def example(self) -> tuple[Tensor, ...]:
        """Return inputs to trace it with: two tokens after three."""
        feed = arrays(torch.zeros(1, 2, dtype=torch.int64).numpy(), 3)
        order = [torch.zeros(1, dtype=torch.int32)] if self.reorder else []
        batch, heads, _, width = self.cache_shape
        before = [torch.zeros(batch, heads, 3, width) for _ in self.past_names]
        return (*(torch.from_numpy(x) for x in feed.values()), *order, *before)


def load(task: Task) -> Any:
    """Return the model in float32: the engines choose their precision."""
    return workloads.load(task).float()


def arrays(ids: Any, place: int) -> dict[str, Any]:
    """Return the inputs of a step that is not the cache: of ``ids`` [1, tokens] after ``place`` tokens."""
    import numpy

    positions = numpy.arange(place, place + ids.shape[1])
    hidden = numpy.arange(place + ids.shape[1]) > positions[:, None]
    mask = numpy.where(hidden, numpy.finfo(numpy.float32).min, numpy.float32(0))
    return {"input_ids": ids, "position_ids": positions[None], "mask": mask[None, None]}

# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that the backward pass updates.

The backward pass of all tables and the step of the optimizer are one op: neither dense nor sparse gradients of tables
are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ipex_core.library.kernels import run_op
from ipex_core.nn.embedding.tables import (
    EmbeddingSpec,
    Lookups,
    MergedEmbeddingBag,
    gather,
    no_trails,
    on_huge_pages,
)


class SGDArgs(NamedTuple):
    """State and settings of `MergedEmbeddingBagWithSGD`; trails of tables that are not split are empty."""

    bf16_trail: list[Tensor]
    weight_decay: float
    lr: float


class AdaGradArgs(NamedTuple):
    """State and settings of `MergedEmbeddingBagWithAdaGrad`; trails of tables that are not split are empty."""

    hessian: list[Tensor]
    bf16_trail: list[Tensor]
    eps: float
    lr: float


def _number(owner: object, name: str, value: Any) -> Any:
    if isinstance(value, str):
        raise TypeError(f"{type(owner).__name__}: {name} must be a number, got {value!r}")
    if not 0.0 <= value < float("inf"):
        raise ValueError(
            f"{type(owner).__name__}: {name} must be a finite number, 0 or more, got {value}"
        )
    return value


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower halves of float32 numbers."""
    bits = weight.detach().float().contiguous().view(torch.int32)
    halves = (bits >> 16).to(torch.int16), bits.to(torch.int16)
    return halves[0].view(torch.bfloat16), halves[1].view(torch.bfloat16)


def _is_split(trail: Tensor) -> bool:
    # By its dimensions: a rank may have no rows of a small table.
    return trail.dim() == 2


def _joined(weight: Tensor, trail: Tensor) -> Tensor:
    top = weight.detach().view(torch.int16).int() << 16
    return (top | (trail.view(torch.int16).int() & 0xFFFF)).view(torch.float32)


class _Updated(MergedEmbeddingBag):
    """Tables that the backward pass updates; they get no gradients.

    A state dict has the tables in float32, also where they are split, and the state of the optimizer.
    """

    _ARGS: ClassVar[str]

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__(embedding_specs)
        self.register_state_dict_post_hook(_save_whole)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_load_split)  # type: ignore[no-untyped-call]

    def forward(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Sequence[Tensor] | None = None,
        *,
        need_linearize_indices_and_offsets: bool | Tensor = True,
    ) -> tuple[Tensor, ...]:
        """Return the bags of each table, as `MergedEmbeddingBag` does.

        Raises:
            RuntimeError: As there, or `DistributedDataParallel` holds the tables of more than one rank.
        """
        if torch.is_grad_enabled():
            self._check_apart("each rank would update its own")
        indices, offsets = self._given(indices, offsets, need_linearize_indices_and_offsets)
        return self._bags(indices, offsets, per_sample_weights)

    def _check_apart(self, reason: str) -> None:
        """Raise where the module runs inside `DistributedDataParallel`, which takes the tables for its own."""
        if not dist.is_available() or torch.compiler.is_compiling():
            return
        outer = nn.parallel.DistributedDataParallel._get_active_ddp_module()
        if outer is None or outer.process_group.size() == 1:
            return
        held = {id(parameter) for parameter in outer._module_parameters}
        if any(id(weight) in held for weight in self.weights):
            raise RuntimeError(
                f"{type(self).__name__}: tables must not be parameters of DistributedDataParallel, where {reason}: wrap"
                " the rest of the model, or name the tables in its _set_params_and_buffers_to_ignore_for_model before"
            )

    def _state(self) -> Any:
        return getattr(self, self._ARGS)

    def _update(self) -> tuple[str, list[list[Tensor]], tuple[float, ...]]:
        """Return the op that steps, its lists with a tensor for each table, and its numbers."""
        raise NotImplementedError

    def _backward(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        lookups: Lookups,
        wanted: Sequence[int],
    ) -> list[Tensor | None]:
        op, states, numbers = self._update()
        run_op(
            op,
            self.dtype,
            [grads[i] for i in wanted],
            [weights[i].detach() for i in wanted],
            *([values[i] for i in wanted] for values in states),
            *lookups.of(wanted),
            *numbers,
        )
        return [None] * len(weights)

    def use_huge_pages(self) -> None:
        """Move the tables and the state of the optimizer to huge pages; see `MergedEmbeddingBag`."""
        super().use_huge_pages()
        for values in self._update()[1]:
            values[:] = [on_huge_pages(value) for value in values]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the state of the optimizer along with the tables; tables that are cast are whole again."""
        super()._apply(fn, recurse)
        trails = self._state().bf16_trail
        for i, weight in enumerate(self.weights):
            if _is_split(trails[i]) and weight.dtype != torch.bfloat16:
                if weight.dtype in (torch.float32, torch.float64):
                    weight.data.copy_(_joined(weight.detach().bfloat16(), trails[i]))
                trails[i] = no_trails(1)[0]
        for values in self._update()[1]:
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            values[:] = [
                v.to(w.device, v.dtype if values is trails else wide)
                for v, w in zip(values, self.weights, strict=True)
            ]
        return self

    def to_bfloat16_train(self) -> None:
        """Split the float32 tables into halves: the tables become bfloat16, the rest is kept beside them.

        Steps are taken on the whole numbers, so training is float32 training with a forward pass in bfloat16, and takes
        the memory of float32 alone.

        Raises:
            ValueError: The tables are neither float32 nor bfloat16.
        """
        if self.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(
                f"{type(self).__name__}: to_bfloat16_train must be called on float32 tables, "
                f"got {self.dtype}"
            )
        trails = self._state().bf16_trail
        for i, weight in enumerate(self.weights):
            if not _is_split(trails[i]):
                top, trails[i] = _split(weight)
                self.weights[i] = nn.Parameter(top, requires_grad=weight.requires_grad)
                gather(top)
                gather(trails[i])
        self.dtype = torch.bfloat16


def _save_whole(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    args = module._state()
    for i, trail in enumerate(args.bf16_trail):
        key = f"{prefix}weights.{i}"
        if _is_split(trail) and key in state:
            state[key] = _joined(state[key], trail)
    for i, hessian in enumerate(getattr(args, "hessian", ())):
        state[f"{prefix}{module._ARGS}.hessian.{i}"] = hessian


def _load_split(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    args = module._state()
    for i, trail in enumerate(args.bf16_trail):
        key = f"{prefix}weights.{i}"
        if _is_split(trail) and key in state and state[key].shape == trail.shape:
            state[key], low = _split(state[key])
            trail.copy_(low)
    for i, hessian in enumerate(getattr(args, "hessian", ())):
        # Checkpoints of others have none: the sums stay as they are.
        loaded = state.pop(f"{prefix}{module._ARGS}.hessian.{i}", None)
        if loaded is not None:
            hessian.copy_(loaded)


class MergedEmbeddingBagWithSGD(_Updated):
    """Embedding bags whose backward pass takes a step of SGD on the rows that were looked up.

    Args:
        embedding_specs: The tables.
        lr: Learning rate.
        weight_decay: L2 penalty, applied to the rows that were looked up only.

    Raises:
        AssertionError: The tables differ in row size, dtype, mode or ``include_last_offset``.
        ValueError: A number is negative, or as for `MergedEmbeddingBag`.
    """

    _ARGS = "sgd_args"

    def __init__(
        self, embedding_specs: Sequence[EmbeddingSpec], lr: float = 0.01, weight_decay: float = 0
    ) -> None:
        super().__init__(embedding_specs)
        self.init_sgd_args(lr, weight_decay)

    def init_sgd_args(
        self, lr: float, weight_decay: float, bf16_trail: list[Tensor] | None = None
    ) -> None:
        """Set ``sgd_args``; without trails the tables are not split."""
        self.sgd_args = SGDArgs(
            no_trails(self.n_tables) if bf16_trail is None else bf16_trail,
            _number(self, "weight_decay", weight_decay),
            _number(self, "lr", lr),
        )

    def _update(self) -> tuple[str, list[list[Tensor]], tuple[float, ...]]:
        args = self.sgd_args
        return "merged_embeddingbag_sgd", [args.bf16_trail], (args.lr, args.weight_decay)


class MergedEmbeddingBagWithAdaGrad(_Updated):
    """Embedding bags whose backward pass takes a step of Adagrad on the rows that were looked up.

    Args:
        embedding_specs: The tables.
        lr: Learning rate.
        eps: Added to the root of the sum of squares.

    Raises:
        AssertionError: The tables differ in row size, dtype, mode or ``include_last_offset``.
        ValueError: A number is negative, or as for `MergedEmbeddingBag`.
    """

    _ARGS = "adagrad_args"

    def __init__(
        self, embedding_specs: Sequence[EmbeddingSpec], lr: float = 0.01, eps: float = 1e-10
    ) -> None:
        super().__init__(embedding_specs)
        self.init_adagrad_args(lr, eps)

    def init_adagrad_args(
        self,
        lr: float,
        eps: float,
        bf16_trail: list[Tensor] | None = None,
        hessian: list[Tensor] | None = None,
    ) -> None:
        """Set ``adagrad_args``; the sums of squares begin with zeros."""
        if hessian is None:
            exact = torch.float64 if self.dtype == torch.float64 else torch.float32
            hessian = [torch.zeros(w.shape, dtype=exact) for w in self.weights]
            for squares in hessian:
                gather(squares)
        self.adagrad_args = AdaGradArgs(
            hessian,
            no_trails(self.n_tables) if bf16_trail is None else bf16_trail,
            _number(self, "eps", eps),
            _number(self, "lr", lr),
        )

    def _update(self) -> tuple[str, list[list[Tensor]], tuple[float, ...]]:
        args = self.adagrad_args
        return "merged_embeddingbag_adagrad", [args.bf16_trail, args.hessian], (args.lr, args.eps)

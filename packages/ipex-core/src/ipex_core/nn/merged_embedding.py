# SPDX-License-Identifier: Apache-2.0
"""Embedding tables of a recommendation model in one module, updated in the backward pass.

The forward pass of all tables is one op, and so are the backward pass and the step of the optimizer: neither dense nor
sparse gradients of tables are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable

__all__ = [
    "AdaGradArgs",
    "EmbeddingSpec",
    "MergedEmbeddingBag",
    "MergedEmbeddingBagWithAdaGrad",
    "MergedEmbeddingBagWithCat",
    "MergedEmbeddingBagWithSGD",
    "PoolingMode",
    "SGDArgs",
]

Tensor = torch.Tensor


class PoolingMode(IntEnum):
    """How the rows of a bag become one."""

    SUM = 0
    MEAN = 1


class EmbeddingSpec(NamedTuple):
    """One table; the fields are those of `torch.nn.EmbeddingBag`. Without a weight it is drawn as there."""

    num_embeddings: int
    embedding_dim: int
    pooling_mode: str
    dtype: torch.dtype
    weight: Tensor | None
    sparse: bool
    include_last_offset: bool


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


class _Lookups(NamedTuple):
    """What is looked up in all tables."""

    indices: list[Tensor]
    offsets: list[Tensor]
    per_sample_weights: list[Tensor]
    mode: str
    include_last_offset: bool

    def of(self, tables: Sequence[int]) -> tuple[Any, ...]:
        """Return the arguments of an op on some of the tables."""
        indices, offsets, factors = (
            [values[i] for i in tables] if values else [] for values in self[:3]
        )
        return indices, offsets, factors, self.mode, self.include_last_offset


def _forward(weights: Sequence[Tensor], lookups: _Lookups) -> Tensor:
    result: Tensor = torch.ops.ipex.merged_embeddingbag_forward(list(weights), *lookups)
    return result


def _apart(bags: Tensor) -> tuple[Tensor, ...]:
    """Return the parts of ``bags`` as tensors of their own, which autograd does not take for views of one."""
    if torch.compiler.is_compiling():
        return bags.unbind(0)
    _, count, dim = bags.shape
    storage = bags.untyped_storage()
    return tuple(
        bags.new_empty(0).set_(storage, i * count * dim, (count, dim), (dim, 1))
        for i in range(bags.shape[0])
    )


class _Bags(torch.autograd.Function):
    """Forward: the bags of all tables. Backward: ``owner._backward``."""

    @staticmethod
    def forward(ctx: Any, owner: Any, lookups: _Lookups, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.owner, ctx.lookups, ctx.weights = owner, lookups, weights
        return _apart(_forward(weights, lookups))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad[2:]) if needed]
        found = ctx.owner._backward(grads, ctx.weights, ctx.lookups, wanted)
        return (None, None, *found)


def _number(owner: object, name: str, value: float) -> float:
    if not 0.0 <= value < float("inf"):
        raise ValueError(
            f"{type(owner).__name__}: {name} must be a finite number, 0 or more, got {value}"
        )
    return value


def _no_trails(count: int) -> list[Tensor]:
    return [torch.empty(0, dtype=torch.bfloat16) for _ in range(count)]


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower halves of float32 numbers."""
    bits = weight.detach().float().contiguous().view(torch.int32)
    halves = (bits >> 16).to(torch.int16), bits.to(torch.int16)
    return halves[0].view(torch.bfloat16), halves[1].view(torch.bfloat16)


def _joined(weight: Tensor, trail: Tensor) -> Tensor:
    top = weight.detach().view(torch.int16).int() << 16
    return (top | (trail.view(torch.int16).int() & 0xFFFF)).view(torch.float32)


class MergedEmbeddingBag(nn.Module):
    """Embedding bags of one dtype and row size, looked up in one call.

    Gradients of the tables are dense.

    Args:
        embedding_specs: The tables.

    Raises:
        AssertionError: The tables differ in row size, dtype, mode or ``include_last_offset``.
        ValueError: There is no table, or a mode is neither ``"sum"`` nor ``"mean"``.

    Example:
        >>> import torch
        >>> from ipex_core.nn.merged_embedding import MergedEmbeddingBag
        >>> tables = [torch.nn.EmbeddingBag(n, 4, mode="sum") for n in (10, 20)]
        >>> merged = MergedEmbeddingBag.from_embeddingbag_list(tables)
        >>> rows, starts = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
        >>> [bags.shape for bags in merged([rows, rows], [starts, starts])]
        [torch.Size([2, 4]), torch.Size([2, 4])]
    """

    def __init__(self, embedding_specs: Sequence[EmbeddingSpec]) -> None:
        super().__init__()
        name = type(self).__name__
        if not embedding_specs:
            raise ValueError(f"{name}: embedding_specs must hold at least 1 table, got 0")
        first = embedding_specs[0]
        for field in ("embedding_dim", "dtype", "pooling_mode", "include_last_offset"):
            values = {getattr(spec, field) for spec in embedding_specs}
            if len(values) > 1:
                raise AssertionError(
                    f"{name}: {field} must be the same for all tables, got "
                    f"{', '.join(sorted(map(str, values)))}"
                )
        if first.pooling_mode not in ("sum", "mean"):
            raise ValueError(
                f"{name}: pooling_mode must be 'sum' or 'mean', got {first.pooling_mode!r}"
            )
        self.n_tables = len(embedding_specs)
        self.embedding_dim = first.embedding_dim
        self.dtype = first.dtype
        self.pooling_mode = PoolingMode.SUM if first.pooling_mode == "sum" else PoolingMode.MEAN
        self.include_last_offset = first.include_last_offset
        self.dense = not any(spec.sparse for spec in embedding_specs)
        self.weights = nn.ParameterList([_weight_of(name, spec) for spec in embedding_specs])

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[nn.EmbeddingBag], **settings: float
    ) -> MergedEmbeddingBag:
        """Make the module from stock layers. It shares their memory.

        Args:
            tables: The layers.
            settings: Further arguments of the constructor.

        Raises:
            ValueError: A layer has ``padding_idx``, ``max_norm`` or ``scale_grad_by_freq``.
        """
        specs = []
        for i, table in enumerate(tables):
            for option in ("padding_idx", "max_norm", "scale_grad_by_freq"):
                value = getattr(table, option)
                if value is not None and value is not False:
                    raise ValueError(
                        f"{cls.__name__}: tables[{i}] must not have {option}, got {value}"
                    )
            specs.append(
                EmbeddingSpec(
                    table.num_embeddings,
                    table.embedding_dim,
                    table.mode,
                    table.weight.dtype,
                    table.weight.detach(),
                    table.sparse,
                    table.include_last_offset,
                )
            )
        return cls(specs, **settings)

    def extra_repr(self) -> str:
        """Return a line per table."""
        lines = [f"number of tables={self.n_tables}"]
        for i, weight in enumerate(self.weights):
            mode = self.pooling_mode.name.lower()
            lines.append(f"table{i}: {weight.shape[0]}, {weight.shape[1]}, {mode}, {weight.dtype}")
        return "\n".join(lines)

    def forward(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the bags of each table.

        Args:
            indices: For each table the rows, the bags one after the other: int32 or int64.
            offsets: For each table where its B bags begin; with ``include_last_offset`` also where the last one ends.
            per_sample_weights: For each table a factor per index, in the dtype of the tables; without a gradient.

        Returns:
            For each table ``[B, embedding_dim]``.

        Raises:
            AssertionError: The gradients of the tables are to be sparse.
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
        """
        if not self.dense:
            raise AssertionError(f"{type(self).__name__}: tables must have sparse=False, got True")
        return self._bags(indices, offsets, per_sample_weights)

    def _lookups(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor] | None,
    ) -> _Lookups:
        values = [*indices, *offsets]
        if len({value.dtype for value in values}) > 1:
            values = [v.long() if v.dtype == torch.int32 else v for v in values]
        return _Lookups(
            values[: len(indices)],
            values[len(indices) :],
            list(per_sample_weights or ()),
            self.pooling_mode.name.lower(),
            self.include_last_offset,
        )

    def _bags(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor] | None,
    ) -> tuple[Tensor, ...]:
        lookups = self._lookups(indices, offsets, per_sample_weights)
        if any(value.requires_grad for value in lookups.per_sample_weights):
            raise ValueError(
                f"{type(self).__name__}: per_sample_weights must not require a gradient"
            )
        weights = list(self.weights)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            result: tuple[Tensor, ...] = _Bags.apply(self, lookups, *weights)  # type: ignore[no-untyped-call]
            return result
        return _forward(weights, lookups).unbind(0)

    def _backward(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        lookups: _Lookups,
        wanted: Sequence[int],
    ) -> list[Tensor | None]:
        """Return the gradients of the tables: a step of SGD from zeros, against the gradient."""
        result: list[Tensor | None] = [None] * len(weights)
        made = [torch.zeros_like(weights[i], memory_format=torch.contiguous_format) for i in wanted]
        torch.ops.ipex.merged_embeddingbag_sgd(
            [grads[i] for i in wanted],
            made,
            _no_trails(len(wanted)),
            *lookups.of(wanted),
            -1.0,
            0.0,
        )
        for i, grad in zip(wanted, made, strict=True):
            result[i] = grad
        return result


def _weight_of(name: str, spec: EmbeddingSpec) -> nn.Parameter:
    shape = [spec.num_embeddings, spec.embedding_dim]
    if spec.weight is None:
        return nn.Parameter(torch.empty(shape, dtype=spec.dtype).normal_())
    if list(spec.weight.shape) != shape or spec.weight.dtype != spec.dtype:
        raise AssertionError(
            f"{name}: weight must have shape {shape} and dtype {spec.dtype}, "
            f"got {list(spec.weight.shape)} and {spec.weight.dtype}"
        )
    return nn.Parameter(spec.weight)


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
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor] | None = None,
    ) -> tuple[Tensor, ...]:
        """Return the bags of each table, as `MergedEmbeddingBag` does."""
        return self._bags(indices, offsets, per_sample_weights)

    def _state(self) -> Any:
        return getattr(self, self._ARGS)

    def to_bfloat16_train(self) -> None:
        """Split the float32 tables into halves: the tables become bfloat16, the rest is kept beside them.

        Steps are taken on the whole numbers, so training is that of float32 with a forward pass in bfloat16, and takes
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
            if trails[i].numel() == 0:
                top, trails[i] = _split(weight)
                self.weights[i] = nn.Parameter(top, requires_grad=weight.requires_grad)
        self.dtype = torch.bfloat16


def _save_whole(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    args = module._state()
    for i, trail in enumerate(args.bf16_trail):
        key = f"{prefix}weights.{i}"
        if trail.numel() and key in state:
            state[key] = _joined(state[key], trail)
    for i, hessian in enumerate(getattr(args, "hessian", ())):
        state[f"{prefix}{module._ARGS}.hessian.{i}"] = hessian


def _load_split(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    args = module._state()
    for i, trail in enumerate(args.bf16_trail):
        key = f"{prefix}weights.{i}"
        if trail.numel() and key in state and state[key].shape == trail.shape:
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
            _no_trails(self.n_tables) if bf16_trail is None else bf16_trail,
            _number(self, "weight_decay", weight_decay),
            _number(self, "lr", lr),
        )

    def _backward(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        lookups: _Lookups,
        wanted: Sequence[int],
    ) -> list[Tensor | None]:
        args = self.sgd_args
        torch.ops.ipex.merged_embeddingbag_sgd(
            [grads[i] for i in wanted],
            [weights[i].detach() for i in wanted],
            [args.bf16_trail[i] for i in wanted],
            *lookups.of(wanted),
            args.lr,
            args.weight_decay,
        )
        return [None] * len(weights)


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
            hessian = [torch.zeros(w.shape, dtype=torch.float32) for w in self.weights]
        self.adagrad_args = AdaGradArgs(
            hessian,
            _no_trails(self.n_tables) if bf16_trail is None else bf16_trail,
            _number(self, "eps", eps),
            _number(self, "lr", lr),
        )

    def _backward(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        lookups: _Lookups,
        wanted: Sequence[int],
    ) -> list[Tensor | None]:
        args = self.adagrad_args
        torch.ops.ipex.merged_embeddingbag_adagrad(
            [grads[i] for i in wanted],
            [weights[i].detach() for i in wanted],
            [args.bf16_trail[i] for i in wanted],
            [args.hessian[i] for i in wanted],
            *lookups.of(wanted),
            args.lr,
            args.eps,
        )
        return [None] * len(weights)


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """Embedding bags side by side with dense features, for inference."""

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """Return the dense features and the bags of all tables of each sample.

        Args:
            indices: As for `MergedEmbeddingBag`.
            offsets: As for `MergedEmbeddingBag`.
            dense_feature: ``[B, embedding_dim]`` in the dtype of the tables.

        Returns:
            ``[B, (n_tables + 1) * embedding_dim]``.

        Raises:
            NotImplementedError: Gradients are enabled.
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
        """
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "MergedEmbeddingBagWithCat: it is for inference, call it under torch.no_grad()"
            )
        lookups = self._lookups(indices, offsets, None)
        result: Tensor = torch.ops.ipex.merged_embeddingbag_cat_forward(
            list(self.weights),
            lookups.indices,
            lookups.offsets,
            dense_feature,
            lookups.mode,
            lookups.include_last_offset,
        )
        return result

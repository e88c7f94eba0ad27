# SPDX-License-Identifier: Apache-2.0
"""Tables that are divided among processes, and the exchange of their rows."""

from __future__ import annotations

import contextlib
import copy
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ipex_core.module_swap.base import check_recorded
from ipex_core.nn.embedding.fused_update import MergedEmbeddingBagWithAdaGrad
from ipex_core.nn.embedding.tables import (
    EmbeddingSpec,
    Lookups,
    PoolingMode,
    forward_bags,
)

_Way = Callable[[Tensor, Sequence[int], Sequence[int], "dist.ProcessGroup | None"], Tensor]

#: How rows are exchanged in each group, found by trying.
_ways: weakref.WeakKeyDictionary[dist.ProcessGroup, _Way] = weakref.WeakKeyDictionary()


def exchange(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Return the rows that the other ranks sent here, rank 0 first.

    Args:
        rows: ``[sum(sent), ...]``, those for rank 0 first.
        sent: For each rank how many rows it gets.
        received: For each rank how many rows it sends here.
        group: None: the default group.

    Returns:
        ``[sum(received), ...]`` in the dtype of ``rows``.

    Raises:
        RuntimeError: A rank is gone, or did not come within the timeout of the group.
    """
    key = group or dist.group.WORLD
    assert key is not None
    if key not in _ways:
        _ways[key] = _find_way(rows.device, group)
    # As bytes: backends differ in the dtypes they know.
    width = rows.shape[1:].numel() * rows.element_size()
    flat = rows.contiguous().view(-1).view(torch.uint8)
    got = _ways[key](flat, [n * width for n in sent], [n * width for n in received], group)
    return got.view(rows.dtype).view(sum(received), *rows.shape[1:])


def _find_way(device: torch.device, group: dist.ProcessGroup | None) -> _Way:
    """Return the first way that works; a backend refuses what it cannot do on all ranks at once."""
    ranks = dist.get_world_size(group)
    one = [1] * ranks
    refused = []
    for way in (_at_once, _by_list, _by_gathering):
        try:
            way(torch.zeros(ranks, dtype=torch.uint8, device=device), one, one, group)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            # Only what was never sent: a rank that is gone must not send the others another way.
            if not _is_refusal(str(error)):
                raise
            refused.append(str(error))
            continue
        return way
    raise RuntimeError(
        f"{_NAME}: the backend of group must support all_to_all_single, all_to_all or all_gather, got {refused}"
    )


def _is_refusal(text: str) -> bool:
    return any(word in text.lower() for word in ("support", "not implement", "no backend"))


def _at_once(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty(sum(received))
    dist.all_to_all_single(result, rows, list(received), list(sent), group=group)
    return result


def _by_list(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    result = rows.new_empty(sum(received))
    dist.all_to_all(list(result.split(list(received))), list(rows.split(list(sent))), group=group)
    return result


def _by_gathering(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup | None
) -> Tensor:
    """Every rank gets everything, padded to one size, and takes its part."""
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    counts = rows.new_empty(ranks * ranks, dtype=torch.int64)
    mine = torch.tensor(list(sent), dtype=torch.int64, device=rows.device)
    dist.all_gather(list(counts.split(ranks)), mine, group=group)
    table = counts.view(ranks, ranks)
    most = int(table.sum(1).max())
    padded = rows.new_zeros(most)
    padded[: rows.shape[0]] = rows
    everything = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(everything, padded, group=group)
    starts = table.cumsum(1) - table
    parts = [
        whole[int(starts[r, own]) : int(starts[r, own] + table[r, own])]
        for r, whole in enumerate(everything)
    ]
    return torch.cat(parts)


# --- tables whose rows are spread over ranks --------------------------------------------------------------------------


_NAME = "DistMergeEmbeddingBagWithAdaGrad"


class _Plan(NamedTuple):
    """Which bags a rank adds up a part of, and for whom."""

    lookups: Lookups  # those in own rows; bags of the whole batch
    bounds: list[int]  # rank r gets the bags [bounds[r], bounds[r + 1])
    sent: list[Tensor]  # for each rank: which of its bags [T * its bags] have a part here
    received: list[Tensor]  # for each rank: which of own bags have a part there


def _checksum(lookups: Lookups) -> int:
    total = 0
    for value in (*lookups.indices, *lookups.offsets):
        places = torch.arange(1, value.shape[0] + 1)
        total = (31 * total + int((value.long() * places).sum())) % (1 << 62)
    return total


class _DistBags(torch.autograd.Function):
    """Forward: own part of the bags. Backward: gradients go to the ranks that have the rows, which take their steps."""

    @staticmethod
    def forward(ctx: Any, owner: Any, plan: _Plan, *weights: Tensor) -> Tensor:
        ctx.owner, ctx.plan, ctx.weights = owner, plan, weights
        # Autograd then refuses a second pass without retain_graph.
        ctx.save_for_backward(*plan.lookups.indices)
        return owner._gather(weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        _ = ctx.saved_tensors  # for its checks
        ctx.owner._scatter(grad, ctx.weights, ctx.plan)
        return (None,) * (2 + len(ctx.weights))


class DistMergeEmbeddingBagWithAdaGrad(MergedEmbeddingBagWithAdaGrad):
    """`MergedEmbeddingBagWithAdaGrad` whose tables are spread over the ranks of a process group.

    Row r of a table is on rank r % ranks. Every rank calls forward and backward with the lookups of the
    whole batch, and gets the bags of its own part of the batch: what other ranks have of them comes in one exchange,
    and the gradients go back in another. The group may have any backend that can exchange or gather tensors.

    Args:
        embedding_specs: The whole tables, the same on each rank; mode ``"sum"``. Only own rows of weights are kept.
        lr: Learning rate.
        eps: Added to the root of the sum of squares.
        group: Process group; None: the default one.

    Raises:
        AssertionError: As for `MergedEmbeddingBag`, or the mode is not ``"sum"``.
        RuntimeError: There is no process group.
        ValueError: A number is negative, or as for `MergedEmbeddingBag`.

    Example:
        In each of the processes of ``torchrun``::

            ipex.distributed.init_process_group("gloo")
            merged = DistMergeEmbeddingBagWithAdaGrad.from_embeddingbag_list(tables, lr=0.01)
            bags = merged(indices, offsets)  # [own bags, tables, embedding_dim]
    """

    def __init__(
        self,
        embedding_specs: Sequence[EmbeddingSpec],
        lr: float = 0.01,
        eps: float = 1e-10,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(
                f"{_NAME}: the default process group must be initialized, got none:"
                " call ipex.distributed.init_process_group first"
            )
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        self.num_embeddings = [spec.num_embeddings for spec in embedding_specs]
        super().__init__([self._own(spec) for spec in embedding_specs], lr, eps)
        if self.pooling_mode != PoolingMode.SUM:
            raise AssertionError(f"{_NAME}: pooling_mode must be 'sum', got 'mean'")

    def _own(self, spec: EmbeddingSpec) -> EmbeddingSpec:
        """Return the part of a table that is on this rank."""
        shape = [spec.num_embeddings, spec.embedding_dim]
        if spec.weight is not None and list(spec.weight.shape) != shape:
            raise AssertionError(
                f"{_NAME}: weight must have shape {shape}, got {list(spec.weight.shape)}"
            )
        weight = None if spec.weight is None else self._rows(spec.weight)
        return spec._replace(num_embeddings=self._count(spec.num_embeddings), weight=weight)

    def _count(self, rows: int) -> int:
        return len(range(self.rank, rows, self.world_size))

    def _rows(self, table: Tensor) -> Tensor:
        return table[self.rank :: self.world_size].clone(memory_format=torch.contiguous_format)

    def extra_repr(self) -> str:
        """Return a line per table, and the rank."""
        return f"{super().extra_repr()}\nrank {self.rank} of {self.world_size}"

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offset: Sequence[Tensor]
    ) -> Tensor:
        """Return the bags of the part of the batch that belongs to this rank.

        Args:
            indices: For each table the rows that the whole batch looks up, the same on each rank: int32 or int64.
            offset: For each table where its B bags begin; with ``include_last_offset`` also where the last one ends.

        Returns:
            ``[b, tables, embedding_dim]``, where ``b`` is B / ranks; what remains goes to the first ranks, as in
            `torch.tensor_split`.

        Raises:
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease; lookups differ
                between ranks; a rank is gone or did not come within the timeout of the group; or
                `DistributedDataParallel` holds the tables.
        """
        self._check_apart("all ranks got the rows of rank 0")
        try:
            lookups = self._lookups(indices, offset, None)
            plan = self._plan(lookups)
        except (RuntimeError, TypeError):
            # The others wait for what this rank would send.
            with contextlib.suppress(RuntimeError):
                self._compare(-1, -1)
            raise
        self._compare(plan.bounds[-1], _checksum(lookups))
        weights = list(self.weights)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            check_recorded(type(self).__name__)
            return _DistBags.apply(self, plan, *weights)  # type: ignore[no-untyped-call]
        return self._gather(weights, plan)

    def gathered_state_dict(self) -> dict[str, Tensor]:
        """Return the state dict of the whole tables, on each rank; every rank must call it.

        `MergedEmbeddingBagWithAdaGrad` loads it, and so does this class on any number of ranks.

        Raises:
            RuntimeError: A rank is gone or did not come within the timeout of the group.
        """
        result = {}
        for key, value in self.state_dict().items():
            rows = self.num_embeddings[int(key.rpartition(".")[2])]
            counts = [len(range(r, rows, self.world_size)) for r in range(self.world_size)]
            with self._named("gathered_state_dict"):
                everything = exchange(
                    value.repeat(self.world_size, 1),
                    [value.shape[0]] * self.world_size,
                    counts,
                    self.group,
                )
            whole = everything.new_empty(rows, value.shape[1])
            for rank, part in enumerate(everything.split(counts)):
                whole[rank :: self.world_size] = part
            result[key] = whole
        return result

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        # Of whole tables: take own rows. The dict is a copy that torch made.
        for key in [key for key in state if key.startswith(prefix)]:
            table = key.rpartition(".")[2]
            if not table.isdecimal() or int(table) >= self.n_tables:
                continue
            rows = self.num_embeddings[int(table)]
            if state[key].shape[0] == rows != self._count(rows):
                state[key] = self._rows(state[key])
        super()._load_from_state_dict(state, prefix, *args)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Say which function could not reach a rank."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"{_NAME}: {what} on rank {self.rank} of {self.world_size}: another rank has ended, or did not arrive"
                f" within the timeout of the group. See the errors of the other ranks. This one got: {error}"
            ) from error

    def _plan(self, lookups: Lookups) -> _Plan:
        ranks, count = self.world_size, self.n_tables
        if len(lookups.indices) != count or len(lookups.offsets) != count:
            raise RuntimeError(
                f"{_NAME}: indices and offset must hold {count} tensor(s), one per table, got"
                f" {len(lookups.indices)} and {len(lookups.offsets)}"
            )
        indices, offsets, masks = [], [], []
        for table, (index, offset) in enumerate(zip(*lookups[:2], strict=True)):
            ends = self._ends(table, index, offset)
            used = index[: int(ends[-1])].long()
            owners = used % ranks
            bags = torch.repeat_interleave(ends.diff())
            there = torch.zeros(ranks, ends.shape[0] - 1, dtype=torch.bool, device=index.device)
            there[owners, bags] = True
            masks.append(there)
            own = owners == self.rank
            indices.append((used[own] // ranks).contiguous())
            before = torch.cat([own.new_zeros(1, dtype=torch.int64), own.cumsum(0)])
            offsets.append(before[ends])
        if len({mask.shape[1] for mask in masks}) > 1:
            raise RuntimeError(
                f"{_NAME}: offset must have the same number of bags for each table, got"
                f" {[mask.shape[1] for mask in masks]}"
            )
        parts = torch.stack(masks, 1)  # [ranks, tables, bags]
        batch = parts.shape[2]
        sizes = [batch // ranks + (r < batch % ranks) for r in range(ranks)]
        bounds = [sum(sizes[:r]) for r in range(ranks + 1)]
        sent = [
            parts[self.rank, :, a:b].reshape(-1).nonzero()[:, 0]
            for a, b in itertools.pairwise(bounds)
        ]
        a, b = bounds[self.rank : self.rank + 2]
        received = [parts[r, :, a:b].reshape(-1).nonzero()[:, 0] for r in range(ranks)]
        return _Plan(Lookups(indices, offsets, [], "sum", True), bounds, sent, received)

    def _ends(self, table: int, index: Tensor, offset: Tensor) -> Tensor:
        """Return where the bags of a table begin and end, after checking all numbers."""
        for name, value in ((f"indices[{table}]", index), (f"offset[{table}]", offset)):
            if value.dim() != 1 or value.dtype not in (torch.int32, torch.int64):
                raise RuntimeError(
                    f"{_NAME}: {name} must be 1-D, int32 or int64, got {value.dim()}-D, {str(value.dtype)[6:]}"
                )
        ends = offset.long()
        if not self.include_last_offset:
            ends = torch.cat([ends, ends.new_tensor([index.shape[0]])])
        if ends.shape[0] == 0 or int(ends[0]) != 0 or bool((ends.diff() < 0).any()):
            raise RuntimeError(
                f"{_NAME}: offset[{table}] must begin with 0 and not decrease, and not exceed the number of indices"
                f" = {index.shape[0]}, got {offset.tolist()[:8]}"
            )
        if int(ends[-1]) > index.shape[0]:
            raise RuntimeError(
                f"{_NAME}: offset[{table}] must not exceed the number of indices = {index.shape[0]},"
                f" got {int(ends[-1])}"
            )
        rows = self.num_embeddings[table]
        wrong = index[(index < 0) | (index >= rows)]
        if wrong.numel():
            raise RuntimeError(
                f"{_NAME}: indices[{table}] must hold rows in [0, {rows}), got {int(wrong[0])}"
            )
        return ends

    def _compare(self, batch: int, total: int) -> None:
        """Check that all ranks look up the same: sizes of exchanges depend on it."""
        own = torch.tensor([[batch, total]] * self.world_size)
        one = [1] * self.world_size
        with self._named("forward"):
            every = exchange(own, one, one, self.group)
        other = (every != own).any(1).nonzero()[:, 0].tolist()
        if other:
            raise RuntimeError(
                f"{_NAME}: indices and offset must be the same on all ranks, got others on rank {other[0]}"
            )

    def _gather(self, weights: Sequence[Tensor], plan: _Plan) -> Tensor:
        parts = forward_bags(weights, plan.lookups)
        rows = [
            parts[:, a:b].reshape(-1, self.embedding_dim)[which]
            for a, b, which in zip(plan.bounds, plan.bounds[1:], plan.sent, strict=False)
        ]
        sizes = [which.shape[0] for which in plan.received]
        with self._named("forward"):
            got = exchange(torch.cat(rows), [len(r) for r in rows], sizes, self.group)
        bags = plan.bounds[self.rank + 1] - plan.bounds[self.rank]
        exact = torch.float64 if parts.dtype == torch.float64 else torch.float32
        total = torch.zeros(
            self.n_tables * bags, self.embedding_dim, dtype=exact, device=parts.device
        )
        for which, part in zip(plan.received, got.split(sizes), strict=True):
            total[which] += part  # a bag comes once from a rank
        return (
            total.view(self.n_tables, bags, self.embedding_dim)
            .transpose(0, 1)
            .to(parts.dtype)
            .contiguous()
        )

    def _scatter(self, grad: Tensor, weights: Sequence[Tensor], plan: _Plan) -> None:
        flat = grad.transpose(0, 1).reshape(-1, self.embedding_dim)
        rows = [flat[which] for which in plan.received]
        sizes = [which.shape[0] for which in plan.sent]
        with self._named("backward"):
            got = exchange(torch.cat(rows), [len(r) for r in rows], sizes, self.group)
        # Bags without lookups in own rows are not read.
        grads = grad.new_zeros(self.n_tables, plan.bounds[-1], self.embedding_dim)
        for a, b, which, part in zip(
            plan.bounds, plan.bounds[1:], plan.sent, got.split(sizes), strict=False
        ):
            table, bag = which // max(b - a, 1), which % max(b - a, 1)
            grads[table, a + bag] = part
        wanted = [i for i, weight in enumerate(weights) if weight.requires_grad]
        self._backward(list(grads.unbind(0)), weights, plan.lookups, wanted)

    def __getstate__(self) -> dict[str, Any]:
        # Groups cannot be saved; the default one stands in.
        return {**self.__dict__, "group": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        result = memo[id(self)] = type(self).__new__(type(self))
        result.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        result.group = self.group
        return result

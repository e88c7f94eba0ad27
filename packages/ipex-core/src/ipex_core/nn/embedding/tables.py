# SPDX-License-Identifier: Apache-2.0
"""Embedding tables that are looked up together, and the memory that they lie in.

Lookups of all tables in one tensor, and the call with one argument, are as IPEX 2.0 had them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ipex_core import config
from ipex_core.library.kernels import run_op
from ipex_core.module_swap.base import check_recorded
from ipex_core.ops.merged_embeddingbag import Bags, quantize_table


def linearize(
    owner: Any,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    include_last_offsets: Sequence[bool] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `MergedEmbeddingBag.linearize_indices_and_offsets` does."""
    indices, offsets = _by_table(owner, indices, offsets, include_last_offsets, False)
    sizes = [table.numel() for table in indices]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    rows = [0]
    for weight in owner.weights:
        rows.append(rows[-1] + weight.shape[0])
    merged = torch.cat([table.long() for table in indices])
    begins = [offset.long() + start for offset, start in zip(offsets, starts[:-1], strict=True)]
    wide = [table.long() + row for table, row in zip(indices, rows[:-1], strict=True)]
    return merged, torch.cat([*begins, merged.new_tensor(starts[-1:])]), torch.cat(wide)


def lookups_of_input(owner: Any, given: Any, needed: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return indices and offsets by table of the one argument that a module was called with.

    Args:
        owner: The module.
        given: ``(indices, offsets, include_last_offsets)`` by table, or a result of `linearize`.
        needed: Whether it is the former: a bool, or a tensor with one element.

    Raises:
        TypeError: It is neither.
        ValueError: The parts do not fit the tables.
    """
    name = type(owner).__name__
    if not isinstance(given, (tuple, list)) or len(given) != 3:
        raise TypeError(
            f"{name}: input must be (indices, offsets, include_last_offsets), or the result of"
            f" linearize_indices_and_offsets with need_linearize_indices_and_offsets=False, got {type(given).__name__}"
        )
    if bool(needed):
        if isinstance(given[0], Tensor):
            raise TypeError(
                f"{name}: offsets must be a list of tensors, one per table, got None; the result of"
                " linearize_indices_and_offsets needs need_linearize_indices_and_offsets=False"
            )
        return _by_table(owner, given[0], given[1], given[2], owner.include_last_offset)
    indices, offsets, _ = given
    if not isinstance(indices, Tensor) or not isinstance(offsets, Tensor):
        raise TypeError(
            f"{name}: input must be a result of linearize_indices_and_offsets where"
            f" need_linearize_indices_and_offsets is False, got {type(indices).__name__}"
        )
    bags, rest = divmod(offsets.numel() - 1, owner.n_tables)
    if rest:
        raise ValueError(
            f"{name}: merged offsets must have {owner.n_tables} * bags + 1 elements, got {offsets.numel()}"
        )
    edges = (
        offsets[:: max(bags, 1)][: owner.n_tables + 1].tolist()
        if bags
        else [0] * (owner.n_tables + 1)
    )
    tables, starts = [], []
    for i in range(owner.n_tables):
        tables.append(indices[edges[i] : edges[i + 1]])
        end = (i + 1) * bags + int(owner.include_last_offset)
        starts.append(offsets[i * bags : end] - edges[i])
    return tables, starts


def _by_table(
    owner: Any,
    indices: Sequence[Tensor],
    offsets: Sequence[Tensor | None],
    last: Sequence[bool] | None,
    wanted: bool,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return 1-D indices, and offsets that have the end of the last bag if ``wanted``."""
    name = type(owner).__name__
    last = [owner.include_last_offset] * owner.n_tables if last is None else last
    for field, given in (
        ("indices", indices),
        ("offsets", offsets),
        ("include_last_offsets", last),
    ):
        if len(given) != owner.n_tables:
            raise ValueError(
                f"{name}: {field} must have an element per table, {owner.n_tables}, got {len(given)}"
            )
    found: list[Tensor] = []
    starts: list[Tensor] = []
    for i, (table, offset, has_last) in enumerate(zip(indices, offsets, last, strict=True)):
        if table.dim() == 2:
            if offset is not None:
                raise ValueError(f"{name}: offsets[{i}] must be None for 2-D indices, got a tensor")
            size, has_last = max(table.shape[1], 1), False
            offset = torch.arange(table.shape[0], dtype=table.dtype) * size
        elif offset is None:
            raise ValueError(f"{name}: offsets[{i}] must be a tensor for 1-D indices, got None")
        if has_last and not wanted:
            offset = offset[:-1]
        elif wanted and not has_last:
            offset = torch.cat([offset, offset.new_tensor([table.numel()])])
        found.append(table.reshape(-1))
        starts.append(offset)
    bags = {offset.numel() for offset in starts}
    if len(bags) > 1:
        raise ValueError(f"{name}: all tables must have as many bags, got {sorted(bags)}")
    return found, starts


_HUGE_PAGE = 2 << 20
_HUGEPAGE, _COLLAPSE = (
    14,
    25,
)  # advice of Linux: pages filled from now on; pages that are there, at once (6.1)


@functools.cache
def _madvise() -> Any:
    if sys.platform != "linux":
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _wanted(tensor: Tensor) -> bool:
    bytes_ = tensor.numel() * tensor.element_size()
    return tensor.device.type == "cpu" and bytes_ >= _HUGE_PAGE and bool(config.get("huge_pages"))


def gather(tensor: Tensor) -> bool:
    """Ask the system to put the memory of a large CPU tensor on huge pages, where it is.

    Addresses and contents stay, so those who share the memory notice nothing.

    Args:
        tensor: Contiguous, any shape and dtype.

    Returns:
        Whether the pages that are filled now are huge. False for less than 2 MB, other devices, other systems than
        Linux from 6.1 on, memory that cannot be (of a file) or is short, and where ``huge_pages`` is off.
    """
    madvise = _madvise()
    if madvise is None or not tensor.is_contiguous() or not _wanted(tensor):
        return False
    begin = tensor.data_ptr()
    first = -(-begin // _HUGE_PAGE) * _HUGE_PAGE
    size = (begin + tensor.numel() * tensor.element_size()) // _HUGE_PAGE * _HUGE_PAGE - first
    if size <= 0 or madvise(first, size, _HUGEPAGE) != 0:
        return False
    return bool(madvise(first, size, _COLLAPSE) == 0)


def on_huge_pages(tensor: Tensor) -> Tensor:
    """Return a large CPU tensor on huge pages: itself where the system can gather it, else a contiguous copy.

    Args:
        tensor: Any shape and dtype.

    Returns:
        The tensor or its copy; also the tensor if it has less than 2 MB, is not on the CPU, or ``huge_pages`` is off.
    """
    if not _wanted(tensor) or gather(tensor):
        return tensor
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return tensor
    # One page more than needed: a mapping begins at any small page.
    bytes_ = tensor.numel() * tensor.element_size()
    memory = mmap.mmap(-1, bytes_ + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        memory.madvise(advice)
    room = torch.frombuffer(memory, dtype=torch.uint8)
    first = -room.data_ptr() % _HUGE_PAGE
    placed = room[first : first + bytes_].view(tensor.dtype).view(tensor.shape)
    return placed.copy_(tensor)


# --- tables -----------------------------------------------------------------------------------------------------------


class PoolingMode(IntEnum):
    """How the rows of a bag become one."""

    SUM = 0
    MEAN = 1


class EmbeddingSpec(NamedTuple):
    """One table; the fields are as in `torch.nn.EmbeddingBag`. Without a weight it is drawn as there."""

    num_embeddings: int
    embedding_dim: int
    pooling_mode: str
    dtype: torch.dtype
    weight: Tensor | None
    sparse: bool
    include_last_offset: bool


class Lookups(NamedTuple):
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


def forward_bags(weights: Sequence[Tensor], lookups: Lookups) -> Tensor:
    """Return the bags of all tables, ``[tables, bags, embedding_dim]``."""
    return run_op("merged_embeddingbag_forward", weights[0].dtype, list(weights), *lookups)


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
    """Forward: the bags of all tables. Backward: ``owner._backward``, and the gradients of factors."""

    @staticmethod
    def forward(ctx: Any, owner: Any, lookups: Lookups, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Behind the tables: the factors, which autograd only sees if they are arguments of their own.
        weights = tensors[: len(tensors) - len(lookups.per_sample_weights)]
        ctx.owner, ctx.lookups, ctx.weights = owner, lookups, weights
        # Autograd then refuses lookups that were written to since, and a second pass without retain_graph. Tables are
        # not among them: passes in between may take their steps.
        ctx.save_for_backward(*lookups.indices, *lookups.offsets, *lookups.per_sample_weights)
        return _apart(forward_bags(weights, lookups))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors  # for its checks
        count, needed = len(ctx.weights), ctx.needs_input_grad[2:]
        # First, since owners that are their own optimizer change the tables.
        factors = [
            _factor_grad(i, grads[i], ctx.weights[i], ctx.lookups) if n else None
            for i, n in enumerate(needed[count:])
        ]
        wanted = [i for i, n in enumerate(needed[:count]) if n]
        found: list[Tensor | None] = [None] * count
        if wanted:
            found = ctx.owner._backward(grads, ctx.weights, ctx.lookups, wanted)
        return (None, None, *found, *factors)


def _factor_grad(table: int, grad: Tensor, weight: Tensor, lookups: Lookups) -> Tensor:
    """Return the gradient of the factors of one table: each row times the gradient of its bag."""
    factors = lookups.per_sample_weights[table]
    wide = torch.promote_types(weight.dtype, torch.float32)
    bags = Bags(
        lookups.indices[table],
        lookups.offsets[table],
        None,
        lookups.mode,
        lookups.include_last_offset,
        wide,
    )
    result = torch.zeros_like(factors)  # also of what lies behind the last bag
    products = grad[bags.bag].to(wide) * weight.detach()[bags.rows].to(wide)
    result[: bags.bag.shape[0]] = products.sum(1).to(result.dtype)
    return result


def no_trails(count: int) -> list[Tensor]:
    """Return lower halves of tables that are not split."""
    return [torch.empty(0, dtype=torch.bfloat16) for _ in range(count)]


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
        >>> from ipex_core.nn.embedding import MergedEmbeddingBag
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
        self._place()

    def _place(self) -> None:
        for weight in self.weights:
            gather(weight)

    @classmethod
    def from_embeddingbag_list(
        cls, tables: Sequence[nn.EmbeddingBag], *values: float, **settings: float
    ) -> MergedEmbeddingBag:
        """Make the module from stock layers. It shares their memory.

        Args:
            tables: The layers.
            values: Further arguments of the constructor, in their order.
            settings: The same, by name.

        Raises:
            TypeError: Something is no such layer.
            ValueError: A layer has ``padding_idx``, ``max_norm`` or ``scale_grad_by_freq``.
        """
        specs = []
        for i, table in enumerate(tables):
            if not isinstance(table, nn.EmbeddingBag):
                raise TypeError(
                    f"{cls.__name__}: tables[{i}] must be a torch.nn.EmbeddingBag, got {type(table).__name__}"
                )
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
        return cls(specs, *values, **settings)

    def use_huge_pages(self) -> None:
        """Have the tables, and what the optimizer keeps beside them, on huge pages.

        Rows of large tables are found faster there. The memory of tables is gathered in such pages when the module is
        made, where the system can do that in place (Linux from 6.1 on). Call this where it cannot, or after the tables
        were given other memory: those that are not gathered are copied, and no longer share memory with a stock layer.
        Tables of less than 2 MB stay, and so do all where the system has no such pages.
        """
        for weight in self.weights:
            weight.data = on_huge_pages(weight.data)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = self.weights[0].dtype
        return self

    def extra_repr(self) -> str:
        """Return a line per table."""
        lines = [f"number of tables={self.n_tables}"]
        for i, weight in enumerate(self.weights):
            mode = self.pooling_mode.name.lower()
            lines.append(f"table{i}: {weight.shape[0]}, {weight.shape[1]}, {mode}, {weight.dtype}")
        return "\n".join(lines)

    def linearize_indices_and_offsets(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor | None],
        include_last_offsets: Sequence[bool] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lookups of all tables in one, which may be made before the model runs.

        ``module(result, need_linearize_indices_and_offsets=False)`` takes them.

        Args:
            indices: For each table the rows, 1-D, or 2-D ``[B, bag size]``: int32 or int64.
            offsets: For each table where its B bags begin; None for 2-D indices.
            include_last_offsets: For each table whether its offsets have the end of the last bag. None: as the module.

        Returns:
            All indices, ``[n]``; where the bags begin in them, ``[n_tables * B + 1]`` with the end of the last one; and
            the indices in a table that is all tables one after the other, ``[n]``. All are int64.

        Raises:
            ValueError: There is not one element per table, or the tables have different numbers of bags.

        Example:
            >>> import torch
            >>> from ipex_core.nn.embedding import MergedEmbeddingBag
            >>> tables = [torch.nn.EmbeddingBag(n, 4, mode="sum") for n in (10, 20)]
            >>> merged = MergedEmbeddingBag.from_embeddingbag_list(tables)
            >>> rows, starts = torch.tensor([1, 2, 3]), torch.tensor([0, 2])
            >>> merged.linearize_indices_and_offsets([rows, rows], [starts, starts], [False, False])
            (tensor([1, 2, 3, 1, 2, 3]), tensor([0, 2, 3, 5, 6]), tensor([ 1,  2,  3, 11, 12, 13]))
        """
        return linearize(self, indices, offsets, include_last_offsets)

    def forward(
        self,
        indices: Any,
        offsets: Any = None,
        per_sample_weights: Sequence[Tensor] | None = None,
        *,
        need_linearize_indices_and_offsets: bool | Tensor = True,
    ) -> tuple[Tensor, ...]:
        """Return the bags of each table.

        Args:
            indices: For each table the rows, the bags one after the other: int32 or int64. Without ``offsets`` a tuple
                ``(indices, offsets, include_last_offsets)``, or the result of `linearize_indices_and_offsets`.
            offsets: For each table where its B bags begin; with ``include_last_offset`` also where the last one ends.
            per_sample_weights: For each table a factor per index, in the dtype of the tables. They may need gradients.
            need_linearize_indices_and_offsets: False where ``indices`` is such a result; IPEX 2.0 took it as the second
                argument, which works, too.

        Returns:
            For each table ``[B, embedding_dim]``, in its dtype; inside of ``torch.autocast`` without gradients in that
            of the region.

        Raises:
            AssertionError: The gradients of the tables are to be sparse.
            TypeError: Something that is looked up is no tensor.
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
        """
        if not self.dense:
            raise AssertionError(f"{type(self).__name__}: tables must have sparse=False, got True")
        indices, offsets = self._given(indices, offsets, need_linearize_indices_and_offsets)
        return self._bags(indices, offsets, per_sample_weights)

    def _given(self, indices: Any, offsets: Any, needed: Any) -> tuple[Any, Any]:
        """Return indices and offsets by table, from two arguments or from one."""
        if offsets is None:
            return lookups_of_input(self, indices, needed)
        if isinstance(offsets, bool) or (
            isinstance(offsets, Tensor) and offsets.dtype == torch.bool
        ):
            return lookups_of_input(self, indices, offsets)
        return indices, offsets

    def _lookups(
        self,
        indices: Sequence[Tensor],
        offsets: Sequence[Tensor],
        per_sample_weights: Sequence[Tensor] | None,
    ) -> Lookups:
        for name, given in (("indices", indices), ("offsets", offsets)):
            if given is None or not all(isinstance(value, Tensor) for value in given):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be a list of tensors, one per table, got {given!r:.60}"
                )
        values = [*indices, *offsets]
        if len({value.dtype for value in values}) > 1:
            values = [v.long() if v.dtype == torch.int32 else v for v in values]
        return Lookups(
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
        return self._bags_of(list(self.weights), lookups)

    def _bags_of(self, weights: Sequence[Tensor], lookups: Lookups) -> tuple[Tensor, ...]:
        tensors = (*weights, *lookups.per_sample_weights)
        if torch.is_grad_enabled() and any(value.requires_grad for value in tensors):
            check_recorded(type(self).__name__)
            return _Bags.apply(self, lookups, *tensors)  # type: ignore[no-untyped-call]
        bags = forward_bags(weights, lookups)
        # As in IPEX, which casts the tables themselves; sums of float32 rows are more exact.
        device, narrow = bags.device.type, bags.dtype != torch.float64
        if narrow and not torch.is_grad_enabled() and torch.is_autocast_enabled(device):
            bags = bags.to(torch.get_autocast_dtype(device))
        return bags.unbind(0)

    def _backward(
        self,
        grads: Sequence[Tensor],
        weights: Sequence[Tensor],
        lookups: Lookups,
        wanted: Sequence[int],
    ) -> list[Tensor | None]:
        """Return the gradients of the tables: a step of SGD from zeros, against the gradient."""
        result: list[Tensor | None] = [None] * len(weights)
        made = [torch.zeros_like(weights[i], memory_format=torch.contiguous_format) for i in wanted]
        run_op(
            "merged_embeddingbag_sgd",
            self.dtype,
            [grads[i] for i in wanted],
            made,
            no_trails(len(wanted)),
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


# --- inference, side by side with dense features --------------------------------------------------------------------


class MergedEmbeddingBagWithCat(MergedEmbeddingBag):
    """Embedding bags side by side with dense features, for inference; the tables may be int8.

    Args:
        embedding_specs: The tables.

    Raises:
        AssertionError: The tables differ in row size, dtype, mode or ``include_last_offset``.
        ValueError: There is no table, or a mode is neither ``"sum"`` nor ``"mean"``.
    """

    def to_int8(self) -> None:
        """Round the tables to int8 with a scale for each row: a quarter of the memory of float32.

        The state dict has the int8 tables and the scales; call this before loading one.
        """
        if self.dtype == torch.int8:
            return
        for i, weight in enumerate(self.weights):
            numbers, scale = quantize_table(weight)
            self.weights[i] = nn.Parameter(numbers, requires_grad=False)
            self.register_buffer(f"scale_{i}", scale)
        self.dtype = torch.int8

    def _scales(self) -> list[Tensor]:
        # Who casts a model casts its buffers.
        return [self.get_buffer(f"scale_{i}").float() for i in range(self.n_tables)]

    def forward(  # type: ignore[override]
        self, indices: Sequence[Tensor], offsets: Sequence[Tensor], dense_feature: Tensor
    ) -> Tensor:
        """Return the dense features and the bags of all tables of each sample.

        Args:
            indices: As for `MergedEmbeddingBag`.
            offsets: As for `MergedEmbeddingBag`.
            dense_feature: ``[B, embedding_dim]`` in the dtype of the tables; with int8 tables any floating dtype.

        Returns:
            ``[B, (n_tables + 1) * embedding_dim]`` in the dtype of ``dense_feature``.

        Raises:
            NotImplementedError: Gradients are enabled.
            RuntimeError: An argument does not fit, an index is not in its table, or offsets decrease.
        """
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "MergedEmbeddingBagWithCat: gradients must be disabled, got torch.is_grad_enabled() = True:"
                " call it under torch.no_grad()"
            )
        lookups = self._lookups(indices, offsets, None)
        rest = (lookups.indices, lookups.offsets)
        settings = (lookups.mode, lookups.include_last_offset)
        result: Tensor
        if self.dtype == torch.int8:
            result = torch.ops.ipex.merged_embeddingbag_int8_cat_forward(
                dense_feature, list(self.weights), self._scales(), *rest, *settings
            )
        else:
            result = run_op(
                "merged_embeddingbag_cat_forward",
                self.dtype,
                *(list(self.weights), *rest, dense_feature, *settings),
            )
        return result

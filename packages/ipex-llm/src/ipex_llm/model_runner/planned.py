# SPDX-License-Identifier: Apache-2.0
"""Parameters that are parts of packed weights, and how their values come back."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ipex_core.module_swap.base import OptimizedModule, call
from ipex_core.packing.parameter import KEEPS_CLASS, PackedWeight, hollow
from ipex_core.woq import deinterleave_gate_up
from ipex_llm.arch.types import LinearPlan

__all__ = ["Part", "PlannedWeight", "TiedEmbedding"]

Tensor = torch.Tensor


class PlannedWeight(PackedWeight):
    """A parameter that is a part of a packed weight; ``recover`` gives its values.

    One that is all of a packed weight (``whole``) can be the weight of an embedding too: its rows are read as they lie.
    """

    recover: Callable[[], Tensor]
    former: nn.Parameter
    whole: bool
    #: The modules that have this object as a parameter, and its name there.
    owners: Sequence[tuple[weakref.ref[nn.Module], str]] = ()

    @staticmethod
    def of(former: nn.Parameter, packed: Tensor, recover: Callable[[], Tensor]) -> PlannedWeight:
        """Make one that stands for ``former``, which still has its values."""
        return PlannedWeight._make(former, packed, recover, former.shape, former.requires_grad)

    @staticmethod
    def _make(
        former: nn.Parameter,
        packed: Tensor,
        recover: Callable[[], Tensor],
        shape: torch.Size,
        requires_grad: bool,
    ) -> PlannedWeight:
        self: PlannedWeight = hollow(PlannedWeight, shape, former.dtype, requires_grad)
        self.packed, self.form, self.start, self.rows = packed, "plan", 0, None
        self.gated = None
        self.recover, self.former = recover, former
        self.whole = isinstance(recover, Part) and recover.whole and former.dtype == recover.dtype
        return self

    @property
    def data(self) -> Tensor:
        """The weight without gradient. With what is assigned, the parameter is a plain one again."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        found = [(owner(), name) for owner, name in self.owners]
        owners = [(o, n) for o, n in found if o is not None and o._parameters.get(n) is self]
        if not owners:
            raise RuntimeError(
                f"PlannedWeight.data of shape {tuple(self.shape)}: a copy of a packed weight cannot be changed:"
                " assign to the weight of the model itself"
            )
        self.former.data = value
        for owner, name in owners:
            owner._parameters[name] = self.former

    def look_up(self, ids: Tensor) -> Tensor:
        """Return rows ``[*ids.shape, columns]`` of a whole weight."""
        rows, columns = self.shape
        op = torch.ops.ipex.packed_embedding
        found: Tensor = op(self.packed, ids, rows, columns, self.dtype)
        return found

    def _plain(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():  # as in the base class
            return self.recover()

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return ``x @ weight.T + bias``, which a model's own forward asks for, without unpacking."""
        part = self.recover
        if not isinstance(part, Part) or part.plan.transposed or x.dtype is not part.dtype:
            return None
        return part.product(x, bias)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the unpacked weight; detaching keeps it packed, an embedding reads rows of it."""
        first = args[0] if args else None
        if func in KEEPS_CLASS and isinstance(first, PlannedWeight):
            # Of its own shape: the parameter that it stands for is empty.
            return PlannedWeight._make(
                first.former, first.packed, first.recover, first.shape, False
            )
        if func is _EMBEDDING and isinstance(first, PlannedWeight) and first.whole:
            return first.look_up(args[1])
        return super().__torch_dispatch__(func, types, args, kwargs)


_EMBEDDING = torch.ops.aten.embedding.default
_LINEAR = torch.ops.ipex.linear.default
#: Attribute of an input: the product that the next part of a packed weight takes its columns from.
_WIDE = "_ipex_wide"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """Gives the values of one module's weight back from a packed one."""

    packed: Tensor
    shape: list[int]
    dtype: torch.dtype
    plan: LinearPlan
    index: int
    start: int
    rows: int
    features: int
    gated: bool
    fused: bool

    @property
    def whole(self) -> bool:
        """Whether the packed weight is this one and nothing else."""
        plan = self.plan
        return not (
            self.gated or plan.order is not None or plan.transposed or self.rows != self.shape[0]
        )

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return ``x @ weight.T + bias``; the parts of one packed weight that get the same ``x`` compute it once."""
        if self.whole:
            y: Tensor = call(_LINEAR, x, self.packed, self.rows, bias)
            return y
        y = self._mine(self._wide(x), x.dim() - 1)
        return y.contiguous() if bias is None else y + bias

    def _wide(self, x: Tensor) -> Tensor:
        total = 2 * self.features if self.gated else self.shape[0]
        if (
            self.rows == total or x.is_inference()
        ):  # the only part; or the writes to x are not counted
            wide: Tensor = call(_LINEAR, x, self.packed, self.shape[0])
            return wide
        known = x.__dict__.pop(_WIDE, None)
        if known is not None and known[0] is self.packed and known[1] == x._version:
            wide, left = known[2:]
        else:
            wide, left = call(_LINEAR, x, self.packed, self.shape[0]), total
        if left > self.rows:  # another part is going to ask
            x.__dict__[_WIDE] = self.packed, x._version, wide, left - self.rows
        return wide

    def _mine(self, wide: Tensor, dim: int = 0) -> Tensor:
        """Return the rows (of a product, ``dim``: the columns) of this part."""
        if self.gated:
            pair = deinterleave_gate_up(wide, self.features, dim)
            wide = torch.cat(pair, dim) if self.fused else pair[self.index]
        if self.plan.order is not None:
            wide = torch.empty_like(wide).index_copy_(dim, self.plan.order, wide)
        return wide.narrow(dim, self.start, self.rows)

    def __call__(self) -> Tensor:
        wide: Tensor = torch.ops.ipex.unpack_linear_weight(self.packed, *self.shape, self.dtype)
        mine = self._mine(wide)
        return (mine.t() if self.plan.transposed else mine).clone(
            memory_format=torch.contiguous_format
        )


class TiedEmbedding(OptimizedModule):
    """Put in front of the class of an embedding that has the packed weight of the head."""

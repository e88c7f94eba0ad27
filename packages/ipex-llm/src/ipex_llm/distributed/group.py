# SPDX-License-Identifier: Apache-2.0
"""What a sharded model knows about its group, and the modules that make the whole out of the parts.

A group is used in two ways: at once, and as instructions of a program.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ipex_core import distributed
from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import FLOATS
from ipex_core.program import ProgramBuilder, Register


@dataclasses.dataclass(frozen=True, slots=True)
class HeadShard:
    """How the head is divided.

    Attributes:
        by: ``"vocabulary"``: each rank computes some logits, which are gathered. ``"input"``: each rank reads some of
            the features, and the logits are summed (DeepSpeed's way).
        sizes: Logits or features of each rank.
    """

    by: Literal["vocabulary", "input"]
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class TensorParallel:
    """A group of processes that compute one model together.

    Attributes:
        group: The group, as torch.distributed knows it.
        rank: Own rank.
        ranks: Number of ranks.
        shared: Memory that the ranks share, or None.
        timeout: Seconds until a rank that does not come is given up.
        name: Name of the group for functional collectives.
        head: How the head is divided; None: each rank has all of it.
    """

    group: Any
    rank: int
    ranks: int
    shared: distributed.SharedGroup | None
    timeout: float
    name: str
    head: HeadShard | None = None

    @classmethod
    def of(cls, group: Any = None) -> TensorParallel:
        """Return what is to be known about a group; collective, as it may make the shared memory.

        Args:
            group: A process group, or a device mesh of one dimension; None or True: the default group.

        Raises:
            TypeError: It is something else.
            ValueError: No group has been started, or this process is not in it.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise OpArgumentError(
                "optimize: tp_group must be started (ipex.distributed.init_process_group), got none"
            )
        found: Any = dist.group.WORLD if group is None or group is True else group
        if getattr(found, "ndim", None) == 1 and hasattr(found, "get_group"):
            found = found.get_group()
        if not isinstance(found, dist.ProcessGroup):
            raise TypeError(
                "optimize: tp_group must be a process group, a device mesh of one dimension, True (the default group)"
                f" or None, got {type(group).__name__}"
            )
        rank = dist.get_rank(found)
        if rank < 0:
            raise OpArgumentError(
                f"optimize: tp_group must have this process as a member, got rank {dist.get_rank()}, which is not in it"
            )
        shared = distributed.shared_group(found)
        timeout = distributed.timeout_of(found)
        return cls(found, rank, dist.get_world_size(found), shared, timeout, found.group_name)

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorParallel:
        return self  # a copy of a model talks to the same ranks, through the same memory

    def __reduce__(self) -> Any:
        raise TypeError(
            f"pickle: a sharded model must stay in its process, got the shard of rank {self.rank}:"
            " save its state_dict, and shard again after loading"
        )

    @property
    def _memory(self) -> Tensor | None:
        return None if self.shared is None else self.shared.memory

    def all_reduce(self, x: Tensor) -> Tensor:
        """Replace ``x`` by its sum over the ranks, and return it; not differentiable."""
        with torch.no_grad():
            if x.dtype in FLOATS and (x.device.type == "cpu" or self.shared is not None):
                name = "" if self.shared is not None else self.name
                host = x.detach().cpu()  # of a device, whose collectives also go through the host
                torch.ops.ipex.all_reduce_(host, self._memory, self.rank, self.timeout, name)
                if x.device.type != "cpu":
                    x.copy_(host)
            else:
                dist.all_reduce(x.detach(), group=self.group)
        return x

    def gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """Return the columns of all ranks side by side: ``[..., sizes[rank]]`` to ``[..., sum(sizes)]``."""
        name = "" if self.shared is not None else self.name
        result: Tensor = torch.ops.ipex.all_gather_columns(
            x.cpu(), list(sizes), self._memory, self.rank, self.timeout, name
        )
        return result.to(x.device)

    def from_first(self, values: list[int]) -> list[int]:
        """Return what rank 0 has: as many numbers on each rank, 0 to 2**24."""
        x = torch.tensor(values, dtype=torch.float32)
        if self.rank:
            x.zero_()
        return [int(value) for value in self.all_reduce(x).tolist()]

    # ------------------------------------------------------------------------------------------------------- programs

    def _arguments(self, builder: ProgramBuilder) -> tuple[Any, ...]:
        if self.shared is None:
            return None, self.rank, self.timeout, self.name
        return builder.constant(self.shared.memory), self.rank, self.timeout, ""

    def emit_all_reduce(self, builder: ProgramBuilder, x: Register) -> Register:
        """Append the sum over the ranks of a register, in place, and return it.

        It belongs behind every output projection of attention, every down projection and every mixture of experts;
        before the residual is added, which all ranks have.
        """
        builder.call("all_reduce_", x, *self._arguments(builder))
        return x

    def emit_head_input(self, builder: ProgramBuilder, x: Register) -> Register:
        """Return what the own part of the head reads of the rows ``[R, hidden]``."""
        if self.head is None or self.head.by == "vocabulary":
            return x
        sizes = self.head.sizes
        result: Register = builder.call("narrow", x, 1, sum(sizes[: self.rank]), sizes[self.rank])
        return result

    def emit_head_output(self, builder: ProgramBuilder, y: Register) -> Register:
        """Return all logits, from those that the own part of the head gave."""
        if self.head is None:
            return y
        if self.head.by == "input":
            return self.emit_all_reduce(builder, y)
        result: Register = builder.call(
            "all_gather_columns", y, list(self.head.sizes), *self._arguments(builder)
        )
        return result


# -- Modules around those that hold a rank's part of a weight: they make the whole out of the parts


class ShardedModule(nn.Module):
    """Base: holds a module as ``linear``, and shows its attributes and its state dict as if it were that module.

    The one inside is what is packed, quantized or fused.
    """

    def __init__(self, linear: nn.Module, parallel: TensorParallel) -> None:
        super().__init__()
        self.linear = linear
        self._parallel = parallel
        self.training = linear.training
        self.register_load_state_dict_pre_hook(_rename)

    @property
    def mp_group(self) -> Any:
        """The process group, by DeepSpeed's name."""
        return self._parallel.group

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "linear":
                raise
            return getattr(self.linear, name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.nn.Module.state_dict`, with the names of the module inside."""
        return self.linear.state_dict(*args, **kwargs)

    def _check(self) -> None:
        if self.training:
            raise RuntimeError(
                "optimize: a sharded model must be in inference mode, got training mode: call model.eval() first"
            )


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    for key in list(state):
        if key.startswith(prefix) and not key.startswith(f"{prefix}linear."):
            state[f"{prefix}linear.{key[len(prefix) :]}"] = state.pop(key)


class AllReduce(ShardedModule):
    """The sum over the ranks of what the module inside gives (of its first result, if there are several)."""

    def sum_over_ranks(self, x: Tensor) -> Tensor:
        """Return the sum of the parts that the ranks have, in place if ``x`` is contiguous."""
        return self._parallel.all_reduce(x.contiguous())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and return what the module inside takes and returns."""
        self._check()
        result = self.linear(*args, **kwargs)
        if isinstance(result, tuple):
            return self.sum_over_ranks(result[0]), *result[1:]
        return self.sum_over_ranks(result)


class ShardedHead(ShardedModule):
    """A head of which each rank has a part; gives all logits on each."""

    def __init__(self, linear: nn.Module, parallel: TensorParallel, shard: HeadShard) -> None:
        super().__init__(linear, parallel)
        self._shard = shard

    def forward(self, x: Tensor) -> Tensor:
        """Take ``[..., hidden]`` and return ``[..., vocabulary]``."""
        self._check()
        sizes, rank = self._shard.sizes, self._parallel.rank
        if self._shard.by == "input":
            x = x.narrow(-1, sum(sizes[:rank]), sizes[rank])
            return self._parallel.all_reduce(self.linear(x).contiguous())
        with torch.no_grad():
            return self._parallel.gather(self.linear(x), sizes)


def inner(module: nn.Module) -> nn.Module:
    """Return the module inside a wrapper of this file, or the module itself."""
    return module.linear if isinstance(module, ShardedModule) else module


def replace_child(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another one, wherever that is registered under ``root``."""
    for module in list(root.modules()):
        if module is new:
            continue
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


@contextlib.contextmanager
def uncovered(model: nn.Module) -> Iterator[None]:
    """Show the modules inside the wrappers of this file under their own names, so that they can be replaced."""
    wrappers = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, ShardedModule)
    }

    def put(name: str, module: nn.Module) -> None:
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._modules[last] = module

    for name, wrapper in wrappers.items():
        put(name, wrapper.linear)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            wrapper.linear = model.get_submodule(name)
            put(name, wrapper)

# SPDX-License-Identifier: Apache-2.0
"""Modules around those that hold a rank's part of a weight: they make the whole out of the parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ipex_llm.distributed.group import HeadShard, TensorParallel

__all__ = ["AllReduce", "ShardedHead", "ShardedModule", "inner", "replace_child", "uncovered"]

Tensor = torch.Tensor


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

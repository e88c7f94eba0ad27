# SPDX-License-Identifier: Apache-2.0
"""Random numbers of one thread from a seed of their own.

`torch.random.fork_rng` with `torch.manual_seed` exchanges the generator's state for the whole process: other threads
draw numbers that do not depend on their seed meanwhile, and draw them again afterwards.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_TENSOR = torch.Tensor
#: Functions that take a generator.
_DRAWING = frozenset(
    {
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal),
        *(torch.multinomial, torch.bernoulli, torch.poisson),
        *(_TENSOR.normal_, _TENSOR.uniform_, _TENSOR.random_, _TENSOR.bernoulli_),
        *(_TENSOR.exponential_, _TENSOR.geometric_, _TENSOR.cauchy_, _TENSOR.log_normal_),
        *(_TENSOR.multinomial, _TENSOR.bernoulli),
    }
)
#: Functions that take none, and what they do for a shape.
_LIKE: dict[Any, Any] = {torch.rand_like: torch.rand, torch.randn_like: torch.randn}


@functools.cache
def _takes_generator(function: Any) -> bool:
    """Return whether a function written in Python takes a generator, as functions of ``torch.nn.init`` do."""
    try:
        return (
            inspect.isfunction(function) and "generator" in inspect.signature(function).parameters
        )
    except (TypeError, ValueError):
        return False


class _Seeded(TorchFunctionMode):
    """Hands a generator to all that draws; torch keeps modes for each thread."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LIKE and isinstance(args[0], torch.Tensor):
            like = {name: getattr(args[0], name) for name in ("dtype", "device")}
            like |= {k: v for k, v in kwargs.items() if v is not None and k != "memory_format"}
            return _LIKE[func](args[0].shape, **like, generator=self.generator)
        if (func in _DRAWING or _takes_generator(func)) and kwargs.get("generator") is None:
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Let this thread draw numbers on a device from a seed; the state of torch's generator stays as it is.

    Args:
        seed: The numbers are those that follow ``torch.manual_seed(seed)``.
        device: Where they are drawn.
    """
    with _Seeded(torch.Generator(device).manual_seed(seed)):
        yield

# SPDX-License-Identifier: Apache-2.0
"""Calibration block by block: what the layers of a model see, one block's activations at a time.

The blocks of a model are the entries of its outermost lists of modules: the layers of an encoder or decoder. The data
run through the unchanged model once, and what each block was called with besides its input is kept: masks,
positions and the like, which the blocks share. Then block after block is run with what the block before gave, so that a
block sees the errors of those before it, and only the activations between two blocks are in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_core.util import progress as show_progress
from ipex_core.util import return_free_memory
from ipex_quant.weight_only.convert import is_linear, stacks

#: Arguments with which a block would remember what it saw.
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache_params")


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Arguments of one call of the model, and which positions count (bool ``[B, T]``), if not all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    mask: Tensor | None


# -- data -----------------------------------------------------------------------------------------------------


def samples_of(
    op: str, dataloader: Iterable[Any], nsamples: int, length: int, full: bool
) -> list[Sample]:
    """Return the first ``nsamples`` rows of a loader, each cut to ``length`` tokens.

    Args:
        op: Who asks, for messages.
        dataloader: Yields tensors, dictionaries of arguments, or tuples that begin with the model's input.
        nsamples: Rows to use.
        length: Most tokens of a row.
        full: Leave out what has fewer.
    """
    check(nsamples > 0, op, "nsamples", "be positive", nsamples)
    check(length > 0, op, "pad_max_length", "be positive", length)
    found: list[Sample] = []
    left, short = nsamples, 0
    for item in dataloader:
        if left <= 0:
            break
        item = item[0] if isinstance(item, (tuple, list)) and item else item
        known = isinstance(item, (Tensor, Mapping))
        check(known, op, "dataloader", "yield tensors, dictionaries or tuples", type(item).__name__)
        values = {"": item} if isinstance(item, Tensor) else dict(item)
        rows = next((v.shape[0] for v in values.values() if _is_batch(v)), 1)
        tokens = _tokens(values)
        if full and tokens is not None and tokens < length:
            short += 1
            continue
        values = {key: _cut(v, rows, left, tokens, length) for key, v in values.items()}
        left -= min(rows, left)
        mask = values.get("attention_mask")
        mask = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if isinstance(item, Tensor):
            found.append(Sample((values[""],), {}, None))
        else:
            found.append(Sample((), values, mask))
    what = f"have samples of at least {length} tokens" if short else "have samples"
    check(bool(found), op, "dataloader", what, "none")
    return found


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _tokens(values: Mapping[str, Any]) -> int | None:
    """Return the length of a row of token ids."""
    for value in values.values():
        if isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point():
            return int(value.shape[1])
    return None


def _cut(value: Any, rows: int, most: int, tokens: int | None, length: int) -> Any:
    if not _is_batch(value):
        return value
    if value.shape[0] == rows:
        value = value[:most]
    if tokens is not None and value.dim() >= 2 and value.shape[1] == tokens:
        value = value[:, :length]
    return value


# -- blocks ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class _Call:
    """How a block is called: its input is the first argument, or the one named ``key``."""

    given: Tensor | None  # None: what the block before returned
    key: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Block:
    """A part of a model and how to run it on the calibration data."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.module = name, module
        self.samples: list[Sample] = []
        self._calls: list[tuple[int, _Call]] = []
        self._inputs: dict[int, Any] = {}

    @torch.no_grad()
    def run(self, dtype: torch.dtype | None = None) -> Iterator[tuple[Sample, Any]]:
        """Yield each sample and what the block returns for it; with a dtype, floats among the arguments are cast."""
        for index, call in self._calls:
            value = self._inputs.get(index) if call.given is None else call.given
            args, kwargs = _cast((value, *call.args), dtype), _cast(call.kwargs, dtype)
            if call.key is None:
                result = self.module(*args, **kwargs)
            else:
                result = self.module(*args[1:], **{**kwargs, call.key: args[0]})
            yield self.samples[index], result


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return {k: _cast(v, dtype) for k, v in value.items()} if type(value) is dict else value


def linears_of(block: Block) -> dict[str, nn.Module]:
    """Return the linear layers of a block by their names in the model."""
    prefix = f"{block.name}." if block.name else ""
    return {
        (prefix + name).rstrip("."): module
        for name, module in block.module.named_modules()
        if is_linear(module)
    }


class _Stop(Exception):
    """The last block of a stack has run."""


@torch.no_grad()
def _record(model: nn.Module, stack: list[Block], samples: list[Sample]) -> None:
    """Run the model and keep how it calls the blocks."""
    state: dict[str, Any] = {}

    def before(block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            key = None
            if not args:
                key = next((k for k, v in kwargs.items() if isinstance(v, Tensor)), None)
            value = args[0] if args else kwargs.get(key or "")
            others = {k: None if k in _CACHES else v for k, v in kwargs.items() if k != key}
            if "use_cache" in others:
                others["use_cache"] = False
            chained = value is state.get("last") and isinstance(value, Tensor)
            call = _Call(None if chained else value, key, args[1:], others)
            block._calls.append((state["index"], call))

        return hook

    def after(block: Block) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            state["last"] = _first(output)
            if block is stack[-1] and module is not model:
                raise _Stop

        return hook

    with contextlib.ExitStack() as hooks:
        for block in stack:
            module = block.module
            hooks.enter_context(module.register_forward_pre_hook(before(block), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after(block)))
        for index, sample in enumerate(samples):
            state.update(index=index, last=None)
            with contextlib.suppress(_Stop):
                model(*sample.args, **sample.kwargs)


def _first(output: Any) -> Any:
    return output[0] if isinstance(output, (tuple, list)) and output else output


@contextlib.contextmanager
def _calibrating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode without caches, for a while."""
    training = [module for module in model.modules() if module.training]
    config = getattr(model, "config", None)
    configs = [c for c in (config, getattr(config, "text_config", None)) if hasattr(c, "use_cache")]
    before = [c.use_cache for c in configs]  # type: ignore[union-attr]
    model.eval()
    for c in configs:
        c.use_cache = False  # type: ignore[union-attr]
    try:
        yield
    finally:
        for c, value in zip(configs, before, strict=True):
            c.use_cache = value  # type: ignore[union-attr]
        for module in training:
            module.training = True


def blocks(model: nn.Module, samples: list[Sample], progress: bool = False) -> Iterator[Block]:
    """Yield the blocks of a model in the order in which they run; the caller may change the layers of a block.

    Args:
        model: The model.
        samples: What it is run on.
        progress: Whether to show a progress bar if it takes long.
    """
    count = sum(map(len, stacks(model)))
    steps = iter(show_progress(range(count)) if progress else range(count))
    with _calibrating(model):
        for entries in stacks(model):
            stack = [Block(name, module) for name, module in entries]
            _record(model, stack, samples)
            inputs: dict[int, Any] = {}
            for place, block in enumerate(stack):
                block.samples, block._inputs = samples, inputs
                next(steps, None)
                yield block
                return_free_memory()
                following = stack[place + 1 : place + 2]
                wanted = {i for b in following for i, call in b._calls if call.given is None}
                results: dict[int, Any] = {}
                if wanted:
                    outputs = zip(block._calls, block.run(), strict=True)
                    results = {i: _first(r) for (i, _), (_, r) in outputs if i in wanted}
                inputs = results
                block._calls = []


# -- what layers see ------------------------------------------------------------------------------------------


class Inputs:
    """Mean of ``x x^T`` and of ``|x|`` over what the linear layers of a block see.

    Layers that are given the same tensor (query, key and value projections) share one matrix.
    """

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = dict(layers)
        self._sums: dict[str, Tensor] = {}
        self._sizes: dict[str, Tensor] = {}
        self._rows: dict[str, int] = {}
        self._leader: dict[str, str] = {}
        self._seen: dict[str, Tensor] = {}
        self._mask: Tensor | None = None

    @torch.no_grad()
    def collect(self, block: Block) -> None:
        """Run a block on all samples.

        Raises:
            OpArgumentError: A layer sees NaN or infinity.
        """
        with contextlib.ExitStack() as hooks:
            for name, module in self.layers.items():
                hook = self._hook(name)
                hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            if block.samples:
                self._mask = block.samples[0].mask
            run = block.run()
            for index in range(len(block._calls)):
                self._mask = block.samples[block._calls[index][0]].mask
                next(run)
                self._seen.clear()
        for name, total in self._sums.items():
            finite = bool(total.isfinite().all())
            check(finite, name, "dataloader", "give finite activations", "NaN or infinity")

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x: Tensor = args[0] if args else next(iter(kwargs.values()))
            leader = self._leader.get(name)
            if leader is None:
                same = (other for other, seen in self._seen.items() if seen is x)
                leader = self._leader[name] = next(same, name)
            elif (
                leader != name and self._seen.get(leader) is not x
            ):  # it goes its own way from here
                for table in (self._sums, self._sizes):
                    table[name] = table[leader].clone()
                self._rows[name] = self._rows[leader]
                leader = self._leader[name] = name
            if leader == name:
                self._seen[name] = x  # alive, so that no other tensor gets its place
                self._add(name, x)

        return hook

    def _add(self, name: str, x: Tensor) -> None:
        mask = self._mask
        if mask is not None and x.dim() == 3 and x.shape[:2] == mask.shape:
            x = x[mask]
        rows = x.reshape(-1, x.shape[-1]).float()
        if name not in self._sums:
            k = rows.shape[1]
            self._sums[name], self._sizes[name] = torch.zeros(k, k), torch.zeros(k)
            self._rows[name] = 0
        self._sums[name].addmm_(rows.t(), rows)
        self._sizes[name] += rows.abs().sum(0)
        self._rows[name] += rows.shape[0]

    def groups(self) -> dict[str, list[str]]:
        """Return the layers that see the same, by the first of them; those that saw nothing are alone."""
        found: dict[str, list[str]] = {}
        for name in self.layers:
            found.setdefault(self._leader.get(name, name), []).append(name)
        return found

    def seen(self, name: str) -> bool:
        """Return whether a layer was given anything."""
        return self._rows.get(self._leader.get(name, name), 0) > 0

    def moment(self, name: str, features: int) -> Tensor:
        """Return the mean of ``x x^T``, float32 ``[K, K]``; zeros where the layer saw nothing."""
        leader = self._leader.get(name, name)
        total = self._sums.get(leader)
        return (
            torch.zeros(features, features) if total is None else total / max(1, self._rows[leader])
        )

    def magnitude(self, name: str) -> Tensor:
        """Return the mean of ``|x|``, float32 ``[K]``."""
        leader = self._leader.get(name, name)
        return self._sizes[leader] / max(1, self._rows[leader])

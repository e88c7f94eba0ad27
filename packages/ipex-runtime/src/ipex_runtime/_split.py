# SPDX-License-Identifier: Apache-2.0
"""Cuts the arguments of a call into parts along the batch, and joins the results of the parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["MultiStreamModuleHint", "batch_size", "cut", "join", "sizes", "guess"]


class MultiStreamModuleHint:
    """Says along which dimension each argument, or each part of a result, is split.

    Args:
        args: For each positional argument a dimension, None (every stream gets the whole argument), or a list, tuple or
            dictionary of these that matches the argument. A dimension given for a nested argument holds for all tensors
            in it.
        kwargs: The same for arguments passed by name.

    Raises:
        TypeError: Something else is in there.

    Example:
        >>> from ipex_runtime import MultiStreamModuleHint
        >>> hint = MultiStreamModuleHint(0, [0, None], mask={"keys": 1})
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for hint in (*args, *kwargs.values()):
            _check_hint(hint)
        self.args = list(args)
        self.kwargs = dict(kwargs)

    def __repr__(self) -> str:
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"MultiStreamModuleHint({', '.join(parts)})"


def _check_hint(hint: Any) -> None:
    if hint is None or (isinstance(hint, int) and not isinstance(hint, bool)):
        return
    if isinstance(hint, Mapping):
        hint = list(hint.values())
    if not isinstance(hint, (list, tuple)):
        raise TypeError(
            "MultiStreamModuleHint: hints must be dimensions, None, or lists, tuples and dictionaries of these, got "
            f"{hint!r}"
        )
    for inner in hint:
        _check_hint(inner)


Arguments = tuple[Sequence[Any], Mapping[str, Any]]


def guess(args: Sequence[Any], kwargs: Mapping[str, Any]) -> MultiStreamModuleHint:
    """Return hints for a call without any: all tensors whose first dimension equals the one in the first tensor."""
    hint = MultiStreamModuleHint()
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):  # the usual call
        hint.args = [0 if args[0].dim() else None]
        return hint
    first = next((t for t in _tensors((args, kwargs)) if t.dim() > 0), None)
    if first is None:
        return hint
    size = first.size(0)
    hint.args = [_guess(value, size) for value in args]
    hint.kwargs = {name: _guess(value, size) for name, value in kwargs.items()}
    return hint


def _guess(value: Any, size: int) -> Any:
    if isinstance(value, torch.Tensor):
        return 0 if value.dim() > 0 and value.size(0) == size else None
    if isinstance(value, Mapping):
        return {key: _guess(inner, size) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_guess(inner, size) for inner in value]
    return None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _tensors(inner)


def _pairs(hint: MultiStreamModuleHint, arguments: Arguments) -> Iterator[tuple[str, Any, Any]]:
    args, kwargs = arguments
    if len(hint.args) > len(args):
        raise ValueError(
            f"MultiStreamModule: input_split_hint must not have more positional hints than arguments, got "
            f"{len(hint.args)} for {len(args)}"
        )
    unknown = sorted(set(hint.kwargs) - set(kwargs))
    if unknown:
        raise ValueError(
            f"MultiStreamModule: input_split_hint must name arguments of the call, got {unknown}; the call has "
            f"{sorted(kwargs)}"
        )
    for index, dim in enumerate(hint.args):
        yield f"argument {index}", args[index], dim
    for name, dim in hint.kwargs.items():
        yield f"argument {name!r}", kwargs[name], dim


def batch_size(hint: MultiStreamModuleHint, arguments: Arguments) -> int | None:
    """Return the size of all split dimensions, None if nothing is split.

    Raises:
        TypeError: A hint does not have the form of its argument.
        ValueError: A dimension does not exist, or the sizes differ.
    """
    found: tuple[str, int] | None = None
    for name, value, dim in _pairs(hint, arguments):
        for where, size in _split_sizes(name, value, dim):
            if found is not None and found[1] != size:
                raise ValueError(
                    f"MultiStreamModule: split dimensions must have one size, got {found[1]} for {found[0]} and "
                    f"{size} for {where}"
                )
            found = (where, size)
    return None if found is None else found[1]


def _split_sizes(name: str, value: Any, hint: Any) -> Iterator[tuple[str, int]]:
    if hint is None:
        return
    if isinstance(value, torch.Tensor):
        if not isinstance(hint, int):
            raise TypeError(
                f"MultiStreamModule: the hint of {name} must be a dimension, got {hint!r}"
            )
        if not -value.dim() <= hint < value.dim():
            raise ValueError(
                f"MultiStreamModule: the hint of {name} must be a dimension of shape {list(value.shape)}, got {hint}"
            )
        yield name, value.size(hint)
        return
    for key, inner, dim in _inside(name, value, hint):
        yield from _split_sizes(f"{name}[{key!r}]", inner, dim)


def _inside(name: str, value: Any, hint: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield (key, part, hint of the part) of a nested value."""
    if isinstance(value, Mapping):
        keys: list[Any] = list(value)
    elif isinstance(value, (list, tuple)):
        keys = list(range(len(value)))
    elif isinstance(hint, int):
        raise TypeError(
            f"MultiStreamModule: {name} must be a tensor to be split along dimension {hint}, got "
            f"{type(value).__name__}; its hint can be None"
        )
    else:
        raise TypeError(
            f"MultiStreamModule: the hint of {name} must fit a {type(value).__name__}, got {hint!r}"
        )
    if isinstance(hint, int):
        for key in keys:
            # Numbers, texts and None beside tensors stay whole.
            nested = isinstance(value[key], (torch.Tensor, Mapping, list, tuple))
            yield key, value[key], hint if nested else None
        return
    hints = hint if isinstance(hint, Mapping) else dict(enumerate(hint))
    if not set(hints) <= set(keys) or isinstance(hint, Mapping) != isinstance(value, Mapping):
        raise TypeError(f"MultiStreamModule: the hint of {name} must have its form, got {hint!r}")
    for key in keys:
        yield key, value[key], hints.get(key)


def sizes(total: int, parts: int) -> list[int]:
    """Return how ``total`` rows are shared by ``parts`` streams: evenly, the first ones get one more."""
    size, more = divmod(total, parts)
    return [size + (part < more) for part in range(parts)]


def cut(
    hint: MultiStreamModuleHint, arguments: Arguments, lengths: Sequence[int]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return the arguments of each part; tensors are views."""
    args, kwargs = arguments
    hints = [*hint.args, *[None] * (len(args) - len(hint.args))]
    own = [_cut(value, dim, lengths) for value, dim in zip(args, hints, strict=True)]
    named = {name: _cut(value, hint.kwargs.get(name), lengths) for name, value in kwargs.items()}
    return [
        (tuple(parts[i] for parts in own), {name: parts[i] for name, parts in named.items()})
        for i in range(len(lengths))
    ]


def _cut(value: Any, hint: Any, lengths: Sequence[int]) -> Sequence[Any]:
    """Return the part of each stream."""
    if hint is None:
        return [value] * len(lengths)
    if isinstance(value, torch.Tensor):
        return torch.split_with_sizes(value, lengths, hint)
    inner = {key: _cut(v, dim, lengths) for key, v, dim in _inside("", value, hint)}
    return [
        _like(value, {key: parts[i] for key, parts in inner.items()}) for i in range(len(lengths))
    ]


def _like(value: Any, inner: dict[Any, Any]) -> Any:
    """Return a container of the type of ``value`` with other contents."""
    if isinstance(value, Mapping):
        if type(value) is dict:
            return inner
        # Outputs of transformers and other mappings that are made from names.
        try:
            return type(value)(**inner)
        except TypeError:
            return type(value)(inner)  # type: ignore[call-arg]
    parts = list(inner.values())
    if hasattr(value, "_fields"):
        return type(value)(*parts)
    return type(value)(parts)


def join(hint: MultiStreamModuleHint, results: list[Any]) -> Any:
    """Return the joined results: tensors concatenated, containers entered, of the rest the result of the first stream.

    Raises:
        TypeError: The hint does not have the form of the result.
    """
    first = results[0]
    whole: Any = hint.args[0] if len(hint.args) == 1 and not hint.kwargs else None
    if whole is None and hint.kwargs and not hint.args:
        whole = hint.kwargs
    elif whole is None and len(hint.args) > 1:
        whole = hint.args
    if len(results) == 1:
        return first
    return _join("result", whole, results)


def _join(name: str, hint: Any, results: list[Any]) -> Any:
    first = results[0]
    if hint is None:
        return first
    if isinstance(first, torch.Tensor):
        if not isinstance(hint, int):
            raise TypeError(
                f"MultiStreamModule: output_concat_hint of the {name} must be a dimension, got {hint!r}"
            )
        if not first.dim():
            raise ValueError(
                f"MultiStreamModule: the {name} must have a dimension {hint} to be joined, got a scalar; its hint can "
                "be None, or concat_output False"
            )
        return torch.cat(results, dim=hint)
    if not isinstance(first, (Mapping, list, tuple)):
        return first
    inner = {}
    for key, _, dim in _inside(name, first, hint):
        inner[key] = _join(f"{name}[{key!r}]", dim, [result[key] for result in results])
    return _like(first, inner)

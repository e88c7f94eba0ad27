# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments, for the tests of each op: kernel and Python refuse a call in the same words, and write nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs

#: An op, its arguments, and a pattern for what is said of them.
BadCall = tuple[str, tuple[Any, ...], str]


def each(calls: Iterable[BadCall]) -> pytest.MarkDecorator:
    """Run a test with the parameters ``op``, ``args`` and ``text`` once per call."""
    calls = list(calls)
    ids = [f"{op}-{i}" for i, (op, _, _) in enumerate(calls)]
    return pytest.mark.parametrize(("op", "args", "text"), calls, ids=ids)


def assert_refused(op: str, args: tuple[Any, ...], text: str, **kwargs: Any) -> None:
    """Call kernel and Python check: both raise the same ``op: <text>, got ...``, and no tensor is written."""
    tensors = list(_tensors((*args, *kwargs.values())))
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match=f"^{op}: .*({text})") as native:
        getattr(torch.ops.ipex, op)(*args, **kwargs)
    with pytest.raises(OpArgumentError) as python:
        specs()[op].check(specs()[op].bind(*args, **kwargs))
        # It alone sees what only the numbers in a tensor tell.
        specs()[op].reference(*args, **kwargs)
    assert str(native.value) == str(python.value)
    assert ", got " in str(native.value)
    torch.testing.assert_close(tensors, before, rtol=0, atol=0, equal_nan=True)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)

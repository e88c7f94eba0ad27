# SPDX-License-Identifier: Apache-2.0
"""Other orders of arguments: IPEX's packages for CPU and GPU disagreed on some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["activation_may_come_first", "alibi_may_be_missing"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def alibi_may_be_missing(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function whose seventh argument is ``alibi_slopes`` accept calls without it.

    That was the signature for CPUs, by which clients of IPEX call when its version says so.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        plain: Any = args
        if len(plain) > 6:
            # Where the slopes would be stands a length: a number, or a tensor that is one.
            is_tensor = isinstance(plain[6], torch.Tensor)
            if plain[6].dim() == 0 if is_tensor else plain[6] is not None:
                plain = (*plain[:6], None, *plain[6:])
        else:
            kwargs.setdefault("alibi_slopes", None)
        return function(*plain, **kwargs)

    return call


def activation_may_come_first(forward: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method accept its tenth and eleventh argument, a bias and the activation, in the other order.

    That was the signature for XPU.
    """

    @functools.wraps(forward)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        plain: Any = args
        if len(plain) > 10 and isinstance(plain[10], str):
            if len(plain) > 11:
                kwargs["e_score_correction_bias"] = plain[11]
            kwargs["activation"] = plain[10]
            plain = plain[:10]
        return forward(*plain, **kwargs)

    return call

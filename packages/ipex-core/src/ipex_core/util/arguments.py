# SPDX-License-Identifier: Apache-2.0
"""Second names of arguments: IPEX's packages for CPU and GPU disagreed on some."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["also_named"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


def also_named(**names: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Let a function accept keyword arguments under second names, given as ``second="first"``."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            for second, first in names.items():
                if second in kwargs:
                    if first in kwargs:
                        name = function.__name__
                        raise TypeError(f"{name}: {second} must not be given beside {first}")
                    kwargs[first] = kwargs.pop(second)
            return function(*args, **kwargs)

        return call

    return decorate

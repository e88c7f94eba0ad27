# SPDX-License-Identifier: Apache-2.0
"""Timing stock code and ours while a graph is compiled, where no table can tell which is faster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ipex_core.kernels import providers
from ipex_core.kernels.timing import fastest, numbers

__all__ = ["against_ours", "measured_linear"]

#: Seconds that a measurement may go on; the whole of a network should be far below the time that compiling takes.
_SECONDS = 0.04

_known: dict[Any, str | None] = {}


def against_ours(
    key: tuple[Any, ...], runs: Callable[[], dict[str, Callable[[], torch.Tensor]]]
) -> str | None:
    """Return why stock code is to run, None if ours was measured to be faster; once in a process.

    Args:
        key: What the times depend on, but for the number of threads.
        runs: Makes the candidates, ``"stock"`` and ``"ipex"``, on data of their own.
    """
    if torch.are_deterministic_algorithms_enabled():
        return "deterministic algorithms are asked for, and a measurement may come out either way"
    key = (*key, torch.get_num_threads())
    if key not in _known:
        # Below autograd, as compiled graphs run: its kernel for ours is Python and takes some 8 us.
        with (
            torch.utils._python_dispatch._disable_current_modes(),
            torch.no_grad(),
            torch._C._AutoDispatchBelowAutograd(),
        ):
            best, text = fastest(runs(), _SECONDS)
        _known[key] = None if best == "ipex" else f"measured: {text}"
    return _known[key]


def measured_linear(
    dtype: torch.dtype, n: int, k: int, rows: int, biased: bool, activation: str = "none"
) -> str | None:
    """Return why Inductor is to compute a linear layer; None if ours was measured to be faster or a table says so.

    Args:
        dtype: Type of the operands.
        n: Rows of the weight.
        k: Columns of the weight.
        rows: Rows of the input.
        biased: Whether there is a bias.
        activation: What follows and our kernel computes on the way; Inductor makes a loop of its own of it.
    """
    if dtype != torch.float32 or rows == 0 or _table_holds():
        return None
    sizes = n, k, rows, biased, _stock_is_mkl(), activation
    return against_ours(("linear", *sizes), lambda: _linears(*sizes))


def _table_holds() -> bool:
    """Whether the table of `choose_linear` is also one against MKL on a packed weight, Inductor's in float32.

    MKL has other code for each vendor and level. On a Xeon with AVX512-VNNI it is 1.0-1.7 times as fast as ours from 32
    rows on and slower with 4 to 16; on Zen 4 it is slower throughout.
    """
    return providers.cpu_level() == "avx512_bf16"


def _stock_is_mkl() -> bool:
    """Whether Inductor hands a linear layer in float32 to MKL; a file compiled ahead of time has oneDNN."""
    from torch._inductor.virtualized import V

    return bool(torch._C.has_mkl) and not V.aot_compilation


def _linears(
    n: int, k: int, rows: int, biased: bool, mkl: bool, activation: str
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes a linear layer in float32: Inductor's choice and ours."""
    from ipex_core.ops.linear.epilogue import activate
    from ipex_core.packing import onednn
    from ipex_core.packing.parameter import pack

    n = min(n, 2048)  # the rest is more of the same
    x, weight = numbers(rows, k), numbers(n, k)
    bias = torch.zeros(n) if biased else None
    packed = torch.ops.ipex.pack_linear_weight(weight)
    runs = {"ipex": lambda: torch.ops.ipex.linear(x, packed, n, bias, None, activation)}
    if mkl:
        for_mkl = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        stock = functools.partial(torch.ops.mkl._mkl_linear, x, for_mkl, weight, bias, rows)
    else:
        for_onednn = pack(weight, "mkldnn")
        stock = functools.partial(onednn.linear, x, for_onednn, bias)
    # The ops of torch take the time of Inductor's loops for these.
    runs["stock"] = lambda: activate(stock(), activation)
    return runs

# SPDX-License-Identifier: Apache-2.0
"""float32 numbers as two halves of 16 bits, and back."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ipex_core.library.arguments import Arguments
from ipex_core.library.checks import check_like, check_tensor, randn
from ipex_core.library.kernels import register
from ipex_core.library.spec import OpSpec, Sample
from ipex_core.ops.optim.common import join, split

Tensor = torch.Tensor


def _split_float_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the upper and the lower 16 bits of float32 numbers.

    Args:
        x: float32, any shape.

    Returns:
        ``top``: ``x`` cut off (not rounded); ``low``: the other bits, no meaningful numbers; both bfloat16.

    Raises:
        RuntimeError: Another dtype.

    Source: Kalamkar et al., "A Study of BFLOAT16 for Deep Learning Training", 2019.
    """
    return split(x)


def _cat_bfloat16_float(top: Tensor, low: Tensor) -> Tensor:
    """Return the float32 numbers whose halves were taken apart by ``split_float_bfloat16``.

    Args:
        top: bfloat16, any shape.
        low: Like ``top``.

    Returns:
        float32, bit for bit what was split.

    Raises:
        RuntimeError: Another dtype, or different shapes.
    """
    return join(top, low)


def _check_split(a: Arguments) -> None:
    check_tensor(a.op, "x", a.x, (torch.float32,), min_dim=0)


def _check_cat(a: Arguments) -> None:
    check_tensor(a.op, "top", a.top, (torch.bfloat16,), min_dim=0)
    check_like(a.op, "low", a.low, a.top, of="top")


def _halves(a: Arguments) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(a.x.shape, dtype=torch.bfloat16, device=a.x.device),
        torch.empty(a.x.shape, dtype=torch.bfloat16, device=a.x.device),
    )


def _values() -> Iterator[tuple[str, Tensor]]:
    # First some whose halves are numbers, which checks that compare numbers can take.
    for size in (1, 7, 40, 300):
        yield f"integers-{size}", torch.arange(size, dtype=torch.float32) + 3 * 2**16
    for shape in ((), (1,), (31,), (5, 40), (300, 129), (0, 3)):
        yield "x".join(map(str, shape)) or "scalar", randn(*shape, seed=81)
    yield "transposed", randn(9, 20, seed=82).t()
    special = [0.0, -0.0, float("inf"), -float("inf"), 1e-42, -3.4e38]
    yield "special_values", torch.tensor(special)


def _split_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _values():
        yield Sample((x,), id=name)


def _cat_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for name, x in _values():
        yield Sample(split(x), id=name)


register(
    OpSpec(
        name="split_float_bfloat16",
        schema="(Tensor x) -> (Tensor, Tensor)",
        reference=_split_float_bfloat16,
        check=_check_split,
        fake=_halves,
        samples=_split_samples,
        dtypes=(torch.float32,),
        backward=None,
        lift=False,
        tolerance={torch.bfloat16: (0.0, 0.0)},
        summary="Upper and lower halves of float32 numbers",
    )
)
register(
    OpSpec(
        name="cat_bfloat16_float",
        schema="(Tensor top, Tensor low) -> Tensor",
        reference=_cat_bfloat16_float,
        check=_check_cat,
        fake=lambda a: torch.empty(a.top.shape, dtype=torch.float32, device=a.top.device),
        samples=_cat_samples,
        dtypes=(torch.bfloat16,),
        backward=None,
        lift=False,
        tolerance={torch.float32: (0.0, 0.0)},
        summary="float32 numbers from their halves",
    )
)

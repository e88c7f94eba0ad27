# SPDX-License-Identifier: Apache-2.0
"""Configurations of weight-only quantization, with IPEX's names and values.

Example:
    >>> from ipex_quant.qconfig.weight_only import WoqWeightDtype, get_weight_only_quant_qconfig_mapping
    >>> mapping = get_weight_only_quant_qconfig_mapping(
    ...     weight_dtype=WoqWeightDtype.INT4, group_size=128
    ... )
    >>> mapping.global_qconfig.weight_qscheme
    <WoqWeightQScheme.ASYMMETRIC: 1>
"""

from __future__ import annotations

import warnings
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch.ao.quantization import PlaceholderObserver, QConfigMapping

from ipex_core.library.spec import check

__all__ = [
    "WOQ_ACT_QUANT_MODE_TO_STR",
    "WOQ_DTYPE_TO_STR",
    "WOQ_LOWP_MODE_TO_STR",
    "WOQ_QSCHEME_TO_STR",
    "QConfigWoq",
    "WoqActQuantMode",
    "WoqLowpMode",
    "WoqQConfigMapping",
    "WoqWeightDtype",
    "WoqWeightQScheme",
    "get_weight_only_quant_qconfig_mapping",
    "woq_qconfig",
]


class WoqLowpMode(IntEnum):
    """What products with a quantized weight are computed in."""

    NONE = 0  #: The dtype of the input.
    FP16 = 1  #: float16.
    BF16 = 2  #: bfloat16.
    INT8 = 3  #: Integers; activations are rounded to 8 bits at each call.


class WoqActQuantMode(IntEnum):
    """How activations share a scale where integers are multiplied.

    IC is the input channel, that is K: a block of it is a group of the weight. BATCH is a row. SYM: no zero point.
    """

    NONE = -1
    PER_TENSOR = 0
    PER_IC_BLOCK = 1
    PER_BATCH = 2
    PER_BATCH_IC_BLOCK = 3
    PER_TENSOR_SYM = 4
    PER_IC_BLOCK_SYM = 5
    PER_BATCH_SYM = 6
    PER_BATCH_IC_BLOCK_SYM = 7


class WoqWeightDtype(IntEnum):
    """What a weight is stored as. FP4 and MXFP4 are additions to IPEX's list."""

    INT8 = 1
    INT4 = 2
    NF4 = 3  #: 16 values that follow a normal distribution.
    FP8 = 4  #: e4m3.
    FP4 = 5  #: e2m1.
    MXFP4 = 6  #: e2m1, groups of 32 with a power of two as scale.


class WoqWeightQScheme(IntEnum):
    """Whether a weight has zero points."""

    UNDEFINED = 0  #: What is usual for the weight dtype.
    ASYMMETRIC = 1
    SYMMETRIC = 2


#: Members of the enums -> their names as the command line and files spell them.
WOQ_LOWP_MODE_TO_STR = {mode: mode.name.lower() for mode in WoqLowpMode}
WOQ_ACT_QUANT_MODE_TO_STR = {mode: mode.name.lower() for mode in WoqActQuantMode}
WOQ_DTYPE_TO_STR = {dtype: dtype.name.lower() for dtype in WoqWeightDtype}
WOQ_QSCHEME_TO_STR = {scheme: scheme.name.lower() for scheme in WoqWeightQScheme}


# One object each, so that two equal configurations compare as equal.
_ACTIVATION = PlaceholderObserver.with_args(dtype=torch.float32, is_dynamic=False)
_WEIGHTS = {
    dtype: PlaceholderObserver.with_args(dtype=stored)
    for dtype, stored in (
        (WoqWeightDtype.INT8, torch.qint8),
        (WoqWeightDtype.INT4, torch.quint4x2),
        (WoqWeightDtype.NF4, torch.quint4x2),
        (WoqWeightDtype.FP8, torch.float8_e4m3fn),
        (WoqWeightDtype.FP4, torch.quint4x2),
        (WoqWeightDtype.MXFP4, torch.quint4x2),
    )
}
_FORMATS = {
    WoqWeightDtype.INT8: "int8",
    WoqWeightDtype.INT4: "int4",
    WoqWeightDtype.NF4: "nf4",
    WoqWeightDtype.FP8: "fp8_e4m3",
    WoqWeightDtype.FP4: "fp4",
    WoqWeightDtype.MXFP4: "fp4",
}
_INTEGERS = (WoqWeightDtype.INT8, WoqWeightDtype.INT4)


class _Fields(NamedTuple):
    activation: Any
    weight: Any
    lowp_mode: WoqLowpMode
    act_quant_mode: WoqActQuantMode
    weight_dtype: WoqWeightDtype
    group_size: int
    cache_weight_for_large_batch: bool
    weight_qscheme: WoqWeightQScheme


class QConfigWoq(_Fields):
    """How linear layers are quantized and computed. Made by `get_weight_only_quant_qconfig_mapping` or `woq_qconfig`.

    Attributes:
        activation: Unused; torch expects it.
        weight: Unused; torch expects it.
        lowp_mode: `WoqLowpMode`.
        act_quant_mode: `WoqActQuantMode`; NONE unless ``lowp_mode`` is INT8.
        weight_dtype: `WoqWeightDtype`.
        group_size: Input features that share a scale, or -1 for all.
        cache_weight_for_large_batch: Whether a second, dense copy of the weight serves large batches.
        weight_qscheme: `WoqWeightQScheme`, never UNDEFINED.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        """Return the fields that say something."""
        shown = [f"{name}={_shown(getattr(self, name))}" for name in self._fields[2:]]
        return f"QConfigWoq({', '.join(shown)})"

    def __reduce__(self) -> Any:
        # The observers are restored as the objects of this module: a copy equals the original.
        return _rebuild, tuple(self[2:])


def _shown(value: object) -> str:
    return value.name if isinstance(value, IntEnum) else str(value)


def _rebuild(
    lowp_mode: WoqLowpMode,
    act_quant_mode: WoqActQuantMode,
    weight_dtype: WoqWeightDtype,
    *rest: Any,
) -> QConfigWoq:
    weight = _WEIGHTS[weight_dtype]
    return QConfigWoq(_ACTIVATION, weight, lowp_mode, act_quant_mode, weight_dtype, *rest)


class WoqQConfigMapping(QConfigMapping):
    """`torch.ao.quantization.QConfigMapping` that can be compared and is short in print."""

    def __eq__(self, other: object) -> bool:
        """Return whether both map everything alike."""
        if not isinstance(other, QConfigMapping):
            return NotImplemented
        return bool(self.to_dict() == other.to_dict())

    __hash__ = None  # type: ignore[assignment]  # it can be changed

    def __repr__(self) -> str:
        """Return the entries that there are."""
        shown = {name or "global_qconfig": value for name, value in self.to_dict().items() if value}
        return f"WoqQConfigMapping({', '.join(f'{k}={v!r}' for k, v in shown.items())})"


_E = TypeVar("_E", bound=IntEnum)


def _member(op: str, name: str, kind: type[_E], value: Any) -> _E:
    known = not isinstance(value, bool) and isinstance(value, int)
    known = known and value in {int(member) for member in kind}
    listed = ", ".join(f"{member.name} ({int(member)})" for member in kind)
    check(known, op, name, f"be one of {kind.__name__}'s {listed}", value)
    return kind(value)


def _weight_dtype(op: str, value: Any) -> WoqWeightDtype:
    old = {torch.qint8: WoqWeightDtype.INT8, torch.quint4x2: WoqWeightDtype.INT4}
    if isinstance(value, torch.dtype) and value in old:
        name = f"WoqWeightDtype.{old[value].name}"
        warnings.warn(
            f"{op}: weight_dtype={value} is deprecated, use {name}",
            DeprecationWarning,
            stacklevel=4,
        )
        return old[value]
    return _member(op, "weight_dtype", WoqWeightDtype, value)


def woq_qconfig(
    *,
    weight_dtype: int = WoqWeightDtype.INT8,
    lowp_mode: int = WoqLowpMode.NONE,
    act_quant_mode: int = WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM,
    group_size: int = -1,
    weight_qscheme: int = WoqWeightQScheme.UNDEFINED,
    cache_weight_for_large_batch: bool = False,
) -> QConfigWoq:
    """Return the configuration that `get_weight_only_quant_qconfig_mapping` puts in a mapping.

    Takes the same arguments and raises the same errors; ``cache_weight_for_large_batch`` is a field of the result.
    """
    return _make(
        "woq_qconfig",
        weight_dtype,
        lowp_mode,
        act_quant_mode,
        group_size,
        weight_qscheme,
        cache_weight_for_large_batch,
    )


def get_weight_only_quant_qconfig_mapping(
    *,
    weight_dtype: int = WoqWeightDtype.INT8,
    lowp_mode: int = WoqLowpMode.NONE,
    act_quant_mode: int = WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM,
    group_size: int = -1,
    weight_qscheme: int = WoqWeightQScheme.UNDEFINED,
) -> WoqQConfigMapping:
    """Return a mapping that quantizes the weights of all linear layers.

    Args:
        weight_dtype: A `WoqWeightDtype`; ``torch.qint8`` and ``torch.quint4x2`` are deprecated names of INT8 and INT4.
        lowp_mode: A `WoqLowpMode`. INT8 is not possible with FP8 weights.
        act_quant_mode: A `WoqActQuantMode`. It matters for ``lowp_mode=INT8`` only and is NONE in the result otherwise.
        group_size: Input features that share a scale: -1 for all, or a power of two. MXFP4 has 32.
        weight_qscheme: A `WoqWeightQScheme`. UNDEFINED means ASYMMETRIC, except for weights that have no zero points:
            all but INT8 and INT4, and INT8 with ``lowp_mode=INT8``. ASYMMETRIC is an error for those.

    Returns:
        A ``QConfigMapping`` of torch whose ``global_qconfig`` is a `QConfigWoq`.

    Raises:
        OpArgumentError: An argument is not as described.

    Example:
        >>> get_weight_only_quant_qconfig_mapping(lowp_mode=WoqLowpMode.INT8).global_qconfig
        QConfigWoq(lowp_mode=INT8, act_quant_mode=PER_BATCH_IC_BLOCK_SYM, weight_dtype=INT8, group_size=-1, \
cache_weight_for_large_batch=False, weight_qscheme=SYMMETRIC)
    """
    qconfig = _make(
        "get_weight_only_quant_qconfig_mapping",
        weight_dtype,
        lowp_mode,
        act_quant_mode,
        group_size,
        weight_qscheme,
        False,
    )
    return WoqQConfigMapping().set_global(qconfig)  # type: ignore[return-value, arg-type]


def _make(
    op: str,
    weight_dtype: Any,
    lowp_mode: Any,
    act_quant_mode: Any,
    group_size: Any,
    weight_qscheme: Any,
    cache: Any,
) -> QConfigWoq:
    dtype = _weight_dtype(op, weight_dtype)
    lowp = _member(op, "lowp_mode", WoqLowpMode, lowp_mode)
    act = _member(op, "act_quant_mode", WoqActQuantMode, act_quant_mode)
    scheme = _member(op, "weight_qscheme", WoqWeightQScheme, weight_qscheme)
    check(isinstance(cache, bool), op, "cache_weight_for_large_batch", "be a bool", cache)
    integer = isinstance(group_size, int) and not isinstance(group_size, bool)
    power = integer and group_size > 0 and group_size & (group_size - 1) == 0
    fits = integer and (group_size == -1 or power)
    check(fits, op, "group_size", "be -1 or a power of two", group_size)
    integers = lowp is WoqLowpMode.INT8
    if dtype is WoqWeightDtype.MXFP4:
        check(group_size in (-1, 32), op, "group_size", "be 32 for MXFP4 weights", group_size)
        group_size = 32
    fits = not (integers and dtype is WoqWeightDtype.FP8)
    check(fits, op, "lowp_mode", "be NONE, FP16 or BF16 for FP8 weights", "INT8")
    if integers:
        fits = act is not WoqActQuantMode.NONE
        check(fits, op, "act_quant_mode", "be given for lowp_mode INT8", "NONE")
    else:
        act = WoqActQuantMode.NONE
    symmetric = dtype not in _INTEGERS or (integers and dtype is WoqWeightDtype.INT8)
    what = f"{dtype.name} weights" + (" and lowp_mode INT8" if dtype in _INTEGERS else "")
    fits = not (symmetric and scheme is WoqWeightQScheme.ASYMMETRIC)
    check(fits, op, "weight_qscheme", f"be SYMMETRIC for {what}", "ASYMMETRIC")
    if scheme is WoqWeightQScheme.UNDEFINED:
        scheme = WoqWeightQScheme.SYMMETRIC if symmetric else WoqWeightQScheme.ASYMMETRIC
    weight = _WEIGHTS[dtype]
    return QConfigWoq(_ACTIVATION, weight, lowp, act, dtype, group_size, cache, scheme)


def weight_format(dtype: WoqWeightDtype) -> str:
    """Return the name that ``torch.ops.ipex.pack_woq_weight`` has for a weight dtype."""
    return _FORMATS[dtype]

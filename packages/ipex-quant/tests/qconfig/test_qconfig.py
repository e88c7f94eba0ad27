# SPDX-License-Identifier: Apache-2.0
"""Weight-only configurations: IPEX's names, rules and errors."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from torch.ao.quantization import QConfigMapping

import ipex_quant
from ipex_core.errors import OpArgumentError
from ipex_quant import (
    QConfigWoq,
    WoqActQuantMode,
    WoqLowpMode,
    WoqWeightDtype,
    WoqWeightQScheme,
    get_weight_only_quant_qconfig_mapping,
    woq_qconfig,
)


def test_values_of_the_enums() -> None:
    assert [(m.name, m.value) for m in WoqLowpMode] == [
        ("NONE", 0),
        ("FP16", 1),
        ("BF16", 2),
        ("INT8", 3),
    ]
    assert [m.value for m in WoqActQuantMode] == [-1, 0, 1, 2, 3, 4, 5, 6, 7]
    assert WoqActQuantMode.PER_BATCH_IC_BLOCK_SYM == 7
    assert (WoqWeightDtype.INT8, WoqWeightDtype.INT4, WoqWeightDtype.NF4, WoqWeightDtype.FP8) == (
        *(1, 2, 3, 4),
    )
    assert [m.value for m in WoqWeightQScheme] == [0, 1, 2]


def test_defaults() -> None:
    mapping = get_weight_only_quant_qconfig_mapping()
    assert isinstance(mapping, QConfigMapping)
    qconfig = mapping.global_qconfig
    assert isinstance(qconfig, QConfigWoq) and isinstance(qconfig, tuple)
    assert qconfig._fields == (
        "activation",
        "weight",
        "lowp_mode",
        "act_quant_mode",
        "weight_dtype",
        "group_size",
        "cache_weight_for_large_batch",
        "weight_qscheme",
    )
    assert qconfig[2:] == (
        WoqLowpMode.NONE,
        WoqActQuantMode.NONE,
        WoqWeightDtype.INT8,
        -1,
        False,
        WoqWeightQScheme.ASYMMETRIC,
    )
    assert qconfig.activation().dtype == torch.float32


@pytest.mark.parametrize("dtype", list(WoqWeightDtype))
@pytest.mark.parametrize("lowp", list(WoqLowpMode))
def test_scheme_and_activation_mode(dtype: WoqWeightDtype, lowp: WoqLowpMode) -> None:
    if dtype is WoqWeightDtype.FP8 and lowp is WoqLowpMode.INT8:
        with pytest.raises(ValueError, match="lowp_mode must be NONE, FP16 or BF16"):
            woq_qconfig(weight_dtype=dtype, lowp_mode=lowp)
        return
    qconfig = woq_qconfig(weight_dtype=dtype, lowp_mode=lowp)
    integers = lowp is WoqLowpMode.INT8
    symmetric = dtype not in (WoqWeightDtype.INT8, WoqWeightDtype.INT4)
    symmetric |= dtype is WoqWeightDtype.INT8 and integers
    assert (qconfig.weight_qscheme is WoqWeightQScheme.SYMMETRIC) == symmetric
    assert (qconfig.act_quant_mode is WoqActQuantMode.NONE) == (not integers)
    if symmetric:
        with pytest.raises(ValueError, match="weight_qscheme must be SYMMETRIC"):
            woq_qconfig(
                weight_dtype=dtype, lowp_mode=lowp, weight_qscheme=WoqWeightQScheme.ASYMMETRIC
            )


def test_plain_integers() -> None:
    """Clients pass numbers."""
    assert woq_qconfig(weight_dtype=2, lowp_mode=2, group_size=128) == woq_qconfig(
        weight_dtype=WoqWeightDtype.INT4, lowp_mode=WoqLowpMode.BF16, group_size=128
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight_dtype": 9}, r"weight_dtype must be one of WoqWeightDtype's INT8 \(1\)"),
        ({"weight_dtype": "int8"}, "weight_dtype must"),
        ({"weight_dtype": torch.float16}, "weight_dtype must"),
        ({"lowp_mode": 4}, r"lowp_mode must be one of WoqLowpMode's NONE \(0\), .*, got 4"),
        ({"lowp_mode": -1}, "lowp_mode must"),
        ({"lowp_mode": True}, "lowp_mode must"),
        ({"act_quant_mode": 8}, "act_quant_mode must"),
        ({"lowp_mode": 3, "act_quant_mode": -1}, "act_quant_mode must be given"),
        ({"group_size": 0}, "group_size must be -1 or a power of two, got 0"),
        ({"group_size": 96}, "group_size must"),
        ({"group_size": -2}, "group_size must"),
        ({"group_size": 64.0}, "group_size must"),
        ({"weight_dtype": 6, "group_size": 64}, "group_size must be 32 for MXFP4"),
        ({"weight_qscheme": 3}, "weight_qscheme must"),
    ],
)
def test_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(OpArgumentError, match=message):
        get_weight_only_quant_qconfig_mapping(**arguments)  # type: ignore[arg-type]


def test_groups_of_powers_of_two() -> None:
    for exponent in range(12):
        assert woq_qconfig(group_size=1 << exponent).group_size == 1 << exponent
    assert woq_qconfig(weight_dtype=WoqWeightDtype.MXFP4).group_size == 32


@pytest.mark.parametrize(
    ("old", "new"), [(torch.qint8, WoqWeightDtype.INT8), (torch.quint4x2, WoqWeightDtype.INT4)]
)
def test_old_dtypes(old: torch.dtype, new: WoqWeightDtype) -> None:
    with pytest.warns(DeprecationWarning, match=f"use WoqWeightDtype.{new.name}") as caught:
        mapping = get_weight_only_quant_qconfig_mapping(weight_dtype=old)  # type: ignore[arg-type]
    assert caught[0].filename == __file__
    assert mapping == get_weight_only_quant_qconfig_mapping(weight_dtype=new)


def test_comparing_copying_printing() -> None:
    dtypes = (WoqWeightDtype.INT8, WoqWeightDtype.INT4, WoqWeightDtype.NF4)
    made = [
        get_weight_only_quant_qconfig_mapping(weight_dtype=d, group_size=g)
        for d, g in itertools.product(dtypes, (-1, 128))
    ]
    for a, b in itertools.product(made, made):
        assert (a == b) == (a is b)
    for mapping in made:
        again = pickle.loads(pickle.dumps(mapping))
        assert again == mapping == copy.deepcopy(mapping)
        assert again.global_qconfig == mapping.global_qconfig
        assert repr(again) == repr(mapping)
    assert repr(made[1]) == (
        "WoqQConfigMapping(global_qconfig=QConfigWoq(lowp_mode=NONE, act_quant_mode=NONE,"
        " weight_dtype=INT8, group_size=128, cache_weight_for_large_batch=False,"
        " weight_qscheme=ASYMMETRIC))"
    )
    assert made[0] != 3


def test_per_module_entries_work() -> None:
    mapping = get_weight_only_quant_qconfig_mapping()
    other = copy.deepcopy(mapping).set_module_name("lm_head", None)
    assert other != mapping and "lm_head" in repr(other)


def test_every_public_name() -> None:
    for name in ipex_quant.__all__:
        assert getattr(ipex_quant, name) is not None
    assert set(ipex_quant.__all__) <= set(dir(ipex_quant))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = ipex_quant.nothing

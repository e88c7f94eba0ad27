# SPDX-License-Identifier: Apache-2.0
"""Configurations of INT8 quantization with IPEX's names: static, dynamic and SmoothQuant.

They are made of the observers of ``torch.ao.quantization``, so any other observer of it can be put in their place.
"""

from __future__ import annotations

import copy
import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.ao.quantization.observer import (
    HistogramObserver,
    PerChannelMinMaxObserver,
    PlaceholderObserver,
)

from ipex_core.library.spec import check

__all__ = [
    "AutoAlpha",
    "QConfigSmoothQuant",
    "default_dynamic_qconfig",
    "default_dynamic_qconfig_mapping",
    "default_static_qconfig",
    "default_static_qconfig_mapping",
    "get_smooth_quant_qconfig_mapping",
]

_WEIGHT = PerChannelMinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_channel_symmetric)

#: Activations per tensor, with the range of their histogram; weights per output channel, symmetric.
default_static_qconfig = QConfig(
    activation=HistogramObserver.with_args(reduce_range=False), weight=_WEIGHT
)
default_static_qconfig_mapping = QConfigMapping().set_global(default_static_qconfig)

#: Activations get the scale of each row as they come; weights per output channel.
default_dynamic_qconfig = QConfig(
    activation=PlaceholderObserver.with_args(dtype=torch.float, is_dynamic=True), weight=_WEIGHT
)
default_dynamic_qconfig_mapping = QConfigMapping().set_global(default_dynamic_qconfig)

Observers = Callable[[], Any]


class AutoAlpha(NamedTuple):
    """How alpha is searched, with IPEX's names.

    ``alpha_min`` to ``alpha_max`` in steps of ``alpha_step`` are tried; another alpha than ``init_alpha`` has to be
    better than it. For layers that share one activation, ``shared_criterion`` takes the alpha of the least mean error,
    or the least (``"min"``) or largest (``"max"``) of the layers' own. With ``enable_blockwise_loss`` one alpha is
    chosen for all layers of a block, by the error of the block's output.
    """

    init_alpha: float = 0.5
    alpha_min: float = 0.0
    alpha_max: float = 1.0
    alpha_step: float = 0.1
    shared_criterion: str = "mean"
    enable_blockwise_loss: bool = False

    def grid(self) -> list[float]:
        """Return what is tried, ``init_alpha`` first."""
        count = int((self.alpha_max - self.alpha_min) / self.alpha_step + 1e-6) + 1
        tried = [round(self.alpha_min + i * self.alpha_step, 10) for i in range(count)]
        return [self.init_alpha, *(alpha for alpha in tried if alpha != self.init_alpha)]


class QConfigSmoothQuant(NamedTuple):
    """Configuration of SmoothQuant, as `get_smooth_quant_qconfig_mapping` makes it.

    ``activation`` makes the observer of the smoothed activation (None: its exact range), ``weight`` the observer of
    the smoothed weight. ``act_ic_observer`` and ``wei_ic_observer`` make the observers of their input channels.
    ``alpha`` says how much of the difficulty moves to the weights: 0 to 1, ``"auto"``, or a mapping from patterns of
    names to these. With ``share_weight_observers`` linear layers that read one activation use one scale for each
    input channel.
    """

    activation: Observers | None
    weight: Observers
    share_weight_observers: bool = True
    alpha: Any = 0.5
    act_ic_observer: Observers | None = None
    wei_ic_observer: Observers | None = None
    auto: AutoAlpha = AutoAlpha()

    def alpha_of(self, name: str) -> float | str:
        """Return the alpha of one layer."""
        if not isinstance(self.alpha, Mapping):
            return self.alpha
        for pattern, value in self.alpha.items():
            if fnmatch.fnmatchcase(name, pattern):
                return value
        return 0.5


def get_smooth_quant_qconfig_mapping(
    alpha: Any = 0.5,
    act_observer: Observers | nn.Module | None = None,
    act_ic_observer: Observers | nn.Module | None = None,
    wei_observer: Observers | nn.Module | None = None,
    wei_ic_observer: Observers | nn.Module | None = None,
    share_weight_observers: bool = True,
    *,
    auto_alpha_args: Mapping[str, Any] | None = None,
) -> QConfigMapping:
    """Return a mapping that quantizes linear layers after moving outliers of activations into the weights.

    Each input channel j of the activation is multiplied by
    ``(max|W_j| + 1e-6) ** (1 - alpha) / (max|X_j| + 1e-6) ** alpha`` and its weights are divided by it.

    Args:
        alpha: 0 to 1; ``"auto"`` to choose the one with the least error for each layer; or a mapping from names or
            patterns of layers to these (0.5 for layers that it does not have).
        act_observer: Makes the observer of the smoothed activation, or is one that is copied; so are the other three.
            None: its exact range in calibration.
        act_ic_observer: Makes the observer of the activation's channels, one that has ``min_val`` and ``max_val`` along
            the last dimension. None: ``PerChannelMinMaxObserver``.
        wei_observer: Makes the observer of the weight. None: symmetric, per output channel.
        wei_ic_observer: Makes the observer of the weight's input channels, like ``act_ic_observer`` along dimension 1.
        share_weight_observers: Whether layers that read the same activation share its channel scales.
        auto_alpha_args: How ``"auto"`` searches: ``init_alpha``, ``alpha_min``, ``alpha_max``, ``alpha_step``,
            ``shared_criterion`` (``"mean"``, ``"min"``, ``"max"``) and ``enable_blockwise_loss``; see `AutoAlpha`.

    Returns:
        A ``QConfigMapping`` of torch with a `QConfigSmoothQuant` for `torch.nn.Linear` and the default static
        configuration for everything else.

    Raises:
        OpArgumentError: An argument is not as described.
    """
    op = "get_smooth_quant_qconfig_mapping"
    act_observer, act_ic_observer = _maker(act_observer), _maker(act_ic_observer)
    wei_observer, wei_ic_observer = _maker(wei_observer), _maker(wei_ic_observer)
    values = list(alpha.values()) if isinstance(alpha, Mapping) else [alpha]
    for value in values:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        usable = value == "auto" or (number and 0 <= value <= 1)
        check(usable, op, "alpha", "be in [0, 1], 'auto' or a mapping to these", value)
    for name, made in (
        ("act_observer", act_observer),
        ("act_ic_observer", act_ic_observer),
        ("wei_observer", wei_observer),
        ("wei_ic_observer", wei_ic_observer),
    ):
        check(made is None or callable(made), op, name, "make an observer when called", made)
    shared = isinstance(share_weight_observers, bool)
    check(shared, op, "share_weight_observers", "be a bool", share_weight_observers)
    qconfig: Any = QConfigSmoothQuant(
        act_observer,
        wei_observer or _WEIGHT,
        share_weight_observers,
        alpha,
        act_ic_observer,
        wei_ic_observer,
        _auto_alpha(op, auto_alpha_args),
    )
    mapping = QConfigMapping().set_global(default_static_qconfig)
    return mapping.set_object_type(nn.Linear, qconfig)


def _maker(given: Any) -> Any:
    """Return what makes observers; scripts of IPEX hand over observers, which are callable, too."""
    return functools.partial(copy.deepcopy, given) if isinstance(given, nn.Module) else given


def _auto_alpha(op: str, given: Any) -> AutoAlpha:
    name = "auto_alpha_args"
    if given is None:
        return AutoAlpha()
    check(isinstance(given, Mapping), op, name, "be a dict", type(given).__name__)
    unknown = sorted(map(str, set(given) - set(AutoAlpha._fields)))
    check(not unknown, op, name, f"have {', '.join(AutoAlpha._fields)}", unknown)
    auto = AutoAlpha(**given)
    for field in ("init_alpha", "alpha_min", "alpha_max", "alpha_step"):
        value = getattr(auto, field)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        check(number and 0 <= value <= 1, op, f"{name}[{field!r}]", "be in [0, 1]", value)
    between = auto.alpha_min <= auto.alpha_max and auto.alpha_step > 1e-4
    steps = (auto.alpha_min, auto.alpha_max, auto.alpha_step)
    check(between, op, name, "have alpha_min <= alpha_max and a positive alpha_step", steps)
    criterion = auto.shared_criterion
    where = f"{name}['shared_criterion']"
    check(criterion in ("mean", "min", "max"), op, where, "be mean, min or max", criterion)
    whole = auto.enable_blockwise_loss
    check(isinstance(whole, bool), op, f"{name}['enable_blockwise_loss']", "be a bool", whole)
    return auto


def qconfig_of(mapping: QConfigMapping, name: str, module: nn.Module) -> Any:
    """Return the configuration of a module: by its name, a pattern of names, its class, or the global one."""
    if name in mapping.module_name_qconfigs:
        return mapping.module_name_qconfigs[name]
    for pattern, qconfig in mapping.module_name_regex_qconfigs.items():
        if re.match(pattern, name):
            return qconfig
    for parent in _parents(name):
        if parent in mapping.module_name_qconfigs:
            return mapping.module_name_qconfigs[parent]
    kinds: Mapping[Any, Any] = mapping.object_type_qconfigs
    for kind in (type(module), *getattr(module, "stands_for", ())):
        if kind in kinds:
            return kinds[kind]
    return mapping.global_qconfig


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts) - 1, 0, -1)]

# SPDX-License-Identifier: Apache-2.0
"""What `autotune` chooses from: ways to quantize a model, and how each of them is prepared."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfig, QConfigMapping
from torch.ao.quantization.observer import (
    HistogramObserver,
    MinMaxObserver,
    PerChannelMinMaxObserver,
)

from ipex_core.library.spec import check
from ipex_quant.int8.api import _DYNAMIC, _STATIC
from ipex_quant.int8.dataflow import CONVS
from ipex_quant.qconfig.static import (
    default_dynamic_qconfig_mapping,
    get_smooth_quant_qconfig_mapping,
)

log = logging.getLogger("ipex")
_OP = "autotune"
#: IPEX's examples name these; here they are never quantized on their own.
_NEVER_ALONE = frozenset({"add", "relu", "flatten", "matmul", "bmm", "embedding", "layernorm"})


@dataclasses.dataclass(frozen=True)
class Trial:
    """One way to quantize a model.

    Attributes:
        method: ``"static"``, ``"min-max"``, ``"smooth"``, ``"dynamic"`` or ``"as prepared"``.
        alpha: Of SmoothQuant.
        samples: How many samples calibrate it.
        dynamic: Linear layers that are dynamic INT8 although the method is static.
        floats: Layers that stay float.
    """

    method: str
    alpha: float | str | None = None
    samples: int = 0
    dynamic: tuple[str, ...] = ()
    floats: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """A text that only an equal trial has."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @property
    def base(self) -> Trial:
        """The same method with all layers."""
        return dataclasses.replace(self, dynamic=(), floats=())

    @property
    def name(self) -> str:
        """A short text for tables."""
        parts = [self.method if self.alpha is None else f"{self.method} alpha {self.alpha}"]
        parts += [f"{self.samples} samples"] if self.samples else []
        parts += [f"{len(self.dynamic)} dynamic"] if self.dynamic else []
        parts += [f"{len(self.floats)} float"] if self.floats else []
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Criterion:
    """How much accuracy may be lost: a share of it, or so much of it."""

    kind: str
    loss: float

    @staticmethod
    def of(value: Any) -> Criterion:
        """Check what the caller gave."""
        name = "accuracy_criterion"
        what = "be {'relative': loss} or {'absolute': loss}"
        usable = isinstance(value, Mapping) and len(value) == 1
        check(usable and set(value) <= {"relative", "absolute"}, _OP, name, what, value)
        ((kind, loss),) = value.items()
        number = isinstance(loss, (int, float)) and not isinstance(loss, bool)
        most = 1.0 if kind == "relative" else math.inf
        what = "have a loss in [0, 1)" if kind == "relative" else "have a finite loss of 0 or more"
        check(number and 0 <= loss < most, _OP, name, what, loss)
        return Criterion(kind, float(loss))

    def least(self, baseline: float) -> float:
        """Return the least accuracy that is enough."""
        return baseline - (abs(baseline) * self.loss if self.kind == "relative" else self.loss)


def configuration(
    trial: Trial,
    options: Mapping[type[nn.Module], Mapping[str, Any] | None],
    auto_alpha_args: Mapping[str, Any] | None = None,
) -> Any:
    """Return the configuration of `prepare` for the method of a trial.

    Args:
        trial: Its layers do not count.
        options: What the caller wants for some types; None leaves the type float.
        auto_alpha_args: How SmoothQuant searches alpha.
    """
    if trial.method == "dynamic":
        mapping = QConfigMapping().set_global(default_dynamic_qconfig_mapping.global_qconfig)
    elif trial.method == "smooth":
        made = get_smooth_quant_qconfig_mapping(alpha=trial.alpha, auto_alpha_args=auto_alpha_args)
        mapping = QConfigMapping().set_global(made.global_qconfig)
        mapping.set_object_type(nn.Linear, made.object_type_qconfigs[nn.Linear])
    else:
        mapping = QConfigMapping().set_global(_static({}, trial.method))
    for kind, wanted in options.items():
        if wanted is None:
            mapping.set_object_type(kind, None)
        elif trial.method in ("static", "min-max"):
            mapping.set_object_type(kind, _static(wanted, trial.method))
    return mapping


def _static(wanted: Mapping[str, Any], method: str) -> QConfig:
    algorithm = wanted.get("algo") or ("kl" if method == "static" else "minmax")
    observer: Any = HistogramObserver if algorithm == "kl" else MinMaxObserver
    symmetric = {"dtype": torch.qint8, "qscheme": torch.per_tensor_symmetric}
    activation = observer.with_args(**(symmetric if wanted.get("scheme") == "sym" else {}))
    if wanted.get("granularity") == "per_tensor":
        weight: Any = MinMaxObserver.with_args(**symmetric)
    else:
        weight = PerChannelMinMaxObserver.with_args(
            dtype=torch.qint8, qscheme=torch.per_channel_symmetric
        )
    return QConfig(activation=activation, weight=weight)


#: Where a choice stands in ``op_type_dict``, its name, and what it may be.
_CHOICES = {
    ("activation", "algo"): ("algo", ("minmax", "kl")),
    ("activation", "scheme"): ("scheme", ("asym", "sym")),
    ("activation", "granularity"): ("", ("per_tensor",)),
    ("weight", "granularity"): ("granularity", ("per_channel", "per_tensor")),
    ("weight", "scheme"): ("", ("sym",)),
    ("weight", "algo"): ("", ("minmax",)),
}


def type_options(op_type_dict: Any) -> dict[type[nn.Module], dict[str, Any] | None]:
    """Return what ``op_type_dict`` says about each type of layer; None means float.

    Of a list of choices with more than one entry nothing is taken: the search decides.
    """
    found: dict[type[nn.Module], dict[str, Any] | None] = {}
    name = "op_type_dict"
    check(op_type_dict is None or isinstance(op_type_dict, Mapping), _OP, name, "be a dict", "no")
    for key, entry in (op_type_dict or {}).items():
        what = f"{name}[{key!r}]"
        check(isinstance(entry, Mapping), _OP, what, "be a dict", type(entry).__name__)
        wanted: dict[str, Any] = {}
        floating = False
        for part, choices in entry.items():
            usable = part in ("activation", "weight") and isinstance(choices, Mapping)
            check(usable, _OP, what, "have 'activation' and 'weight' with dicts", part)
            for field, values in choices.items():
                listed = [values] if isinstance(values, str) else list(values)
                allowed: tuple[str, ...] = ("fp32", "int8", "uint8")
                if field != "dtype":
                    known = (part, field) in _CHOICES
                    check(known, _OP, what, "have dtype, scheme, granularity or algo", field)
                    allowed = _CHOICES[part, field][1]
                good = bool(listed) and set(listed) <= set(allowed)
                where = f"{what}[{part!r}][{field!r}]"
                check(good, _OP, where, f"have values out of {', '.join(allowed)}", values)
                if field == "dtype":
                    floating |= listed == ["fp32"]
                elif len(listed) == 1 and _CHOICES[part, field][0]:
                    wanted[_CHOICES[part, field][0]] = listed[0]
        for kind in _types(str(key), floating):
            found[kind] = None if floating else wanted
    return found


def _types(name: str, floating: bool) -> tuple[type[nn.Module], ...]:
    kinds: dict[str, tuple[type[nn.Module], ...]] = {"conv": CONVS}
    for kind in {*_STATIC, *_DYNAMIC}:
        kinds[kind.__name__.lower()] = (kind,)
    if name.lower() in _NEVER_ALONE and floating:
        log.info("autotune: %s is not quantized on its own anyway", name)
        return ()
    known = name.lower() in kinds
    check(known, _OP, "op_type_dict", f"have types out of {', '.join(kinds)}", name)
    return kinds[name.lower()]

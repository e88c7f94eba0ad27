# SPDX-License-Identifier: Apache-2.0
"""What `autotune` found out so far, in a file from which it can go on."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ipex_core.errors import OpArgumentError
from ipex_core.util import write_whole
from ipex_quant.tuning.space import Trial

__all__ = ["Result", "State", "fingerprint"]

_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What came out of one trial.

    Attributes:
        trial: What was tried.
        accuracy: What ``eval_func`` gave, or the mean cosine of the outputs; NaN if it was NaN.
        speedup: How many times faster than the float model.
        met: Whether the accuracy is enough.
    """

    trial: Trial
    accuracy: float
    speedup: float
    met: bool


def fingerprint(model: nn.Module, **settings: Any) -> dict[str, Any]:
    """Return what must not change between two runs: the weights and the settings."""
    total = 0
    for name, tensor in model.state_dict().items():
        total = zlib.crc32(name.encode(), total)
        if isinstance(tensor, torch.Tensor):
            data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            total = zlib.crc32(data.numpy().data, total)
    return json.loads(json.dumps({"weights": total, **settings}))


class State:
    """Results by trial, the accuracy of the float model, and the error that each layer makes."""

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        """Read a file if it exists.

        Raises:
            OpArgumentError: The file is damaged or of another model or other settings; the text names the difference.
        """
        self.path, self.settings = path, settings
        self.baseline: float | None = None
        self.noise: dict[str, float] = {}
        self.results: dict[str, tuple[float, float]] = {}
        if path is None or not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known, version = dict(data["settings"]), data["version"]
            baseline, noise = data["baseline"], data["noise"]
            results = {r["trial"]: (_number(r["accuracy"]), r["speedup"]) for r in data["results"]}
            self.baseline = None if baseline is None else float(baseline)
            self.noise = {str(k): float(v) for k, v in noise.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise OpArgumentError(
                f"autotune: state_file must be one that autotune wrote, got {path}: {error!r}"
            ) from error
        others = sorted(k for k in {*known, *settings} if known.get(k) != settings.get(k))
        if others or version != _VERSION:
            raise OpArgumentError(
                f"autotune: state_file must be of the same search, got {path} with other"
                f" {', '.join(others) or 'version'}"
            )
        self.results = results

    def save(self) -> None:
        """Replace the file, completely or not at all."""
        if self.path is None:
            return
        results = [
            {"trial": key, "accuracy": None if math.isnan(a) else a, "speedup": s}
            for key, (a, s) in self.results.items()
        ]
        data = {
            "version": _VERSION,
            "settings": self.settings,
            "baseline": self.baseline,
            "noise": self.noise,
            "results": results,
        }
        write_whole(self.path, json.dumps(data, indent=1) + "\n")


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)

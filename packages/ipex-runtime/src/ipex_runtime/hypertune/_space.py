# SPDX-License-Identifier: Apache-2.0
"""The configurations of a search, without those that this machine cannot run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ipex_runtime.hypertune._yaml import ConfigurationError
from ipex_runtime.hypertune.conf.config import DEFAULTS
from ipex_runtime.launch._libraries import find_library, search_paths
from ipex_runtime.launch.cpu_info import CPUPoolList

__all__ = ["Space"]

LIBRARIES = {"tc": "tcmalloc", "je": "jemalloc"}


class Space:
    """All combinations of the values of parameters.

    Args:
        values: For each parameter its values.
        out: Gets a line about what is left out.

    Raises:
        ConfigurationError: No combination is possible.
    """

    def __init__(self, values: Mapping[str, Sequence[Any]], out: Callable[[str], None]) -> None:
        self.values = {
            name: self._installed(name, list(items), out) for name, items in values.items()
        }
        self.names = list(self.values)
        self._pool = CPUPoolList().pool_all
        self._size = sum(1 for _ in self) if self.product() <= 1_000_000 else self.product()
        if self._size == 0:
            raise ConfigurationError(
                "hypertune: hyperparams.launcher must leave a combination that this machine has cores for "
                f"({len(self._pool)} CPUs), got {dict(values)}"
            )
        left_out = self.product() - self._size
        if left_out:
            out(
                f"{left_out} of {self.product()} combinations need more cores than there are: left out"
            )

    @staticmethod
    def _installed(name: str, values: list[Any], out: Callable[[str], None]) -> list[Any]:
        folders = search_paths()
        if name == "malloc":
            missing = [
                v for v in values if v in LIBRARIES and not find_library(LIBRARIES[v], folders)
            ]
            if missing and len(missing) < len(values):
                out(
                    f"malloc: {', '.join(missing)} left out, not installed (ipexrun --explain tells how)"
                )
                return [v for v in values if v not in missing]
            if missing:
                raise ConfigurationError(
                    f"hypertune: hyperparams.launcher.malloc must have an installed allocator or pt, got {values}"
                )
        if name == "disable_iomp" and len(values) == 2 and not find_library("iomp5", folders):
            out("disable_iomp: False left out, Intel's OpenMP runtime is not installed")
            return [True]
        return values

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for combination in itertools.product(*self.values.values()):
            cfg = dict(zip(self.names, combination, strict=True))
            if self.possible(cfg):
                yield cfg

    def product(self) -> int:
        """Return the number of combinations, possible or not."""
        return math.prod(len(values) for values in self.values.values())

    def size(self) -> int:
        """Return the number of possible combinations."""
        return self._size

    def possible(self, cfg: Mapping[str, Any]) -> bool:
        """Return whether there are enough cores for a combination."""
        full = DEFAULTS | dict(cfg)
        first = min(c.node for c in self._pool)
        pool = [c for c in self._pool if full["use_all_nodes"] or c.node == first]
        cores = len(pool) if full["use_logical_cores"] else len({c.core for c in pool})
        return max(1, full["ncores_per_instance"]) * max(1, full["ninstances"]) <= cores

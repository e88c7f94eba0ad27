# SPDX-License-Identifier: Apache-2.0
"""A dictionary whose items are attributes, too."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ipex_runtime.hypertune._yaml import ConfigurationError, Place, parse
from ipex_runtime.launch.cpu_info import CPUPoolList

__all__ = [
    "Conf",
    "DEFAULTS",
    "DotDict",
    "STRATEGIES",
    "input_str_to_list_int",
    "objectives_of",
    "parse_objective",
]


class DotDict(dict[str, Any]):
    """``d.tuning.strategy`` is ``d["tuning"]["strategy"]``."""

    def __init__(self, value: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, item in (value or {}).items():
            self[name] = DotDict(item) if isinstance(item, Mapping) else item

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"DotDict: no item {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


# --- configuration ----------------------------------------------------------------------------------------------------


STRATEGIES = ("grid", "random", "bayesian")
ALLOCATORS = ("tc", "je", "pt")
ALL_LOGICAL = "all_logical_cores"
ALL_PHYSICAL = "all_physical_cores"

#: What the launcher is told about a parameter that is not tuned; -1 says nothing.
DEFAULTS: dict[str, Any] = {
    "ncores_per_instance": -1,
    "ninstances": -1,
    "use_all_nodes": True,
    "use_logical_cores": False,
    "disable_numactl": False,
    "disable_iomp": False,
    "malloc": "tc",
}

#: Former names of parameters.
RENAMED = {"ncore_per_instance": "ncores_per_instance", "use_logical_core": "use_logical_cores"}

#: More values of one parameter than any machine has CPUs; a typing error must not fill the memory.
MOST_VALUES = 8192


def input_str_to_list_int(data: Any) -> list[int]:
    """Return the numbers of cores that a text means: 1 to all of this process, or the list itself."""
    if data == ALL_LOGICAL:
        return list(range(1, len(CPUPoolList().pool_all) + 1))
    if data == ALL_PHYSICAL:
        return list(range(1, len({c.core for c in CPUPoolList().pool_all}) + 1))
    return list(data)


def default_space(name: str) -> list[Any]:
    """Return the search space of a parameter that has none in the file."""
    pool = CPUPoolList().pool_all
    if name in ("ncores_per_instance", "ninstances"):
        return input_str_to_list_int(ALL_LOGICAL)
    if name == "use_all_nodes":
        return [True, False] if len({c.node for c in pool}) > 1 else [True]
    if name == "use_logical_cores":
        return [True, False] if len({c.core for c in pool}) < len(pool) else [False]
    return list(ALLOCATORS) if name == "malloc" else [True, False]


class Conf:
    """A search: what to run, what to vary and what to optimize.

    Args:
        conf_fpath: The YAML file.
        program_fpath: The script.
        program_args: Its arguments.

    Attributes:
        execution_conf: The settings, with defaults filled in: ``tuning``, ``output_dir`` and ``hyperparams``.
        program: The script.
        program_args: Its arguments.
        usr_objectives: The objectives that the text of the script names; those that it prints count.

    Raises:
        ConfigurationError: The file, a key of it, or an objective is not as documented; names line and key.
    """

    def __init__(
        self, conf_fpath: str | os.PathLike[str], program_fpath: str, program_args: Sequence[str]
    ) -> None:
        self.program = program_fpath
        self.program_args = list(program_args)
        name = os.fspath(conf_fpath)
        if not os.path.isfile(program_fpath):
            raise ConfigurationError(f"hypertune: the script must exist, got {program_fpath!r}")
        try:
            text = Path(name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"hypertune: --conf-file must be a text file that can be read, got {name!r}: {error}"
            ) from error
        self.execution_conf = DotDict(_check(parse(text, name)))
        self.usr_objectives = objectives_of(program_fpath)


def _check(root: Place) -> dict[str, Any]:
    top = root.mapping(("tuning", "output_dir", "hyperparams"))
    folder = top.get("output_dir")
    return {
        "tuning": _tuning(top.get("tuning")),
        "output_dir": os.getcwd()
        if folder is None
        else os.path.expanduser(folder.a(str, "be the path of a folder")),
        "hyperparams": _hyperparams(top.get("hyperparams")),
    }


def _tuning(place: Place | None) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "strategy": "grid",
        "max_trials": 100,
        "trial_timeout": None,
        "seed": 0,
    }
    given = {} if place is None else place.mapping(settings)
    if (name := given.get("strategy")) is not None:
        value = name.a(str, f"be one of {', '.join(STRATEGIES)}").lower()
        if value not in STRATEGIES:
            name.fail(f"be one of {', '.join(STRATEGIES)}")
        settings["strategy"] = value
    for key, least in (("max_trials", 1), ("seed", 0)):
        if (number := given.get(key)) is not None:
            if number.a(int, "be a whole number") < least:
                number.fail(f"be at least {least}")
            settings[key] = number.value
    if (limit := given.get("trial_timeout")) is not None:
        if isinstance(limit.value, bool) or not isinstance(limit.value, (int, float)):
            limit.fail("be a number of seconds")
        if not 0 < limit.value < 1e7:
            limit.fail("be above 0 seconds and below 1e7")
        settings["trial_timeout"] = float(limit.value)
    return settings


def _hyperparams(place: Place | None) -> dict[str, Any]:
    if place is None:
        # As documented for a file without this part: everything is tuned.
        return {
            "launcher": {"hp": list(DEFAULTS)} | {name: default_space(name) for name in DEFAULTS}
        }
    launcher = place.mapping(("launcher",)).get("launcher")
    if launcher is None:
        return {}
    given = launcher.mapping(("hp", *DEFAULTS, *RENAMED))
    for old, new in RENAMED.items():
        if old in given:
            if new in given:
                given[old].fail(f"not stand beside {new}, its new name")
            given[new] = given.pop(old)
    if "hp" not in given:
        launcher.fail("have the key hp, the list of what is tuned", sorted(given))
    hp = [_name(item) for item in given["hp"].a(list, "be a list of parameters")]
    if not hp:
        given["hp"].fail("name at least one parameter")
    if len(set(hp)) < len(hp):
        given["hp"].fail("name each parameter once")
    settings: dict[str, Any] = {"hp": hp}
    for name in hp:
        settings[name] = _space(name, given[name]) if name in given else default_space(name)
    for name, value in DEFAULTS.items():
        if name not in hp:
            if name in given:
                given[name].fail("be in hp, too, or it would have no effect")
            settings[name] = [value]
    return {"launcher": settings}


def _name(place: Place) -> str:
    name = RENAMED.get(place.value, place.value) if isinstance(place.value, str) else None
    if name not in DEFAULTS:
        place.fail(f"be one of {', '.join(DEFAULTS)}")
    return str(name)


def _space(name: str, place: Place) -> list[Any]:
    counts = name in ("ncores_per_instance", "ninstances")
    kinds = "whole numbers" if counts else "tc, je and pt" if name == "malloc" else "true and false"
    names = f" or one of {ALL_LOGICAL}, {ALL_PHYSICAL}" if counts else ""
    if isinstance(place.value, str):
        if not counts or place.value not in (ALL_LOGICAL, ALL_PHYSICAL):
            place.fail(f"be a list of {kinds}{names}")
        return input_str_to_list_int(place.value)
    values = place.a(list, f"be a list of {kinds}{names}")
    if not 0 < len(values) <= MOST_VALUES:
        place.fail(f"have 1 to {MOST_VALUES} values", len(values))
    for item in values:
        value = item.value
        if counts:
            if item.a(int, "be a whole number") < -1 or value == 0:
                item.fail("be a number of at least 1, or -1 for what the launcher chooses")
        elif name == "malloc":
            if value not in ALLOCATORS:
                item.fail(f"be one of {', '.join(ALLOCATORS)}")
        else:
            item.a(bool, "be true or false")
    return list(dict.fromkeys(item.value for item in values))


# -- objectives --------------------------------------------------------------------------------------------------------


def parse_objective(text: str, where: str) -> dict[str, Any]:
    """Return the objective of a text such as ``{'name': 'latency', 'higher_is_better': False, 'target_val': 0}``.

    Raises:
        ConfigurationError: The text is no objective; ``where`` begins the message.
    """
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError) as error:
        raise ConfigurationError(
            f"{where}: @hypertune must be followed by a dict, got {text.strip()[:80]!r}"
        ) from error
    known = {
        "name": (str, "a text"),
        "higher_is_better": (bool, "True or False"),
        "target_val": ((int, float), "a number"),
    }
    if not isinstance(value, dict) or "name" not in value:
        raise ConfigurationError(
            f"{where}: @hypertune must have a dict with a 'name', got {value!r}"
        )
    for key, item in value.items():
        if key not in known:
            raise ConfigurationError(
                f"{where}: unknown key {key!r} of @hypertune; known: {', '.join(known)}"
            )
        kind: Any
        kind, what = known[key]
        if not isinstance(item, kind) or (key == "target_val" and isinstance(item, bool)):
            raise ConfigurationError(f"{where}: {key} of @hypertune must be {what}, got {item!r}")
    higher = value.get("higher_is_better", False)
    # Documented as -inf for both directions: a target that is reached at once must not be the default.
    target = value.get("target_val", float("inf") if higher else -float("inf"))
    return {"name": value["name"], "higher_is_better": higher, "target_val": target}


def objectives_of(script: str) -> list[dict[str, Any]]:
    """Return the objectives that are written in a script as literal prints of ``@hypertune``."""
    try:
        lines = Path(script).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for number, line in enumerate(lines, 1):
        match = re.search(r"""print\(\s*(["']{1,3})@hypertune (\{[^{}]*\})\1\s*[,)]""", line)
        if match and not line.lstrip().startswith("#"):
            found.append(parse_objective(match.group(2), f"{script}, line {number}"))
    return found

# SPDX-License-Identifier: Apache-2.0
"""``mode`` and ``options`` of the backend: Inductor's own, and ours, whose names begin with ``ipex.``."""

from __future__ import annotations

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any, Union, get_args, get_origin

__all__ = ["Options", "read_options"]


@dataclasses.dataclass(frozen=True)
class Options:
    """What a compilation was asked for.

    Attributes:
        disable: ``"ipex.disable"``: names of patterns to leave out, or True for all of them.
        always: ``"ipex.always"``: let patterns fire also where Inductor's own code was measured to be as fast.
        inductor: Patches of Inductor's configuration.
        lean: The mode asks for little cost per call: CUDA graphs on a GPU, calls between kernels in C++ on a CPU.
    """

    disable: frozenset[str] = frozenset()
    always: bool = False
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lean: bool = False


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Check mode and options.

    Raises:
        ValueError: An unknown mode or option, or a value of the wrong type; the text names it.
    """
    import torch._inductor as inductor
    from torch._inductor import config

    patches: dict[str, Any] = {}
    lean = False
    if mode is not None:
        modes = inductor.list_mode_options()
        if not isinstance(mode, str) or mode not in modes:
            raise ValueError(f"compile: mode must be one of {sorted(modes)}, got {mode!r}")
        patches.update((k, v) for k, v in modes[mode].items() if not k.startswith("triton."))
        lean = modes[mode].get("triton.cudagraphs") is True
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"compile: options must be a mapping of names to values, got {options!r}")
    known: dict[str, Any] = config.get_config_copy()
    own: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"compile: names of options must be strings, got {key!r}")
        if key.startswith("ipex."):
            own[key] = value
            continue
        name = key.replace("-", "_")
        if name not in known:
            raise _unknown(key, [*known, *_OWN])
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise ValueError(f"compile: option {key!r} must be a bool, got {value!r}")
        kinds = _kinds(config.get_type(name))  # type: ignore[attr-defined]
        if kinds and not isinstance(value, kinds):
            names = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(f"compile: option {key!r} must be of type {names}, got {value!r}")
        patches[name] = value
    ours = {name: read(own[key]) for key, (name, read) in _own(own)}
    return Options(**ours, inductor=patches, lean=lean)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the classes of an option of Inductor, or nothing if its annotation has more than plain classes."""
    union = get_origin(annotation) in (Union, types.UnionType)
    kinds = get_args(annotation) if union else (annotation,)
    plain = all(isinstance(k, type) and get_origin(k) is None for k in kinds)
    if not plain:
        return ()
    return (*kinds, int) if float in kinds and int not in kinds else kinds


def _own(given: Mapping[str, Any]) -> list[tuple[str, tuple[str, Any]]]:
    for key in given:
        if key not in _OWN:
            raise _unknown(key, list(_OWN))
    return [(key, _OWN[key]) for key in given]


def _unknown(key: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(key, known, n=3)
    hint = f", did you mean {' or '.join(close)}?" if close else ""
    return ValueError(
        f"compile: unknown option {key!r}{hint} (torch._inductor.list_options() lists all of Inductor's,"
        f" ours are {', '.join(_OWN)})"
    )


def _disable(value: Any) -> frozenset[str]:
    from ipex_core.fusion.aten.passes import PATTERNS

    if isinstance(value, bool):
        return frozenset(PATTERNS if value else ())
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or any(
        name not in PATTERNS for name in names
    ):
        raise ValueError(
            f"compile: option 'ipex.disable' must be a bool or some of {', '.join(PATTERNS)}, got {value!r}"
        )
    return frozenset(names)


def _always(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"compile: option 'ipex.always' must be a bool, got {value!r}")
    return value


_OWN: dict[str, tuple[str, Any]] = {
    "ipex.disable": ("disable", _disable),
    "ipex.always": ("always", _always),
}

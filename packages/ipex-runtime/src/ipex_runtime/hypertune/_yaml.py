# SPDX-License-Identifier: Apache-2.0
"""YAML whose values know their lines, so that a mistake can be named with its place."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any, NoReturn

_MOST_VALUES = 100_000


class ConfigurationError(ValueError, RuntimeError):
    """A configuration file is not as documented; old callers expect a RuntimeError."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A value of a YAML file and where it stands.

    Attributes:
        value: The value; mappings and lists contain places.
        file: Name of the file.
        line: Its line, from 1.
        key: The keys that lead to it, joined by dots.
    """

    value: Any
    file: str
    line: int
    key: str = ""

    def fail(self, expected: str, got: Any = None) -> NoReturn:
        """Raise a `ConfigurationError` that names line and key."""
        shown = self.plain() if got is None else got
        where = f"{self.key} must" if self.key else "the file must"
        raise ConfigurationError(
            f"{self.file}, line {self.line}: {where} {expected}, got {shown!r}"
        )

    def plain(self) -> Any:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {name: place.plain() for name, place in self.value.items()}
        if isinstance(self.value, list):
            return [place.plain() for place in self.value]
        return self.value

    def mapping(self, known: Iterable[str]) -> dict[str, Place]:
        """Return the value as a mapping whose keys are all known."""
        names = list(known)
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            self.fail(f"be a mapping with the keys {', '.join(names)}")
        for name, place in self.value.items():
            if name not in names:
                close = difflib.get_close_matches(str(name), names, n=1)
                hint = f" (did you mean {close[0]}?)" if close else ""
                raise ConfigurationError(
                    f"{self.file}, line {place.line}: unknown key {place.key!r}{hint}; known: {', '.join(names)}"
                )
        return self.value

    def a(self, kind: type, expected: str) -> Any:
        """Return the value, which must be of a type; True is no number."""
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            self.fail(expected)
        return self.value


def parse(text: str, file: str) -> Place:
    """Return the content of a YAML file.

    Raises:
        ConfigurationError: It is no YAML, or a key stands in it twice.
        ImportError: PyYAML is not installed.
    """
    try:
        import yaml
    except ImportError as error:
        raise ImportError(
            "hypertune: reading the configuration needs PyYAML: pip install 'ipex-runtime[hypertune]'"
        ) from error
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return Place(None, file, 1) if node is None else _place(loader, node, file, "", [0])
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = error.problem or error.context
        raise ConfigurationError(
            f"{file}, line {line}: must be valid YAML, got: {problem}"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        # An invalid number or date, and lists that are nested without end.
        raise ConfigurationError(f"{file}: must be valid YAML, got: {error}") from error


def _place(loader: Any, node: Any, file: str, key: str, count: list[int]) -> Place:
    import yaml

    line = node.start_mark.line + 1
    # Aliases of aliases make short files that are large.
    count[0] += 1
    if count[0] > _MOST_VALUES:
        raise ConfigurationError(
            f"{file}, line {line}: must have at most {_MOST_VALUES} values, got more"
        )
    if isinstance(node, yaml.MappingNode):
        found: dict[Any, Place] = {}
        for name_node, value_node in node.value:
            at = name_node.start_mark.line + 1
            plain = isinstance(name_node, yaml.ScalarNode)
            name = loader.construct_object(name_node) if plain else None
            if not isinstance(name, str):
                # Lists are not shown: aliases make short ones whose text is endless.
                got = repr(name) if plain else f"a {name_node.id}"
                raise ConfigurationError(f"{file}, line {at}: a key must be a text, got {got}")
            inner = f"{key}.{name}" if key else name
            if name in found:
                raise ConfigurationError(
                    f"{file}, line {at}: the key {inner!r} must be there once, got it twice"
                )
            found[name] = _place(loader, value_node, file, inner, count)
        return Place(found, file, line, key)
    if isinstance(node, yaml.SequenceNode):
        items = [
            _place(loader, item, file, f"{key}[{i}]", count) for i, item in enumerate(node.value)
        ]
        return Place(items, file, line, key)
    return Place(loader.construct_object(node, deep=True), file, line, key)

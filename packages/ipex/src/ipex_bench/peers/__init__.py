# SPDX-License-Identifier: Apache-2.0
"""The engines: the list, in the order of the columns. Those that run the model with torch share a file."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, ClassVar

__all__ = ["BASELINE", "NAMES", "Peer", "load"]

#: Names of the columns; `load` finds the class: ``Engine`` in the file of this name, or a row of `_WITH_TORCH`.
NAMES = (
    "stock_eager",
    "stock_compile",
    "torchao",
    "ipex_eager",
    "ipex_compile",
    "ipex28",
    "openvino",
    "onnxruntime",
    "llama_cpp",
    "zentorch",
)
BASELINE = "stock_eager"

#: Name of an engine in the file ``with_torch``: its class.
_WITH_TORCH = {
    "stock_eager": "StockEager",
    "stock_compile": "StockCompile",
    "torchao": "TorchAO",
    "ipex_eager": "IpexEager",
    "ipex_compile": "IpexCompile",
    "ipex28": "Ipex28",
    "zentorch": "Zentorch",
}


class Peer:
    """An engine. A subclass sets these and prepares tasks.

    Attributes:
        title: The head of its column.
        module: What must be importable, or an empty string.
        install: How to get it.
        kinds: The kinds of tasks that it can do.
        compiles: Whether it needs a compiler to prepare, which takes many times as long as without.
    """

    title: ClassVar[str]
    module: ClassVar[str] = "torch"
    install: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("ops", "models", "llm", "train")
    compiles: ClassVar[bool] = False

    def missing(self) -> str:
        """Return why the engine cannot be loaded here, or an empty string."""
        try:
            found = importlib.util.find_spec(self.module) is not None
        except (ImportError, ValueError):
            found = False
        return "" if found else f"not installed ({self.install or self.module})"

    def version(self) -> str:
        """Return the version, after loading the engine."""
        return str(getattr(importlib.import_module(self.module), "__version__", "?"))

    def prepare(self, task: Any) -> Any:
        """Return the task ready to run, a `Prepared`.

        Raises:
            UnsupportedError: The engine cannot do it.
            Exception: Whatever goes wrong in the engine; the table shows it.
        """
        raise NotImplementedError


def load(name: str) -> Peer:
    """Return the engine of a column."""
    file, kind = ("with_torch", _WITH_TORCH[name]) if name in _WITH_TORCH else (name, "Engine")
    engine: Peer = getattr(importlib.import_module(f".{file}", __name__), kind)()
    return engine

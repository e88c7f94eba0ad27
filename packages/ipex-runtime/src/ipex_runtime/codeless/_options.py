# SPDX-License-Identifier: Apache-2.0
"""What codeless optimization does with models, and its options, for its own command and for the launcher."""

from __future__ import annotations

import argparse
import dataclasses

__all__ = ["DTYPES", "QUANTIZATIONS", "Settings", "add_auto_ipex_params", "as_arguments"]

DTYPES = ("float32", "bfloat16", "float16")
QUANTIZATIONS = ("none", "int8-dynamic", "woq-int8", "woq-int4")


def add_auto_ipex_params(
    parser: argparse.ArgumentParser, auto_ipex_default_enabled: bool = False
) -> None:
    """Add the options to a parser.

    Args:
        parser: The parser.
        auto_ipex_default_enabled: Whether ``--auto-ipex`` is on without being named.
    """
    group = parser.add_argument_group("Codeless optimization")

    def add(name: str, **settings: object) -> None:
        names = dict.fromkeys((name, "--" + name[2:].replace("-", "_")))
        group.add_argument(*names, **settings)  # type: ignore[arg-type]

    add(
        "--auto-ipex",
        action="store_true",
        default=auto_ipex_default_enabled,
        help="optimize the models of a script for inference with ipex, without changing it",
    )
    add("--dtype", choices=DTYPES, default="float32", help="data type of the optimized models")
    add(
        "--auto-ipex-quantization",
        choices=QUANTIZATIONS,
        default="none",
        help="quantize linear layers: activations and weights, or weights only",
    )
    add("--auto-ipex-verbose", action="store_true", help="print what was done, on stderr")
    add("--disable-ipex-graph-mode", action="store_true", help="do not capture models as graphs")


def as_arguments(args: argparse.Namespace) -> list[str]:
    """Return the command line of ``python -m ipex_runtime.codeless`` that says the same."""
    arguments = ["--dtype", args.dtype, "--auto-ipex-quantization", args.auto_ipex_quantization]
    if args.auto_ipex_verbose:
        arguments.append("--auto-ipex-verbose")
    if args.disable_ipex_graph_mode:
        arguments.append("--disable-ipex-graph-mode")
    return arguments


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to do with models.

    Attributes:
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``.
        quantization: ``"none"``, ``"int8-dynamic"``, ``"woq-int8"`` or ``"woq-int4"``.
        graph_mode: Whether to capture models as graphs.
        verbose: Whether to tell what was done; what was left alone is always told.
    """

    dtype: str = "float32"
    quantization: str = "none"
    graph_mode: bool = True
    verbose: bool = False

# SPDX-License-Identifier: Apache-2.0
"""``ipex llm``: generation, benchmark, quantization and a server for model folders."""

from __future__ import annotations

import typer

from ipex_llm.entrypoints.cli.bench import bench
from ipex_llm.entrypoints.cli.folders import make_model, quantize
from ipex_llm.entrypoints.cli.generate import generate
from ipex_llm.entrypoints.cli.serve import serve

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="LLM inference on model folders (Hugging Face layout, safetensors).",
)
app.command()(generate)
app.command()(bench)
app.command()(quantize)
app.command()(serve)
app.command("make-model")(make_model)

# SPDX-License-Identifier: Apache-2.0
"""``ipex llm make-model``: a model folder with random weights, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.common import DTYPES, errors, quiet_transformers

__all__ = ["make_model"]


def make_model(
    folder: Annotated[Path, typer.Argument(help="Folder to make.", show_default=False)],
    shape: Annotated[str, typer.Option(help="tiny, small or 1b.")] = "tiny",
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Make a Llama-shaped model with random weights and a small tokenizer, to try the other commands on.

    It writes nothing that makes sense, but takes as long as a trained model of its shape.
    """
    if DTYPES.get(dtype, ("", ""))[1] is not None:
        raise typer.BadParameter(f"must be bf16, fp16 or fp32, got {dtype!r}", param_hint="--dtype")
    with errors():
        import torch

        from ipex_llm.model_loader.make import make_folder

        quiet_transformers()
        count = make_folder(folder, shape, getattr(torch, DTYPES[dtype][0]), seed)
    make_console().print(f"wrote {folder}: {count / 1e6:,.1f} million parameters", highlight=False)

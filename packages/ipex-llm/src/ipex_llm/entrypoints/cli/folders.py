# SPDX-License-Identifier: Apache-2.0
"""Commands that write a model folder.

``ipex llm quantize`` makes one with quantized weights from one with float weights, ``ipex llm make-model`` one with
random weights, without a download.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ipex_core.util.console import make_console
from ipex_llm.entrypoints.cli.common import (
    DTYPES,
    Model,
    Threads,
    errors,
    quiet_transformers,
    set_threads,
)

if TYPE_CHECKING:
    from ipex_llm.model_loader import quantize as work

__all__ = ["make_model", "quantize"]


def quantize(
    model: Model,
    out: Annotated[Path, typer.Option(help="Folder to write; must not exist.", show_default=False)],
    scheme: Annotated[str, typer.Option(help="int4, int8, nf4, fp8 or mxfp4.")] = "int4",
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Input features that share a scale, -1 for all (default: what is usual for the scheme)."
        ),
    ] = None,
    head: Annotated[bool, typer.Option("--head", help="Quantize the head (lm_head) too.")] = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(help="Regular expression: modules that stay as they are. Can be repeated."),
    ] = None,
    shard_size: Annotated[float, typer.Option(min=0.001, help="Largest file in GiB.")] = 2.0,
    threads: Threads = None,
) -> None:
    """Quantize the linear layers of a model folder.

    Weights are read, quantized and written a few rows at a time: no model is built, and little memory is needed. The
    folder appears when it is complete. If the command is interrupted, the same command goes on where it stopped.
    """
    set_threads(threads)
    console = make_console()
    start = time.monotonic()
    with errors():
        from ipex_llm.kv_cache.paged import format_bytes, peak_memory, resident_memory
        from ipex_llm.model_loader import quantize as work
        from ipex_llm.model_loader.schemes import make_scheme

        columns = (
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("memory {task.fields[memory]}"),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=None, memory="")
            resumed = 0

            def show(progress: work.Progress) -> None:
                nonlocal resumed
                resumed += progress.resumed
                bar.update(
                    task,
                    total=progress.total,
                    completed=progress.done,
                    description=progress.name,
                    memory=format_bytes(resident_memory()),
                )

            summary = work.quantize_folder(
                model,
                out,
                make_scheme(scheme, group_size),
                skip=skip or (),
                head=head,
                shard_bytes=int(shard_size * (1 << 30)),
                on_progress=show,
            )
    if resumed:
        console.print("went on where an earlier run had stopped")
    console.print(
        f"wrote {out}: {summary.quantized} weights quantized, {summary.kept} tensors kept,"
        f" {format_bytes(summary.source_bytes)} -> {format_bytes(summary.result_bytes)},"
        f" {time.monotonic() - start:.1f} s, peak memory {format_bytes(peak_memory())}",
        highlight=False,
    )


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

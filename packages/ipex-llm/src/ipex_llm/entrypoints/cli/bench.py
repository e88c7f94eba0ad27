# SPDX-License-Identifier: Apache-2.0
"""``ipex llm bench``: prefill and decode of a model folder against stock transformers and the memory of the machine."""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from ipex_core.util import write_whole
from ipex_core.util.console import figure_class, make_console, warn_if_busy, writable, written
from ipex_llm.entrypoints.cli.common import (
    DTYPES,
    Dtype,
    GroupSize,
    Model,
    Threads,
    TrustRemoteCode,
    errors,
    load_model,
    load_stock,
    set_threads,
)

#: Bytes that one call reads for the rate of the memory; more than any cache holds.
_READ = 256 << 20

_BITS = {"INT8": 8, "FP8": 8, "INT4": 4, "NF4": 4, "MXFP4": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One batch size and length. Times are medians in milliseconds, ratios medians of paired rounds.

    Attributes:
        limit_percent: Time in which the machine reads weights and cache once, in percent of a decode step.
    """

    batch: int
    prompt: int
    new: int
    dtype: str
    threads: int
    rounds: int
    prefill_ms: float
    decode_ms: float
    tokens_per_s: float
    read_gb_per_s: float
    limit_percent: float
    stock_prefill_ms: float | None = None
    stock_decode_ms: float | None = None
    prefill_ratio: float | None = None
    decode_ratio: float | None = None


def bench(
    model: Model,
    dtype: Dtype = "bf16",
    group_size: GroupSize = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1",
    prompt: Annotated[
        str, typer.Option(help="Lengths of prompts in tokens, separated by commas.")
    ] = "128",
    new: Annotated[int, typer.Option(min=2, help="New tokens to measure decoding with.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Times that everything is measured.")] = 3,
    stock: Annotated[
        bool, typer.Option("--stock/--no-stock", help="Measure stock transformers (eager) too.")
    ] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Write a chart here (needs matplotlib).")
    ] = None,
    threads: Threads = None,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Measure prefill and decode of a model folder, in pairs with the model as transformers runs it.

    Stock runs in the float dtype: bf16 for quantized weights. In each round both run once, in alternating order, and
    the memory is read; ratios are taken within the rounds. "% of limit" is the time that reading weights and cache once
    takes at that rate, as part of a decode step. Exit codes: 0; 1 if a file cannot be written; 2 for bad arguments.
    """
    batches, lengths = _numbers(batch, "--batch"), _numbers(prompt, "--prompt")
    console = make_console()
    set_threads(threads)
    with errors():
        from ipex_quant.util.safetensors import check_model_folder, stored_quantization
        from ipex_quant.weight_only.build import building

        config = check_model_folder(model)
        context = config.get("max_position_embeddings")
        if isinstance(context, int) and max(lengths) + new > context:
            raise ValueError(
                f"bench: prompt and new tokens must fit the context of {context}, got {max(lengths)} and {new}"
            )
        for path, option in ((json_file, "--json"), (plot, "--plot")):
            if path is not None:
                writable(path, option)
        if plot is not None:
            figure_class(plot)
        import torch

        from ipex_core.benchmark import busy

        others = busy()
        float_dtype = getattr(torch, DTYPES[dtype][0])
        quantized = stored_quantization(model, config) is not None
        console.print("loading", highlight=False)
        reference = (
            load_stock(model, float_dtype, trust_remote_code) if stock and not quantized else None
        )
        ours = load_model(model, dtype, group_size, trust_remote_code=trust_remote_code)
    rows = []
    for size in batches:
        for length in lengths:
            console.print(f"batch {size}, prompt {length}", highlight=False)
            with errors(), building(model):
                weights = _weight_bytes(config, dtype, group_size)
                cache = size * (length + new // 2) * _cache_bytes(config, float_dtype.itemsize)
                step = weights + cache
                rows.append(
                    _measure(ours, reference, config, dtype, size, length, new, rounds, step)
                )
    console.print(_table(rows, model.name))
    warn_if_busy(console, others)
    complete = (
        written(json_file, lambda path: write_whole(path, _json(rows, model.name)), console),
        written(plot, lambda path: _draw(path, rows, model.name), console),
    )
    if not all(complete):
        raise typer.Exit(1)


def _json(rows: list[Row], name: str) -> str:
    from ipex_core.benchmark import machine

    results = [dataclasses.asdict(row) for row in rows]
    return json.dumps({"machine": machine(), "model": name, "results": results}, indent=2) + "\n"


def _numbers(text: str, option: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise typer.BadParameter(f"must be positive numbers, got {text!r}", param_hint=option)
    return found


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    return {**config, **(config.get("text_config") or {})}


def _weight_bytes(config: dict[str, Any], dtype: str, group_size: int | None) -> float:
    """Return the bytes of weights that a step reads, estimated from the shapes of a dense decoder with gated MLP."""
    c = _text_config(config)
    hidden, heads = c.get("hidden_size", 0), c.get("num_attention_heads", 1)
    head_dim = c.get("head_dim") or hidden // max(heads, 1)
    kv = (c.get("num_key_value_heads") or heads) * head_dim
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv
    mlp = 3 * hidden * (c.get("intermediate_size") or 4 * hidden)
    count = c.get("num_hidden_layers", 0) * (attention + mlp) + hidden * c.get("vocab_size", 0)
    name, weights = DTYPES[dtype]
    stored = config.get("quantization_config")
    if stored is not None:
        groups: list[dict[str, Any]] = list(stored.get("config_groups", {}).values())
        group = groups[0].get("weights", {}) if groups else stored
        bits, size = group.get("num_bits") or group.get("bits") or 4, group.get("group_size") or -1
    elif weights is not None:
        bits, size = _BITS[weights], group_size or (128 if weights == "INT4" else -1)
    else:
        return count * (4 if name == "float32" else 2)
    return count * (bits / 8 + (4 / size if size > 0 else 0))


def _cache_bytes(config: dict[str, Any], itemsize: int) -> int:
    """Return the bytes of keys and values of one token."""
    c = _text_config(config)
    heads = c.get("num_attention_heads", 1)
    head_dim = c.get("head_dim") or c.get("hidden_size", 0) // max(heads, 1)
    kv = (c.get("num_key_value_heads") or heads) * head_dim
    return 2 * c.get("num_hidden_layers", 0) * kv * itemsize


def _measure(
    ours: Any,
    stock: Any,
    config: dict[str, Any],
    dtype: str,
    batch: int,
    length: int,
    new: int,
    rounds: int,
    step_bytes: float,
) -> Row:
    import torch

    from ipex_core.benchmark import on_huge_pages, paired, ratio

    generator = torch.Generator().manual_seed(0)
    vocab = _text_config(config).get("vocab_size", 2)
    ids = torch.randint(0, vocab, (batch, length), generator=generator)

    def run(model: Any, count: int) -> Callable[[], object]:
        return functools.partial(_generate, model, ids, count)

    memory = on_huge_pages(_READ)
    functions: dict[str, Callable[[], object]] = {"first": run(ours, 1), "all": run(ours, new)}
    if stock is not None:
        functions |= {"stock first": run(stock, 1), "stock all": run(stock, new)}
    functions["read"] = lambda: torch.sum(memory)
    times = paired(functions, seconds=0, min_rounds=rounds, max_rounds=rounds, warmup=1)

    def steps(prefix: str) -> list[float]:
        pairs = zip(times[f"{prefix}first"], times[f"{prefix}all"], strict=True)
        # Never zero or less, however noisy the machine.
        return [max(whole - first, 1e-9) / (new - 1) for first, whole in pairs]

    decode = steps("")
    rate = _READ / statistics.median(times["read"])
    each = statistics.median(decode)
    row = Row(
        batch=batch,
        prompt=length,
        new=new,
        dtype=dtype,
        threads=torch.get_num_threads(),
        rounds=rounds,
        prefill_ms=round(1e3 * statistics.median(times["first"]), 3),
        decode_ms=round(1e3 * each, 3),
        tokens_per_s=round(batch / each, 2),
        read_gb_per_s=round(rate / 1e9, 2),
        limit_percent=round(100 * step_bytes / rate / each, 1),
    )
    if stock is None:
        return row
    stock_decode = steps("stock ")
    return dataclasses.replace(
        row,
        stock_prefill_ms=round(1e3 * statistics.median(times["stock first"]), 3),
        stock_decode_ms=round(1e3 * statistics.median(stock_decode), 3),
        prefill_ratio=round(ratio(times["stock first"], times["first"]).median, 3),
        decode_ratio=round(ratio(stock_decode, decode).median, 3),
    )


def _generate(model: Any, ids: Any, count: int) -> object:
    """Generate exactly so many tokens."""
    import torch

    with torch.inference_mode():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            pad_token_id=0,
        )


def _table(rows: list[Row], name: str) -> Table:
    first = rows[0]
    table = Table(title=f"{name}, {first.dtype}, {first.threads} thread(s)", box=SIMPLE_HEAD)
    compared = first.stock_decode_ms is not None
    names = ["batch", "prompt", "prefill ms", *(["stock ms", "ratio"] if compared else [])]
    names += ["decode ms", *(["stock ms", "ratio"] if compared else []), "tokens/s", "% of limit"]
    for column in names:
        table.add_column(column, justify="right", no_wrap=True)
    for r in rows:
        table.add_row(
            str(r.batch),
            str(r.prompt),
            f"{r.prefill_ms:,.1f}",
            *([f"{r.stock_prefill_ms:,.1f}", f"{r.prefill_ratio:.2f}x"] if compared else []),
            f"{r.decode_ms:,.2f}",
            *([f"{r.stock_decode_ms:,.2f}", f"{r.decode_ratio:.2f}x"] if compared else []),
            f"{r.tokens_per_s:,.1f}",
            f"{r.limit_percent:.0f}",
        )
    table.caption = (
        f"memory read at {statistics.median(r.read_gb_per_s for r in rows):.1f} GB/s in the same rounds; decode over"
        f" {first.new} tokens"
    )
    return table


def _draw(path: Path, rows: list[Row], name: str) -> None:
    figure = figure_class()(figsize=(9, 2.4 + 0.35 * len(rows)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = range(len(rows))
    compared = rows[0].stock_decode_ms is not None
    height = 0.4 if compared else 0.7
    for axes, ours, stock, title in (
        (
            left,
            [1e3 * r.batch * r.prompt / r.prefill_ms for r in rows],
            [1e3 * r.batch * r.prompt / (r.stock_prefill_ms or 1) for r in rows],
            "prefill, tokens/s",
        ),
        (
            right,
            [r.tokens_per_s for r in rows],
            [1e3 * r.batch / (r.stock_decode_ms or 1) for r in rows],
            "decode, tokens/s",
        ),
    ):
        axes.barh([p - height / 2 for p in places], ours, height, color="#2a7f9e", label="ipex")
        if compared:
            axes.barh(
                [p + height / 2 for p in places], stock, height, color="#999999", label="stock"
            )
        axes.set_title(title, fontsize=10)
    left.set_yticks(list(places), [f"batch {r.batch}, {r.prompt}" for r in rows])
    left.invert_yaxis()
    right.legend(loc="best", fontsize=8)
    figure.suptitle(f"{name}, {rows[0].dtype}, {rows[0].threads} thread(s)", fontsize=11)
    figure.savefig(path, dpi=130)

# SPDX-License-Identifier: Apache-2.0
"""Compares `ipex.llm.optimize` with the stock model for every causal language model of transformers.

A small model is made from the configuration class of each one, with random weights, and called with random lengths,
masks, positions and cuts at each depth, in float32:

    python tools/model_families.py --all                      # all classes, a table on standard output
    python tools/model_families.py llama gpt_neo              # some, by their names in transformers
    python tools/model_families.py --all --write TABLE.tsv    # keeps the table, renewed after each class
    python tools/model_families.py --all --jobs 12 --write TABLE.tsv --resume  # 12 processes; goes on where it ended
    python tools/model_families.py --families --patterns 200  # the models of the tests, more calls

A class that takes longer than ``--seconds`` is ended, and its row says so. The exit status is 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "packages" / "ipex-llm" / "tests"))

import patterns  # noqa: E402

#: Relative difference of logits that is rounding; more is, too, where moving weights by their last bit makes it.
TOLERANCE = 1e-4
MEMORY = 8 << 30
#: Numbers for the configurations whose defaults make no model.
_QWEN4: dict[str, Any] = {
    **{"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256},
    **{"indexer_budget": 16, "indexer_compress_ratio": 4, "eos_token_id": 2},
    **{"ple_layer_ids": [1], "ngram_vocab_size_base": 50, "heads_per_ngram": 2},
    **{"split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 2},
}
VALUES: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"logit_scale": 0.25}
    | {"layer_types": ["sliding_attention", "full_attention"] * 20}
    | {
        "rope_parameters": {
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 5e4,
                "mrope_section": [4, 2, 2],
            },
            "full_attention": None,
        }
    },
    "dbrx": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    | {
        "attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_routed_experts": 8, "num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1}
    | {"n_group": 2, "topk_group": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "xmod": {"default_language": "en_XX"},
}
COLUMNS = ("name", "class", "reached", "depth 3", "depth 2", "depth 1", "why")


def causal_models() -> dict[str, str]:
    """Return the classes of causal language models, by the names that transformers has for them."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    found = {}
    for name, value in names.items():
        found[name] = value if isinstance(value, str) else value[0]
    return found


def make(name: str, kind: str) -> Any:
    """Return a small model of a class, made from its default configuration.

    Raises:
        Exception: Whatever the class does not take: defaults that do not fit each other, packages that are missing.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from ipex_llm.optimization.proof.small import small_model

    problem: Exception | None = None
    config = CONFIG_MAPPING[name](**VALUES.get(name, {}))
    # Some classes are for the text part of a configuration, which some with several parts cannot tell.
    for part, unknown in itertools.product((lambda: config, config.get_text_config), (True, False)):
        try:
            given = part()
            model = small_model(getattr(transformers, kind), given, unknown)
            with torch.no_grad():
                model(input_ids=torch.arange(3, 15).unsqueeze(0), use_cache=False)
        except Exception as error:
            problem = error
        else:
            return model
    assert problem is not None
    raise problem


def line(error: BaseException) -> str:
    """Return an error in one line without tabs."""
    text = " ".join(str(error).split())[:110]
    return f"{type(error).__name__}: {text}"


def compare(model: Any, count: int) -> Iterator[dict[str, str]]:
    """Yield the depth that a model reaches, and the worst difference of each depth, as they are known."""
    import ipex_core
    from ipex_llm.optimization import optimize
    from ipex_llm.optimization.proof.small import config_of

    vocab = int(getattr(config_of(model), "vocab_size", 96))
    row = {}
    for depth in (3, 2, 1):
        try:
            fast = optimize(model, depth=depth)
        except Exception as error:
            row[f"depth {depth}"] = "raises"
            row["why"] = line(error)
            yield row
            continue
        found = next(r for r in ipex_core.explain(fast).rows if r.step == "llm")
        reached = 3 if found.done else 2 if found.kernel else 1
        if depth == 3:
            row["reached"] = str(reached)
            row["why"] = "" if reached == 3 else " ".join(found.text.split())[:200]
        if reached < depth and "reached" in row:
            row[f"depth {depth}"] = "-"
            continue
        worst, wrong = 0.0, ""
        for seed in range(count):
            call = patterns.pattern(seed, min(vocab, 96))
            try:
                off = patterns.difference(fast, model, call)
            except Exception as error:
                worst, wrong = float("inf"), f"{call.text}: {line(error)}"
                break
            worst = max(worst, off)
            if not wrong and off > TOLERANCE and off > 2 * patterns.sensitivity(model, call):
                wrong = call.text
        row[f"depth {depth}"] = f"{worst:.0e}"
        if wrong:
            row[f"depth {depth}"] += " WRONG"
            row["why"] = f"depth {depth}: {wrong}"
        yield row


def examine(name: str, kind: str | None, count: int) -> Iterator[dict[str, str]]:
    """Yield the row of one model, the last time when it is whole."""
    row = dict.fromkeys(COLUMNS, "") | {"name": name, "class": kind or ""}
    try:
        if kind is None:
            from families import build

            model = build(name)
        else:
            model = make(name, kind)
    except Exception as error:
        yield row | {"reached": "not run", "why": line(error)}
        return
    for found in compare(model, count):
        yield row | found


def _child(pipe: Any, name: str, kind: str | None, count: int, seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(seconds)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    with torch.no_grad():
        for row in examine(name, kind, count):
            pipe.send(row)


@dataclasses.dataclass
class _Run:
    """A model in a process of its own: some take more memory or time than there is.

    Attributes:
        process: What runs.
        row: What it told last.
        began: When it was started.
    """

    process: Any
    row: dict[str, str]
    began: float

    def end(self, seconds: int) -> dict[str, str]:
        """Wait for the end, and return the row."""
        self.process.join()
        status = self.process.exitcode
        if status:
            why = (
                f"time limit: more than {seconds} s"
                if status == -signal.SIGALRM
                else f"its process ended with status {status}"
            )
            self.row["reached"] = self.row["reached"] or "not run"
            self.row["why"] = "; ".join(filter(None, (why, self.row["why"])))
        return self.row


def sweep(
    models: list[tuple[str, str | None]], count: int, jobs: int, seconds: int
) -> Iterator[tuple[dict[str, str], float]]:
    """Yield the rows of models and the seconds that each took, as they end.

    Args:
        models: Names and classes, as for `examine`.
        count: Calls of each model and depth.
        jobs: Models at a time.
        seconds: Most that a model may take.
    """
    context = multiprocessing.get_context("fork")
    running: dict[Any, _Run] = {}
    waiting = list(reversed(models))
    while waiting or running:
        while waiting and len(running) < jobs:
            name, kind = waiting.pop()
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(send, name, kind, count, seconds))
            process.start()
            send.close()
            row = dict.fromkeys(COLUMNS, "") | {"name": name, "class": kind or ""}
            running[receive] = _Run(process, row, time.monotonic())
        ready: list[Any] = wait(list(running))
        for pipe in ready:
            try:
                running[pipe].row = pipe.recv()
            except EOFError:
                run = running.pop(pipe)
                yield run.end(seconds), time.monotonic() - run.began


def read(path: Path) -> dict[str, dict[str, str]]:
    """Return the rows of a table that was written before, by their names."""
    if not path.exists():
        return {}
    _, *lines = path.read_text(encoding="utf-8").splitlines()
    rows = (dict(zip(COLUMNS, text.split("\t"), strict=True)) for text in lines)
    return {row["name"]: row for row in rows}


def write(path: Path, rows: list[dict[str, str]]) -> None:
    """Write the table; what was there stays if this is interrupted."""
    lines = ["\t".join(COLUMNS), *("\t".join(row[c] for c in COLUMNS) for row in rows)]
    part = path.with_name(f"{path.name}.part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="names of models in transformers")
    parser.add_argument("--all", action="store_true", help="all causal language models")
    parser.add_argument("--families", action="store_true", help="the models of patterns.FAMILIES")
    parser.add_argument("--patterns", type=int, default=24, help="calls of each model and depth")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time, each in a process")
    parser.add_argument("--seconds", type=int, default=180, help="most that one model may take")
    parser.add_argument("--write", type=Path, help="a file for the table")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --write has")
    options = parser.parse_args(arguments)
    if options.resume and options.write is None:
        parser.error("--resume must come with --write TABLE.tsv, the table to go on with")
    if options.jobs < 1 or options.seconds < 1:
        parser.error(
            f"--jobs and --seconds must be 1 or more, got {options.jobs}, {options.seconds}"
        )
    models = causal_models()
    wanted: list[tuple[str, str | None]]
    if options.families:
        wanted = [(name, None) for name in options.names or patterns.FAMILIES]
    else:
        unknown = set(options.names) - set(models)
        if unknown or not (options.names or options.all):
            parser.error(f"give --all, or names of transformers; unknown: {sorted(unknown)}")
        wanted = [(name, models[name]) for name in (models if options.all else options.names)]
    found = read(options.write) if options.resume else {}
    left = [(name, kind) for name, kind in wanted if name not in found]
    order = [*dict.fromkeys([*models, *found, *(name for name, _ in wanted)])]
    for row, took in sweep(left, options.patterns, options.jobs, options.seconds):
        found[row["name"]] = row
        text = "\t".join(row[column] for column in COLUMNS)
        print(f"{text}\t{took:.0f} s", flush=True)
        if options.write:
            write(options.write, [found[name] for name in order if name in found])
    rows = list(found.values())
    wrong = [
        row["name"] for row in rows if any("WRONG" in v or v == "raises" for v in row.values())
    ]
    ran = sum(row["reached"] != "not run" for row in rows)
    print(f"{ran} of {len(rows)} ran, {len(wrong)} wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""Compares `ipex.llm.optimize` with the stock model for every causal language model of transformers.

A small model is made from the configuration class of each one, with random weights, and called with random lengths,
masks, positions and cuts at each depth, in float32:

    python tools/model_families.py --all                      # all classes, a table on standard output
    python tools/model_families.py llama gpt_neo              # some, by their names in transformers
    python tools/model_families.py --all --write TABLE.tsv    # keeps the table
    python tools/model_families.py --families --patterns 200  # the models of the tests, more calls

The exit status is 1 if a number is wrong.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "packages" / "ipex-llm" / "tests"))

import patterns  # noqa: E402

#: Relative difference of logits that is rounding.
TOLERANCE = 1e-3
SECONDS, MEMORY = 180, 8 << 30
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

    from ipex_llm._proof._small import small_model

    problem: Exception | None = None
    config = CONFIG_MAPPING[name]()
    # Some classes are for the text part of a configuration.
    for given, unknown in itertools.product((config, config.get_text_config()), (True, False)):
        try:
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


def compare(model: Any, count: int) -> dict[str, str]:
    """Return the depth that a model reaches, and the worst difference of each depth."""
    import ipex_core
    from ipex_llm._optimize import optimize
    from ipex_llm._proof._small import config_of

    vocab = int(getattr(config_of(model), "vocab_size", 96))
    row = {}
    for depth in (3, 2, 1):
        try:
            fast = optimize(model, depth=depth)
        except Exception as error:
            row[f"depth {depth}"] = "raises"
            row["why"] = line(error)
            continue
        found = next(r for r in ipex_core.explain(fast).rows if r.step == "llm")
        reached = 3 if found.done else 2 if found.kernel else 1
        if depth == 3:
            row["reached"] = str(reached)
            row["why"] = "" if reached == 3 else " ".join(found.text.split())[:200]
        if reached < depth and "reached" in row:
            row[f"depth {depth}"] = "-"
            continue
        worst, at = 0.0, ""
        for seed in range(count):
            call = patterns.pattern(seed, min(vocab, 96))
            try:
                off = patterns.difference(fast, model, call)
            except Exception as error:
                worst, at = float("inf"), f"{call.text}: {line(error)}"
                break
            if off > worst:
                worst, at = off, call.text
        row[f"depth {depth}"] = f"{worst:.0e}"
        if worst > TOLERANCE:
            row[f"depth {depth}"] += " WRONG"
            row["why"] = f"depth {depth}: {at}"
    return row


def examine(name: str, kind: str | None, count: int) -> dict[str, str]:
    """Return the row of one model."""
    row = dict.fromkeys(COLUMNS, "") | {"name": name, "class": kind or ""}
    try:
        if kind is None:
            from families import build

            model = build(name)
        else:
            model = make(name, kind)
    except Exception as error:
        return row | {"reached": "not run", "why": line(error)}
    return row | compare(model, count)


def _child(pipe: Any, name: str, kind: str | None, count: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(SECONDS)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    with torch.no_grad():
        pipe.send(examine(name, kind, count))


def apart(name: str, kind: str | None, count: int) -> dict[str, str]:
    """Return the row of one model, from a process of its own: some take more memory or time than there is."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, name, kind, count))
    process.start()
    send.close()
    try:
        return receive.recv()  # type: ignore[no-any-return]
    except EOFError:
        row = dict.fromkeys(COLUMNS, "")
        why = "its small model takes too much time or memory"
        return row | {"name": name, "class": kind or "", "reached": "not run", "why": why}
    finally:
        process.join()


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("names", nargs="*", help="names of models in transformers")
    parser.add_argument("--all", action="store_true", help="all causal language models")
    parser.add_argument("--families", action="store_true", help="the models of patterns.FAMILIES")
    parser.add_argument("--patterns", type=int, default=24, help="calls of each model and depth")
    parser.add_argument("--write", type=Path, help="a file for the table")
    options = parser.parse_args(arguments)
    models = causal_models()
    wanted: list[tuple[str, str | None]]
    if options.families:
        wanted = [(name, None) for name in patterns.FAMILIES]
    else:
        unknown = set(options.names) - set(models)
        if unknown or not (options.names or options.all):
            parser.error(f"give --all, or names of transformers; unknown: {sorted(unknown)}")
        wanted = [(name, models[name]) for name in (models if options.all else options.names)]
    rows = []
    for name, kind in wanted:
        began = time.monotonic()
        row = apart(name, kind, options.patterns)
        rows.append(row)
        text = "\t".join(row[column] for column in COLUMNS)
        print(f"{text}\t{time.monotonic() - began:.0f} s", flush=True)
    if options.write:
        lines = ["\t".join(COLUMNS), *("\t".join(row[c] for c in COLUMNS) for row in rows)]
        options.write.write_text("\n".join(lines) + "\n", encoding="utf-8")
    wrong = [
        row["name"] for row in rows if any("WRONG" in v or v == "raises" for v in row.values())
    ]
    ran = sum(row["reached"] != "not run" for row in rows)
    print(f"{ran} of {len(rows)} ran, {len(wrong)} wrong: {', '.join(wrong) or 'none'}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

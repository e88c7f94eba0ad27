# SPDX-License-Identifier: Apache-2.0
"""Time a fine-tuning step of BERT-base in bfloat16 (forward, backward, AdamW) against stock PyTorch, paired.

python bert_training.py --threads 2 --batch 8
python bert_training.py --threads 2 --batch 8 --compile     # also torch.compile of the stock model
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from typing import Any

import torch

import ipex
from ipex_core import benchmark

TOKENS = 128


def main() -> None:
    """Print the median time of each candidate and its ratio to ours."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(num_hidden_layers=options.layers)
    model: Any = BertForSequenceClassification(config).train()
    ids = torch.randint(1, 30000, (options.batch, TOKENS))
    labels = torch.randint(0, 2, (options.batch,))
    full = torch.ones_like(ids)
    half = full.clone()  # lengths from 1 to all tokens, evenly: half of it is padding
    for i, row in enumerate(half):
        row[max(1, round(TOKENS * (i + 0.5) / options.batch)) :] = 0

    def step(net: Any, optimizer: Any, mask: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = net(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()

        return run

    def stock(fused: bool | None, compiled: bool, mask: torch.Tensor) -> Callable[[], None]:
        net = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=fused)
        return step(torch.compile(net) if compiled else net, optimizer, mask)

    def ours(unpad: bool, mask: torch.Tensor) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        return step(*ipex.fast_bert(model, torch.bfloat16, optimizer, unpad), mask)

    groups = {
        "full batch": {
            "ipex": ours(False, full),
            "stock": stock(None, False, full),
            "stock, fused=True": stock(True, False, full),
        },
        "half padding": {
            "ipex": ours(True, half),
            "ipex, unpad=False": ours(False, half),
            "stock, fused=True": stock(True, False, half),
        },
    }
    if options.compile:
        groups["full batch"]["stock compile, fused=True"] = stock(True, True, full)
    for title, candidates in groups.items():
        times = benchmark.paired(candidates, seconds=options.seconds, min_rounds=3, warmup=1)
        print(f"{title}: {options.batch} x {TOKENS} tokens, {options.layers} layers")
        for name, values in times.items():
            r = benchmark.ratio(values, times["ipex"])
            median = 1e3 * statistics.median(values)
            print(f"  {name:28} {median:8.0f} ms  {r.median:.2f} ({r.low:.2f}-{r.high:.2f})")


if __name__ == "__main__":
    main()

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
    some = full.clone()  # lengths from 32 upwards, evenly
    for i, row in enumerate(some):
        row[TOKENS - 96 * (i + 1) // options.batch :] = 0
    share = int(some.sum()) / some.numel()

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
        f"{share:.0%} of the tokens present": {
            "ipex": ours(True, some),
            "ipex, unpad=False": ours(False, some),
            "stock, fused=True": stock(True, False, some),
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

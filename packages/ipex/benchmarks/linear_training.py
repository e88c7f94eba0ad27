# SPDX-License-Identifier: Apache-2.0
"""Time the three products of a linear layer in training, on weights that are packed on the way, against stock PyTorch.

Prints a table::

    python linear_training.py --threads 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from ipex_core import benchmark
from ipex_core.nn.training_linear import input_gradient, product, weight_gradient

Tensor = torch.Tensor
WEIGHTS = (256, 256), (768, 768), (3072, 768), (768, 3072)
ROWS = 64, 256, 1024, 4096


def gain(run: Callable[[bool], Tensor], seconds: float) -> str:
    """Return the ratio of stock's time to ours."""
    times = benchmark.paired(
        {"stock": lambda: run(False), "ipex": lambda: run(True)}, seconds=seconds, min_rounds=5
    )
    return f"{benchmark.ratio(times['stock'], times['ipex']).median:.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each number")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("dtype  rows  weight  forward  gradient of the input  gradient of the weight")
    for dtype in (torch.bfloat16, torch.float32):
        for rows in ROWS:
            for n, k in WEIGHTS:
                x, grad, weight = (
                    torch.randn(size).to(dtype) for size in ((rows, k), (rows, n), (n, k))
                )
                bias = torch.zeros(n, dtype=dtype)
                runs: tuple[Callable[[bool], Tensor], ...] = (
                    lambda ours: product(x, weight, bias, ours),  # noqa: B023 - called at once
                    lambda ours: input_gradient(grad, weight, ours),  # noqa: B023
                    lambda ours: weight_gradient(grad, x, ours),  # noqa: B023
                )
                gains = [gain(run, options.seconds) for run in runs]
                print(dtype, rows, f"{n}x{k}", *gains, sep="  ", flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()

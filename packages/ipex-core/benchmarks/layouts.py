# SPDX-License-Identifier: Apache-2.0
"""The convolutions of ResNet-50: channels-last by ipex and by oneDNN, and blocked by oneDNN, in turns.

    python packages/ipex-core/benchmarks/layouts.py --batch 1 16 --threads 2
    python packages/ipex-core/benchmarks/layouts.py --dtypes float32 bfloat16

In a blocked layout 8 or 16 channels of a pixel lie together. The image of each blocked convolution is in that layout
before and its result stays there, as between the layers of a network whose edges alone convert.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Callable

import torch

from ipex_core.benchmark import paired


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Convolutions of one shape.

    Attributes:
        count: How many the network has.
    """

    channels: int
    out: int
    window: int
    stride: int
    size: int
    count: int


LAYERS = tuple(
    Layer(*numbers)
    for numbers in (
        (3, 64, 7, 2, 224, 1),
        (64, 64, 1, 1, 56, 1),
        (64, 64, 3, 1, 56, 3),
        (64, 256, 1, 1, 56, 4),
        (256, 64, 1, 1, 56, 2),
        (256, 128, 1, 1, 56, 1),
        (128, 128, 3, 2, 56, 1),
        (128, 512, 1, 1, 28, 4),
        (256, 512, 1, 2, 56, 1),
        (512, 128, 1, 1, 28, 3),
        (128, 128, 3, 1, 28, 3),
        (512, 256, 1, 1, 28, 1),
        (256, 256, 3, 2, 28, 1),
        (256, 1024, 1, 1, 14, 6),
        (512, 1024, 1, 2, 28, 1),
        (1024, 256, 1, 1, 14, 5),
        (256, 256, 3, 1, 14, 5),
        (1024, 512, 1, 1, 14, 1),
        (512, 512, 3, 2, 14, 1),
        (512, 2048, 1, 1, 7, 3),
        (1024, 2048, 1, 2, 14, 1),
        (2048, 512, 1, 1, 7, 2),
        (512, 512, 3, 1, 7, 2),
    )
)
NAMES = ("ipex", "oneDNN", "blocked")


def convolutions(
    layer: Layer, batch: int, dtype: torch.dtype
) -> tuple[dict[str, Callable[[], object]], float]:
    """Return what computes the layer, by name, and its floating-point operations."""
    window, stride, padding = ([n, n] for n in (layer.window, layer.stride, layer.window // 2))
    one = [1, 1]
    x = torch.randn(batch, layer.channels, layer.size, layer.size).to(dtype)
    x = x.to(memory_format=torch.channels_last)
    shape = list(x.shape)
    weight = torch.randn(layer.out, layer.channels, *window).to(dtype)
    bias = torch.randn(layer.out).to(dtype)
    ops = torch.ops
    rows = weight.permute(0, 2, 3, 1).reshape(layer.out, -1).contiguous()
    packed = ops.ipex.pack_linear_weight(rows)
    last = weight.contiguous(memory_format=torch.channels_last)
    reordered = ops.mkldnn._reorder_convolution_weight(last, padding, stride, one, 1, shape)
    reorder = torch._C._nn.mkldnn_reorder_conv2d_weight
    blocked = reorder(weight.to_mkldnn(), padding, stride, one, 1, shape)
    image = x.contiguous().to_mkldnn()
    if layer.channels > 3:  # a convolution leaves its result in the layout that it likes
        same = torch.eye(layer.channels).to(dtype)[:, :, None, None].to_mkldnn()
        same = reorder(same, [0, 0], one, one, 1, shape)
        image = torch.mkldnn_convolution(image, same, None, [0, 0], one, one, 1)
    wide = bias.to_mkldnn()
    found: dict[str, Callable[[], torch.Tensor]] = {
        "ipex": lambda: ops.ipex.convolution(
            x, packed, layer.out, window, stride, padding, one, bias, None, "none", 1
        ),
        "oneDNN": lambda: ops.mkldnn._convolution_pointwise(
            x, reordered, bias, padding, stride, one, 1, "none", [], ""
        ),
        "blocked": lambda: torch.mkldnn_convolution(image, blocked, wide, padding, stride, one, 1),
    }
    return dict(found), 2.0 * found["ipex"]().numel() * layer.channels * layer.window**2


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--dtypes", nargs="+", default=["float32"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=1.0, help="for one shape (1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    heads = [f"{unit}: {name}" for unit in ("ms", "GFLOP/s") for name in NAMES]
    print("| dtype | batch | " + " | ".join(heads) + " |")
    with torch.inference_mode():
        for dtype, batch in itertools.product(arguments.dtypes, arguments.batch):
            total, work = dict.fromkeys(NAMES, 0.0), 0.0
            for layer in LAYERS:
                functions, operations = convolutions(layer, batch, getattr(torch, dtype))
                times = paired(functions, seconds=arguments.seconds)
                work += operations * layer.count
                for name in NAMES:
                    total[name] += statistics.median(times[name]) * layer.count
            cells = [f"{1e3 * total[name]:.1f}" for name in NAMES]
            cells += [f"{work / total[name] / 1e9:.0f}" for name in NAMES]
            print(f"| {dtype} | {batch} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Precompiled models beside eager execution, programs of torch.compile, and OpenVINO, in turns in one process.

    python packages/ipex-core/benchmarks/precompiled.py --threads 8
    python packages/ipex-core/benchmarks/precompiled.py --models minilm-1 bert-1 --engines precompiled openvino

The models have the shapes of known ones and random weights. Needs transformers; openvino if that engine is named.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from ipex_core import precompile
from ipex_core.compile_backend import ipex_backend

Example = tuple[nn.Module, tuple[Tensor, ...]]
Run = Callable[[], Any]
ENGINES = ("precompiled", "eager", "program", "compile", "openvino")


def _encoder(hidden: int, layers: int, heads: int, batch: int) -> Example:
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * hidden,
    )
    ids = torch.randint(0, 1000, (batch, 128))
    return transformers.BertModel(config), (ids, torch.ones_like(ids))


def _image(kind: str, batch: int, side: int = 224) -> Example:
    config = getattr(transformers, f"{kind}Config")()
    task = "SemanticSegmentation" if kind == "Segformer" else "ImageClassification"
    model = getattr(transformers, f"{kind}For{task}")(config)
    return model, (torch.randn(batch, 3, side, side),)


def _speech() -> Example:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=512, encoder_layers=6, encoder_attention_heads=8, encoder_ffn_dim=2048
    )
    return WhisperEncoder(config), (torch.randn(1, 80, 3000),)


MODELS: dict[str, Callable[[], Example]] = {
    "resnet50-1": lambda: _image("ResNet", 1),
    "resnet50-16": lambda: _image("ResNet", 16),
    "minilm-1": lambda: _encoder(384, 6, 12, 1),
    "minilm-32": lambda: _encoder(384, 6, 12, 32),
    "bert-1": lambda: _encoder(768, 12, 12, 1),
    "bert-8": lambda: _encoder(768, 12, 12, 8),
    "vit-1": lambda: _image("ViT", 1),
    "convnext-1": lambda: _image("ConvNext", 1),
    "segformer-1": lambda: _image("Segformer", 1, 512),
    "whisper-1": _speech,
}


def _openvino(model: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype, threads: int) -> Run:
    import openvino

    converted = openvino.convert_model(model, example_input=args if len(args) > 1 else args[0])
    converted.reshape({i: openvino.PartialShape(list(a.shape)) for i, a in enumerate(args)})
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "INFERENCE_PRECISION_HINT": "bf16" if dtype == torch.bfloat16 else "f32",
        "ENABLE_CPU_PINNING": False,
    }
    request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    arrays = {i: a.numpy() for i, a in enumerate(args)}
    return lambda: request.infer(arrays, share_inputs=True)


def _run(
    engine: str, model: nn.Module, args: tuple[Tensor, ...], dtype: torch.dtype, threads: int
) -> Run:
    if engine == "openvino":
        return _openvino(model, args, dtype, threads)
    model = model.to(dtype)
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    call: Any = model
    if engine == "precompiled":
        call = precompile(model, args)
    elif engine == "program":
        call = torch.compile(model, backend=ipex_backend, options={"ipex.program": True})
    elif engine == "compile":
        torch._inductor.config.freezing = True
        call = torch.compile(model)
    return lambda: call(*args)


def measure(runs: dict[str, Run], seconds: float, calls: int = 3) -> dict[str, float]:
    """Return the median time of a call in ms; the engines take turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
        run()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(next(iter(times.values()))) < 5:
        for name, run in runs.items():
            run()  # the caches of another engine are behind it
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    """Measure and print one line a model and dtype."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["precompiled", "eager"])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=5.0, help="for one model and dtype (5)")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    torch.set_grad_enabled(False)
    for name in asked.models:
        for dtype in (getattr(torch, text) for text in asked.dtypes):
            runs, ready = {}, {}
            # OpenVINO converts the float32 model, before it is cast.
            for engine in sorted(asked.engines, key=lambda engine: engine != "openvino"):
                torch.manual_seed(0)
                model, args = MODELS[name]()
                start = time.perf_counter()
                runs[engine] = _run(engine, model.eval(), args, dtype, asked.threads)
                runs[engine]()
                ready[engine] = time.perf_counter() - start
            found = measure(runs, asked.seconds)
            cells = "  ".join(
                f"{engine} {found[engine]:.2f} ms (ready in {ready[engine]:.1f} s)"
                for engine in asked.engines
            )
            print(f"{name} {str(dtype).removeprefix('torch.')}: {cells}", flush=True)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Through which files of ours a call runs: ``python tools/house_paths.py`` prints each path, file by file.

The second call of each kind is watched, with small models on the CPU: the first one imports and registers. Only
functions in the thread of the caller are seen, and no code that is generated at run time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from house_rooms import ARROWS

__all__ = ["PATHS", "Watch", "llama", "measured", "start"]


class Watch:
    """Records which functions of ours run.

    Attributes:
        functions: ``file:function`` -> number of calls, in the order of the first call.
        depth: The deepest stack of our functions.
    """

    def __init__(self) -> None:
        specs = [importlib.util.find_spec(name) for name in ARROWS]
        folders = {str(Path(spec.origin).parent.parent) for spec in specs if spec and spec.origin}
        self._starts = tuple(
            (f"{folder}/{name}/", len(folder) + 1) for folder in folders for name in ARROWS
        )
        self._names: dict[str, str] = {}
        self._depth = 0
        self.functions: dict[str, int] = {}
        self.depth = 0

    def _name(self, path: str) -> str:
        """Return the path of a file of ours below its ``src``, or an empty string."""
        known = self._names.get(path)
        if known is None:
            known = next((path[cut:] for start, cut in self._starts if path.startswith(start)), "")
            self._names[path] = known
        return known

    def _profile(self, frame: FrameType, event: str, argument: object) -> None:
        if event not in {"call", "return"}:
            return
        code = frame.f_code
        name = self._name(code.co_filename)
        if not name:
            return
        if event == "return":
            self._depth -= 1
            return
        self._depth += 1
        self.depth = max(self.depth, self._depth)
        key = f"{name}:{code.co_name}"
        self.functions[key] = self.functions.get(key, 0) + 1

    def __call__(self, function: Callable[[], Any]) -> Any:
        """Call a function and record what it runs."""
        self._depth = 0
        sys.setprofile(self._profile)
        try:
            return function()
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> list[str]:
        """Files of ours in the order of their first call."""
        return list(dict.fromkeys(key.partition(":")[0] for key in self.functions))


def _op() -> Iterator[Callable[[], Any]]:
    import torch

    import ipex_core  # noqa: F401  (gives torch the ops)

    x, weight = torch.randn(4, 64), torch.ones(64)
    while True:
        yield lambda: torch.ops.ipex.rms_norm(x, weight, 1e-6)


def _blocks() -> Any:
    import torch
    from torch import nn

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512))

    torch.manual_seed(0)
    return nn.Sequential(block(), block()).eval()


def _optimize() -> Iterator[Callable[[], Any]]:
    import torch

    import ipex

    while True:
        model = _blocks()
        yield partial(ipex.optimize, model, dtype=torch.float32)


def _optimize_forward() -> Iterator[Callable[[], Any]]:
    import torch

    import ipex

    model = ipex.optimize(_blocks(), dtype=torch.float32)
    x = torch.randn(4, 512)
    while True:
        yield lambda: model(x)


def _restore() -> Iterator[Callable[[], Any]]:
    import torch

    import ipex

    while True:
        model = ipex.optimize(_blocks(), dtype=torch.float32)
        yield partial(ipex.restore, model)


def llama(width: int) -> Any:
    """Return Llama of two layers with random weights, in inference mode."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2 * width,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=width,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.eval()


def _llm_optimize() -> Iterator[Callable[[], Any]]:
    import torch

    llm: Any = importlib.import_module("ipex.llm")
    while True:
        model = llama(64)
        yield partial(llm.optimize, model, dtype=torch.float32)


def _llm_forward() -> Iterator[Callable[[], Any]]:
    import torch

    llm: Any = importlib.import_module("ipex.llm")
    model = llm.optimize(llama(64), dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    while True:
        yield lambda: model(ids)


def _llm_generate() -> Iterator[Callable[[], Any]]:
    import torch

    llm: Any = importlib.import_module("ipex.llm")
    model = llm.optimize(llama(64), dtype=torch.float32)
    ids = torch.tensor([[1, 2, 3]])
    while True:
        yield lambda: model.generate(ids, max_new_tokens=2, min_new_tokens=2, do_sample=False)


def _compile() -> Iterator[Callable[[], Any]]:
    import torch
    from torch import nn

    x = torch.randn(4, 512)
    while True:
        torch._dynamo.reset()
        model = torch.compile(nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), backend="ipex")
        yield partial(model, x)


def _compiled_call() -> Iterator[Callable[[], Any]]:
    import torch
    from torch import nn

    torch._dynamo.reset()
    x = torch.randn(4, 512)
    model = torch.compile(nn.Sequential(nn.Linear(512, 512), nn.ReLU()).eval(), backend="ipex")
    model(x)
    while True:
        yield lambda: model(x)


def _floats() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval()


def _prepare() -> Iterator[Callable[[], Any]]:
    import torch

    quantization: Any = importlib.import_module("ipex.quantization")
    x = torch.randn(4, 64)
    qconfig = quantization.default_static_qconfig_mapping
    while True:
        model = _floats()
        yield partial(quantization.prepare, model, qconfig, example_inputs=x)


def _convert() -> Iterator[Callable[[], Any]]:
    import torch

    quantization: Any = importlib.import_module("ipex.quantization")
    x = torch.randn(4, 64)
    while True:
        model = quantization.prepare(
            _floats(), quantization.default_static_qconfig_mapping, example_inputs=x
        )
        model(x)
        yield partial(quantization.convert, model)


#: Name of a path -> its calls: an endless row, of which the second is watched.
PATHS: dict[str, Callable[[], Iterator[Callable[[], Any]]]] = {
    "op": _op,
    "optimize": _optimize,
    "optimize_forward": _optimize_forward,
    "restore": _restore,
    "llm_optimize": _llm_optimize,
    "llm_forward": _llm_forward,
    "llm_generate": _llm_generate,
    "compile": _compile,
    "compiled_call": _compiled_call,
    "prepare": _prepare,
    "convert": _convert,
}


def watched(name: str) -> Watch:
    """Run one path twice in this process and return what the second call runs."""
    import torch

    watch = Watch()
    with torch.no_grad():
        calls = PATHS[name]()
        next(calls)()
        call = next(calls)
        watch(call)
    return watch


def start() -> subprocess.Popen[str]:
    """Begin to measure all paths, in a process of its own; `measured` waits for it."""
    command = [sys.executable, __file__, "--json"]
    # One thread: what runs does not depend on their number, and a busy machine is not made busier.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)


def measured(process: subprocess.Popen[str] | None = None) -> dict[str, list[str]]:
    """Return the files of all paths, each in the order of their first call.

    Args:
        process: What `start` returned; a new one is started without it.
    """
    process = process or start()
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(
            f"{process.args!r} must end with status 0, got {process.returncode}:\n{errors}"
        )
    found: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    return found


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="*", metavar="PATH", help=f"of {', '.join(PATHS)}")
    parser.add_argument("--json", action="store_true", help="print files only, as one line of JSON")
    parser.add_argument("--functions", action="store_true", help="print functions, too")
    options = parser.parse_args(arguments)
    if unknown := set(options.paths) - set(PATHS):
        parser.error(f"PATH must be of {', '.join(PATHS)}, got {', '.join(sorted(unknown))}")
    found = {name: watched(name) for name in options.paths or PATHS}
    if options.json:
        print(json.dumps({name: watch.files for name, watch in found.items()}))
        return 0
    for name, watch in found.items():
        calls = sum(watch.functions.values())
        print(
            f"{name}: {len(watch.files)} files, {len(watch.functions)} functions, {calls} calls,"
            f" depth {watch.depth}"
        )
        for file in watch.files:
            print(f"  {file}")
            for key, number in watch.functions.items() if options.functions else ():
                if key.startswith(f"{file}:"):
                    print(f"    {key.partition(':')[2]} {number}")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))

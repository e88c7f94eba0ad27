# SPDX-License-Identifier: Apache-2.0
"""The rooms of the house: which files belong to which subject of a wheel, lowest layer first.

A room imports only rooms that stand above it in this table, and rooms of wheels that its own wheel may import.
"""

from __future__ import annotations

import dataclasses
import functools

__all__ = ["ARROWS", "HOUSE", "Room", "room_of"]


@dataclasses.dataclass(frozen=True)
class Room:
    """One subject of a wheel.

    Attributes:
        name: The folder or file, without the name of the wheel; "" is the wheel's own ``__init__``.
        subject: What it holds, in a few words.
        modules: Names of modules without that of the wheel. A name covers what lies in its folder; ``*`` at the end
            covers all that begin so. The longest name that fits decides.
    """

    name: str
    subject: str
    modules: tuple[str, ...]


def _room(name: str, subject: str, modules: str) -> Room:
    return Room(name, subject, tuple(modules.split()))


#: Wheel -> wheels that it may import. All arrows point to core; the facade alone knows everybody.
ARROWS: dict[str, tuple[str, ...]] = {
    "ipex_core": (),
    "ipex_cpu_kernels": ("ipex_core",),
    "ipex_xpu_kernels": ("ipex_core",),
    "ipex_quant": ("ipex_core",),
    "ipex_llm": ("ipex_core", "ipex_quant"),
    "ipex_runtime": (),
    "ipex": (
        *("ipex_core", "ipex_cpu_kernels", "ipex_xpu_kernels", "ipex_quant", "ipex_llm"),
        "ipex_runtime",
    ),
}

HOUSE: dict[str, tuple[Room, ...]] = {
    "ipex_core": (
        _room("errors", "exceptions, version", "errors _version"),
        _room("util", "files, console, memory, names of arguments", "util"),
        _room("config", "environment variables and what they switch", "config"),
        _room("kernels", "providers, ISA levels, thresholds", "kernels"),
        _room("library", "OpSpec, checks, derivatives", "library _spec"),
        _room("packing", "packed weights: dense, INT8, weight-only, experts", "packing woq"),
        _room("ops", "specifications of ops, by families", "ops"),
        _room("module_swap", "optimized layers in place of the user's, and back", "module_swap"),
        _room("nn", "optimized layers, nn.functional", "nn"),
        _room("optim", "fused optimizers", "optim"),
        _room("distributed", "collectives", "distributed"),
        _room("program", "lists of op calls run at once", "program"),
        _room("amp", "autocast", "amp"),
        _room("metrics", "scores", "metrics"),
        _room("fusion", "patterns of the three frontends", "fusion"),
        _room("jit", "fusion of TorchScript graphs", "jit"),
        _room("optimization", "ipex.optimize and restore", "optimization _optimize"),
        _room("precompiled", "models as programs, their files", "precompiled recording"),
        _room("compile", "backend of torch.compile", "compile_backend compiler"),
        _room("exporter", "ipex.export", "exporter"),
        _room("diagnostics", "doctor, explain", "diagnostics"),
        _room("benchmark", "timing of ops", "benchmark"),
        _room("testing", "checks for authors of kernels", "testing"),
        _room("bert", "fast_bert", "bert"),
        _room("", "public names", "__init__"),
    ),
    "ipex_cpu_kernels": (
        _room("native", "loading of the libraries", "_native _choice _version"),
        _room("", "registration", "__init__"),
    ),
    "ipex_xpu_kernels": (
        _room("runtime", "SYCL libraries", "_load _sycl _onednn _version"),
        _room("device", "the device xpu in torch", "*"),
        _room(
            *("kernels", "calls of kernels"),
            "_kernel _launch _attention _cache _choice _experts _int8 _optim _recurrence _woq _fallback "
            "_times _ipex_ops _inline",
        ),
        _room("", "registration", "__init__ _autoload"),
    ),
    "ipex_quant": (
        _room("util", "safetensors, JSON, folders", "util _version"),
        _room("qconfig", "configurations", "qconfig"),
        _room("weight", "one quantized weight, primitives, layouts", "weight"),
        _room("formats", "weights of other tools", "formats"),
        _room("weight_only", "weight-only layers, GPTQ, AWQ, checkpoints", "weight_only linear"),
        _room("int8", "prepare and convert", "int8"),
        _room("fp8", "FP8 training", "fp8"),
        _room("kv_cache", "scales of cached keys and values", "kv_cache"),
        _room("tuning", "search for the fastest INT8 form", "tuning"),
        _room("io", "save and load", "io"),
        _room("", "public names", "__init__"),
    ),
    "ipex_llm": (
        _room("records", "what is kept on objects of the user", "records _version"),
        _room("arch", "structure of a decoder, found by probing", "arch"),
        _room("distributed", "tensor parallelism, sharded checkpoints", "distributed"),
        _room("kv_cache", "paged cache", "kv_cache"),
        _room("model_runner", "weights, programs, runner", "model_runner"),
        _room("generation", "generation loops", "generation"),
        _room("patch", "mixins of decoders and layers", "patch"),
        _room("optimization", "ipex.llm.optimize", "optimization"),
        _room("engine", "continuous batching", "engine"),
        _room("model_loader", "model folders", "model_loader utils"),
        _room("entrypoints", "commands and server", "entrypoints"),
        _room("functional", "functions of IPEX", "functional"),
        _room("modules", "modules of IPEX", "modules"),
        _room("integrations", "transformers, vLLM", "integrations quantization"),
        _room("", "public names", "__init__"),
    ),
    "ipex_runtime": (
        _room("topology", "cores and memory of the machine", "topology _sysfs _cgroup _lists"),
        _room("pools", "pinned threads, tasks, streams", "*"),
        _room("codeless", "optimize without changing a script", "codeless"),
        _room("launch", "launcher", "launch"),
        _room("hypertune", "search for settings of a program", "hypertune"),
        _room("commands", "commands of ipex", "_commands"),
        _room("", "public names", "__init__"),
    ),
    "ipex": (
        _room("cli", "the command ipex, the migration table", "ipex_cli __main__"),
        _room("compat", "names of IPEX", "intel_extension_for_pytorch compat cpu utils"),
        _room("ipex_bench", "benchmark and demo", "ipex_bench"),
        _room("", "public names", "__init__ _version"),
    ),
}


@functools.cache
def room_of(wheel: str, module: str) -> str | None:
    """Return the name of the room of a module, or None if no row names it.

    Args:
        wheel: Import name, such as ``ipex_core``.
        module: Full name of the module, such as ``ipex_core.nn._leaf``.
    """
    name = "__init__" if module == wheel else module.removeprefix(f"{wheel}.")
    best: tuple[int, str | None] = (-1, None)
    for room in HOUSE.get(wheel, ()):
        for row in room.modules:
            start = row.rstrip("*")
            fits = name.startswith(start) if row.endswith("*") else f"{name}.".startswith(f"{row}.")
            best = max(best, (len(start), room.name), key=lambda pair: pair[0]) if fits else best
    return best[1]

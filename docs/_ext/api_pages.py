# SPDX-License-Identifier: Apache-2.0
"""The reference of the public Python names, from ``ipex.__all__``."""

from __future__ import annotations

import inspect
from types import ModuleType

import torch

import ipex
import ipex_core.amp
import ipex_core.benchmark
import ipex_core.config
import ipex_core.diagnostics.explain
import ipex_core.distributed
import ipex_core.errors
import ipex_core.jit
import ipex_core.library
import ipex_core.nn.functional
import ipex_core.nn.modules.merged_embeddingbag
import ipex_core.optim.tpp
import ipex_core.program
import ipex_core.testing
import ipex_core.woq
import ipex_llm.engine
import ipex_llm.functional
import ipex_llm.generation
import ipex_llm.integrations
import ipex_llm.modules
import ipex_llm.modules.utils
import ipex_llm.quantization
import ipex_llm.utils
import ipex_quant
import ipex_quant.fp8
import ipex_quant.int8.api
import ipex_quant.int8.modules.linear
import ipex_quant.kv_cache
import ipex_quant.qconfig.static
import ipex_quant.qconfig.weight_only
import ipex_quant.weight.primitives
import ipex_quant.weight_only.checkpoint
import ipex_quant.weight_only.linear
import ipex_runtime.codeless
import ipex_runtime.cpupool
import ipex_runtime.launch
import ipex_runtime.memory
import ipex_runtime.multi_stream
import ipex_runtime.runtime_utils
import ipex_runtime.task
import ipex_runtime.topology
from ipex_core.diagnostics.doctor import Report

__all__ = ["pages"]


def pages() -> dict[str, str]:
    """Return the pages by file name."""
    return {
        "api.md": user_page(),
        "authors.md": author_page(),
        "engine.md": engine_page(),
        "llm.md": llm_page(),
        "nn.md": layers_page(),
        "quantization.md": quantization_page(),
        "runtime.md": runtime_page(),
    }


def user_page() -> str:
    """Return the reference of ``import ipex``."""
    functions: list[str] = []
    classes: list[str] = []
    constants: list[str] = []
    for name in sorted(ipex.__all__, key=str.lower):
        value = getattr(ipex, name)
        if name.startswith("__"):
            continue
        if isinstance(value, ModuleType):
            # A module that can be called: the function of its name is what the call does.
            if callable(value):
                functions += entry(value.__name__, name, getattr(value, name))
            continue
        if inspect.isclass(value) or callable(value):
            (classes if inspect.isclass(value) else functions).extend(entry("ipex", name, value))
        else:
            constants.append(f"| `ipex.{name}` | `{value!r}` |")
    errors: list[str] = []
    for name in ipex_core.errors.__all__:
        errors += [f".. autoexception:: ipex_core.errors.{name}", "   :show-inheritance:", ""]
    lines = [
        "# Python reference",
        "",
        "What `import ipex` offers, generated from the docstrings.",
        "",
    ]
    for name, value in (
        ("ipex_core.diagnostics.doctor", Report),
        ("ipex_core.diagnostics.explain", ipex_core.diagnostics.explain.Explanation),
    ):
        classes += entry(name, value.__name__, value)
    lines += section("Functions", functions) + section("Classes", classes)
    lines += section("Configuration: `ipex.config`", members(ipex_core.config, ipex))
    if constants:
        lines += ["## Constants", "", "| Name | Value |", "|---|---|", *constants, ""]
    lines += section("Errors", errors)
    return "\n".join(lines)


def author_page() -> str:
    """Return the reference for those who add ops or kernels."""
    lines = ["# For authors of ops and kernels", ""]
    lines += [
        "What an op's specification is made of, and the checks that a kernel package can use.",
        "",
    ]
    for title, module in (
        ("Specifications: `ipex_core.library`", ipex_core.library),
        ("Tests: `ipex_core.testing`", ipex_core.testing),
        ("Measurements: `ipex_core.benchmark`", ipex_core.benchmark),
        ("Quantized weights: `ipex_core.woq`", ipex_core.woq),
        ("Programs: `ipex_core.program`", ipex_core.program),
    ):
        lines += section(title, members(module))
    return "\n".join(lines)


def llm_page() -> str:
    """Return the reference of the functions and modules for language models."""
    lines = ["# Language models: reference", ""]
    lines += [
        "`ipex.llm`, generated from the docstrings; [Language models](../llm.md) and"
        " [functions and modules](../llm_functions.md) show it at work.",
        "",
    ]
    lines += section(
        "Models: `ipex.llm`", members(ipex_llm, ipex_llm.engine, ipex_llm.integrations)
    )
    for title, module in (
        ("With transformers: `ipex.llm.integrations`", ipex_llm.integrations),
        ("Loops of generation: `ipex.llm.generation`", ipex_llm.generation),
        ("Functions: `ipex.llm.functional`", ipex_llm.functional),
        ("Modules: `ipex.llm.modules`", ipex_llm.modules),
        ("Look-up: `ipex.llm.modules.utils`", ipex_llm.modules.utils),
    ):
        lines += section(title, members(module))
    return "\n".join(lines)


def layers_page() -> str:
    """Return the reference of layers, functions, optimizers and what surrounds them."""
    lines = ["# Layers, functions, optimizers: reference", ""]
    lines += [
        "Generated from the docstrings; [Recommendation models](../recommendation.md), [Detection](../detection.md),"
        " [Training](../training.md), [Mixed precision](../amp.md), [Which graph path](../graph_paths.md) and"
        " [Several processes](../distributed.md) show them at work.",
        "",
    ]
    tables = ipex_core.nn.modules.merged_embeddingbag
    for title, body in (
        ("Layers: `ipex.nn.modules`", members(ipex_core.nn.modules, tables, ipex_quant)),
        ("Embedding tables: `ipex.nn.modules.merged_embeddingbag`", members(tables)),
        ("Functions: `ipex.nn.functional`", members(ipex_core.nn.functional)),
        ("Optimizers: `ipex.optim`", members(ipex_core.optim, torch.optim)),
        ("Optimizers of IPEX's scripts: `ipex.optim.tpp`", members(ipex_core.optim.tpp)),
        ("Mixed precision: `ipex.amp`", members(ipex_core.amp)),
        ("TorchScript: `ipex.jit`", members(ipex_core.jit, ipex)),
        ("Several processes: `ipex.distributed`", members(ipex_core.distributed)),
    ):
        lines += section(title, body)
    return "\n".join(lines)


def engine_page() -> str:
    """Return the reference of the engine."""
    lines = ["# The engine: reference", ""]
    lines += [
        "`ipex.llm.Engine` and what it takes and gives, generated from the docstrings;"
        " [the user page](../serving.md) shows them at work.",
        "",
    ]
    lines += section("`ipex_llm.engine`", members(ipex_llm.engine))
    return "\n".join(lines)


def quantization_page() -> str:
    """Return the reference of quantization."""
    lines = ["# Quantization: reference", ""]
    lines += [
        "`ipex.quantization`, and what `ipex.llm` has for quantized checkpoints, generated from the docstrings;"
        " [INT8](../static_int8.md), [FP8](../fp8.md) and [Weight-only quantization](../weight_only.md) show them at"
        " work.",
        "",
    ]
    int8 = [
        *members(ipex_quant.int8.api),
        *entry("ipex_quant", "autotune", ipex_quant.autotune),
        *members(ipex_quant.qconfig.static),
        *members(ipex_quant.int8.modules.linear),
        *entry("ipex_quant", "Int8Conv", ipex_quant.Int8Conv),
        *entry("ipex_quant", "MatMul", ipex_quant.MatMul),
        *entry("ipex_quant", "Int8MatMul", ipex_quant.Int8MatMul),
    ]
    models = [
        *entry("ipex_quant", "quantize_linears", ipex_quant.quantize_linears),
        *entry("ipex_quant", "combine_linears", ipex_quant.combine_linears),
        *entry("ipex_quant", "gptq", ipex_quant.gptq),
        *entry("ipex_quant", "awq", ipex_quant.awq),
        *entry("ipex_quant", "save", ipex_quant.save),
        *entry("ipex_quant", "save_torchao", ipex_quant.save_torchao),
        *entry("ipex_quant", "load", ipex_quant.load),
    ]
    gguf = entry("ipex_quant", "read_gguf", ipex_quant.read_gguf)
    weight = entry("ipex_quant", "QuantizedWeight", ipex_quant.QuantizedWeight)
    for title, body in (
        ("INT8", int8),
        ("FP8: `ipex.quantization.fp8`", members(ipex_quant.fp8)),
        ("Weight-only configurations", members(ipex_quant.qconfig.weight_only)),
        ("Models", models),
        ("Layers", members(ipex_quant.weight_only.linear)),
        ("Weights", weight + members(ipex_quant.weight.primitives)),
        ("Checkpoints", members(ipex_quant.weight_only.checkpoint) + gguf),
        ("Caches of keys and values", members(ipex_quant.kv_cache)),
        ("Model folders: `ipex.llm.utils`", members(ipex_llm.utils)),
        ("Other libraries: `ipex.llm.quantization`", members(ipex_llm.quantization, ipex_quant)),
    ):
        lines += section(title, body)
    # What a layer computes, saves and shows is in its base class.
    layer = ".. autoclass:: ipex_quant.weight_only.linear.WeightOnlyQuantizedLinear\n   :members:"
    return "\n".join(lines).replace(layer, f"{layer}\n   :inherited-members: Module")


def runtime_page() -> str:
    """Return the reference of the runtime."""
    lines = ["# Runtime: reference", ""]
    lines += [
        "`ipex.runtime`, generated from the docstrings; [Cores, pools and streams](../runtime.md),"
        " [Launcher](../launcher.md) and [Codeless optimization](../codeless.md) show it at work.",
        "",
    ]
    for title, body in (
        ("Pools and pins", members(ipex_runtime.cpupool)),
        ("Tasks", members(ipex_runtime.task)),
        ("Streams", members(ipex_runtime.multi_stream)),
        ("Topology: `ipex.runtime.topology`", members(ipex_runtime.topology)),
        ("Memory", members(ipex_runtime.memory)),
        ("Helpers", members(ipex_runtime.runtime_utils)),
        ("Launcher: `ipex_runtime.launch`", members(ipex_runtime.launch, ipex_runtime.cpupool)),
        ("Codeless optimization: `ipex_runtime.codeless`", members(ipex_runtime.codeless)),
    ):
        lines += section(title, body)
    return "\n".join(lines)


def members(module: ModuleType, *elsewhere: ModuleType) -> list[str]:
    """Return the directives of a module's public functions and classes, without those that another page part has."""
    body: list[str] = []
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, ModuleType) or any(hasattr(other, name) for other in elsewhere):
            continue
        if callable(value):
            body += entry(module.__name__, name, value)
    return body


def entry(module: str, name: str, value: object) -> list[str]:
    """Return the autodoc directive of one object."""
    if inspect.isclass(value):
        return [f".. autoclass:: {module}.{name}", "   :members:", ""]
    return [f".. autofunction:: {module}.{name}", ""]


def section(title: str, body: list[str]) -> list[str]:
    """Return a titled block of reStructuredText, or nothing."""
    return [f"## {title}", "", "```{eval-rst}", *body, "```", ""] if body else []

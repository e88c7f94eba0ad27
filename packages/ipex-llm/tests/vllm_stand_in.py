# SPDX-License-Identifier: Apache-2.0
"""Modules in the place of vLLM, made from the recorded interfaces of one of its versions; see tools/vllm_record.py.

Classes have the recorded methods, which raise: a test that passes runs our methods. What our code reads besides
(enumerations, tables, registries) is written here.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.metadata
import inspect
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

RECORD = Path(__file__).parent / "integrations" / "vllm_interfaces.json"
VERSIONS: tuple[str, ...] = tuple(json.loads(RECORD.read_text()))
KERNELS = "vllm.model_executor.kernels.linear"
#: The modules of the plug-in that import vLLM, and are made for each stand-in.
OURS = tuple(
    f"ipex_llm.integrations.vllm.{name}"
    for name in (
        *("cpu_platform", "attention", "quantized", "ray_executor", "worker"),
        "whole_step",
    )
)


class Stated(Exception):
    """A method of vLLM ran that is only recorded."""


def signature(parameters: list[str]) -> inspect.Signature:
    """Return the signature that a record describes."""
    kinds = {"**": inspect.Parameter.VAR_KEYWORD, "*": inspect.Parameter.VAR_POSITIONAL}
    made = []
    for text in parameters:
        stars = text[: len(text) - len(text.lstrip("*"))]
        kind = kinds.get(stars, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        if not stars and any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in made):
            kind = inspect.Parameter.KEYWORD_ONLY
        default = None if text.endswith("=") else inspect.Parameter.empty
        made.append(inspect.Parameter(text.strip("*="), kind, default=default))
    return inspect.Signature(made)


def recorded(path: str, parameters: list[str]) -> Any:
    """Return a function with a recorded signature that raises `Stated`."""

    def function(*args: Any, **kwargs: Any) -> Any:
        raise Stated(path)

    function.__name__ = path.rpartition(".")[2]
    function.__signature__ = signature(parameters)  # type: ignore[attr-defined]
    return function


def recorded_class(name: str, methods: dict[str, list[str] | None]) -> type:
    """Return a class with the recorded methods."""
    members: dict[str, Any] = {
        method: recorded(f"{name}.{method}", parameters)
        for method, parameters in methods.items()
        if parameters is not None and method != "__init__"
    }
    made = type(name, (), members)
    # Some are generic.
    made.__class_getitem__ = classmethod(lambda cls, _: cls)  # type: ignore[attr-defined]
    return made


class Config(types.SimpleNamespace):
    """A configuration of vLLM with what our code reads of it."""


@dataclasses.dataclass
class CacheConfig:
    """What the user says about the cache."""

    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92


def vllm_config(**options: Any) -> Config:
    """Return a configuration; ``options`` replace parts of it."""
    text = types.SimpleNamespace(tie_word_embeddings=False)
    parts = {
        "cache_config": CacheConfig(),
        "scheduler_config": Config(max_num_seqs=4),
        "parallel_config": Config(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size_local=1,
            local_world_size=1,
            nnodes=1,
            worker_cls="auto",
            distributed_executor_backend="mp",
        ),
        "lora_config": None,
        "speculative_config": None,
        "model_config": Config(hf_text_config=text),
        "compilation_config": Config(mode=None, backend=""),
    }
    return Config(**{**parts, **options})


class ScalarType(enum.Enum):
    """Types of quantized weights."""

    uint4 = "uint4"
    uint4b8 = "uint4b8"
    uint8 = "uint8"
    uint8b128 = "uint8b128"
    float6_e3m2f = "float6_e3m2f"


class PlatformEnum(enum.Enum):
    """Kinds of platforms."""

    CPU = 1
    CUDA = 2


class MoeBackend(enum.Enum):
    """Kinds of experts."""

    CPU = 1
    TRITON = 2


def _details(modules: dict[str, types.ModuleType], config: Config, cpu: bool) -> None:
    """Fill in what is no recorded signature."""
    backend = modules["vllm.v1.attention.backend"]
    backend.AttentionType = types.SimpleNamespace(  # type: ignore[attr-defined]
        DECODER="decoder",
        ENCODER="encoder",
        ENCODER_ONLY="encoder_only",
        ENCODER_DECODER="encoder_decoder",
    )

    def keep(
        self: Any, kv_cache_spec: Any, layer_names: Any, vllm_config: Any, device: Any
    ) -> None:
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    backend.AttentionMetadataBuilder.__init__ = keep  # type: ignore[attr-defined]
    backend.MultipleOf.__init__ = lambda self, base: setattr(self, "base", base)  # type: ignore[attr-defined]
    modules["vllm.v1.kv_cache_interface"].KVCacheLayout = types.SimpleNamespace(LBHNC="LBHNC")  # type: ignore[attr-defined]
    platform = modules["vllm.platforms.cpu"].CpuPlatform  # type: ignore[attr-defined]

    def choose_worker(cls: Any, vllm_config: Any) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"

    platform.check_and_update_config = classmethod(choose_worker)
    platform.is_cpu = lambda self: cpu
    modules["vllm.config"].get_current_vllm_config_or_none = lambda: config  # type: ignore[attr-defined]

    def named(self: Any, c: Any, *names: Any) -> None:
        self.config = c
        if names and not isinstance(names[0], str):
            self.layer_param_names = names[0]
        elif names:
            self.w_q_name, self.w_s_name, self.w_zp_name = (*names, None)[:3]

    mixed = modules[f"{KERNELS}.mixed_precision.MPLinearKernel"]
    scaled = modules[f"{KERNELS}.scaled_mm.ScaledMMLinearKernel"]
    mixed.MPLinearKernel.__init__ = named  # type: ignore[attr-defined]
    scaled.Int8ScaledMMLinearKernel.__init__ = named  # type: ignore[attr-defined]
    block = modules[f"{KERNELS}.scaled_mm.BlockScaledMMLinearKernel"].Fp8BlockScaledMMLinearKernel  # type: ignore[attr-defined]
    block.__init__ = named
    block._get_layer_params = lambda self, layer, **kwargs: types.SimpleNamespace(
        weight=layer.weight,
        weight_scale_inv=layer.weight_scale_inv,
        weight_scale=None,
        WEIGHT="weight",
    )
    tables = modules[KERNELS]
    for name in ("", "_INT8", "_FP8", "_FP8_BLOCK", "_WFP8A16"):
        setattr(tables, f"_POSSIBLE{name}_KERNELS", {PlatformEnum.CPU: [f"vLLM's{name}"]})
    oracle = modules["vllm.model_executor.layers.fused_moe.oracle.unquantized"]
    oracle.UnquantizedMoeBackend = MoeBackend  # type: ignore[attr-defined]
    oracle.backend_to_kernel_cls = lambda backend: [f"vLLM's {backend.name}"]  # type: ignore[attr-defined]

    def experts(self: Any, moe_config: Any, quant_config: Any) -> None:
        self.moe_config, self.quant_config = moe_config, quant_config

    cpu_moe = modules["vllm.model_executor.layers.fused_moe.experts.cpu_moe"]
    cpu_moe.kInt4Static = types.SimpleNamespace(dtype="int4")  # type: ignore[attr-defined]
    fp8 = modules["vllm.model_executor.layers.fused_moe.oracle.fp8"]
    fp8.Fp8MoeBackend = MoeBackend  # type: ignore[attr-defined]
    for name in ("Unquantized", "Int4", "Int8", "Mxfp4", "Fp8"):
        class_name = f"CPU{name}Experts" if name == "Unquantized" else f"CPUExperts{name}"
        getattr(cpu_moe, class_name).__init__ = experts

    def configured(self: Any, vllm_config: Any) -> None:
        self.vllm_config, self.cache_config = vllm_config, vllm_config.cache_config
        self.parallel_config = vllm_config.parallel_config

    modules["vllm.v1.worker.cpu_worker"].CPUWorker.__init__ = configured  # type: ignore[attr-defined]
    embedding = modules["vllm.model_executor.layers.vocab_parallel_embedding"]
    embedding.UnquantizedEmbeddingMethod.embedding = (  # type: ignore[attr-defined]
        lambda self, layer, input_: nn.functional.embedding(input_, layer.weight)
    )


def install(
    monkeypatch: Any,
    minor: str = VERSIONS[-1],
    *,
    cpu: bool = True,
    config: Config | None = None,
    without: tuple[str, ...] = (),
) -> dict[str, types.ModuleType]:
    """Put the stand-in of a minor version in ``sys.modules`` and return its modules.

    Args:
        monkeypatch: Takes it away again.
        minor: A version of the record.
        cpu: What the platform says it is.
        config: The current configuration.
        without: Modules that cannot be imported.
    """
    table = json.loads(RECORD.read_text())[minor]
    contents: dict[str, dict[str, Any]] = {
        module: {
            name: recorded_class(name, value)
            if isinstance(value, dict)
            else recorded(f"{module}.{name}", value)
            for name, value in names.items()
            if value is not None
        }
        for module, names in table.items()
    }
    contents["vllm.scalar_type"] = {"scalar_types": ScalarType}
    backends = types.SimpleNamespace(CPU_MLA="CPU_MLA")
    contents["vllm.v1.attention.backends.registry"] = {"AttentionBackendEnum": backends}
    contents["vllm.platforms"] = {"PlatformEnum": PlatformEnum}
    contents.setdefault(KERNELS, {})
    for name in list(contents):
        while name := name.rpartition(".")[0]:
            contents.setdefault(name, {})
    modules = {}
    for name, values in contents.items():
        module = modules[name] = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
    for name, module in modules.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    _details(modules, config or vllm_config(), cpu)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, None if name in without else module)
    for name in OURS:
        package, _, child = name.rpartition(".")
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.delattr(importlib.import_module(package), child, raising=False)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda n: f"{minor}.0" if n == "vllm" else version(n)
    )
    monkeypatch.setattr(importlib.metadata, "requires", lambda n: [])
    return modules


def use_our_platform(modules: dict[str, types.ModuleType]) -> Any:
    """Make the platform of the plug-in the current one, and return it."""
    ours = importlib.import_module("ipex_llm.integrations.vllm.cpu_platform").IpexPlatform()
    modules["vllm.platforms"].current_platform = ours  # type: ignore[attr-defined]
    return ours


def layer_of(**tensors: Any) -> nn.Module:
    """Return a layer with parameters that may have attributes: ``name=(tensor, {attribute: value})``."""
    layer = nn.Module()
    for name, value in tensors.items():
        tensor, attributes = value if isinstance(value, tuple) else (value, {})
        parameter = nn.Parameter(tensor, requires_grad=False)
        for attribute, of in attributes.items():
            setattr(parameter, attribute, of)
        layer.register_parameter(name, parameter)
    return layer


def words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return int32 words of codes along a dimension, the first code in the lowest bits."""
    each = 32 // bits
    grouped = codes.long().unflatten(dim, (-1, each))
    shifts = torch.arange(0, 32, bits).view(
        [-1 if d == dim + 1 else 1 for d in range(grouped.dim())]
    )
    total = (grouped << shifts).sum(dim + 1)
    return torch.where(total >= 2**31, total - 2**32, total).int()


def ours(name: str) -> Any:
    """Return a module of the plug-in, imported now: after `install`, so that it finds the stand-ins."""
    return importlib.import_module(f"ipex_llm.integrations.vllm.{name}")

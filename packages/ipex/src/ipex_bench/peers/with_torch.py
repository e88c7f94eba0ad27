# SPDX-License-Identifier: Apache-2.0
"""Engines that run the model with torch: stock PyTorch, this project, the original IPEX, torchao, zentorch."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import Any

import torch

from .. import workloads
from ..task import Prepared, Task, UnsupportedError
from ..torch_work import GROUP, Change, Step, generator, inference, prepare, training
from . import Peer

__all__ = [
    "IpexCompile",
    "IpexEager",
    "Ipex28",
    "StockCompile",
    "StockEager",
    "TorchAO",
    "Zentorch",
]


class StockEager(Peer):
    """Eager mode."""

    title = "stock eager"

    def prepare(self, task: Task) -> Prepared:
        """Cast the model and run it."""
        note = task.float_dtype if task.dtype in {"int8", "int4"} else ""
        return prepare(task, note=note)


class StockCompile(Peer):
    """Inductor."""

    title = "stock compile"
    compiles = True

    def prepare(self, task: Task) -> Prepared:
        """Compile the model as it is."""
        import torch._inductor.config as inductor

        inductor.freezing = task.kind != "train"
        return prepare(task, compile_with=torch.compile)


class IpexEager(Peer):
    """Eager ipex."""

    title = "ipex eager"
    module = "ipex"

    def prepare(self, task: Task) -> Prepared:
        """Optimize the model."""
        import ipex

        return with_ipex(task, ipex)

    def version(self) -> str:
        """Return the version of the facade."""
        from ipex._version import __version__

        return __version__


class IpexCompile(IpexEager):
    """Compiled ipex."""

    title = "ipex compile"
    compiles = True

    def prepare(self, task: Task) -> Prepared:
        """Compile the stock model with our backend."""

        if task.dtype in {"int8", "int4"}:
            raise UnsupportedError("quantized models run eagerly; see the column of ipex eager")
        if task.kind == "train":
            import ipex

            return with_ipex(task, ipex, compile_with=torch.compile)

        def compiled(model: Any) -> Any:
            return torch.compile(model, backend="ipex")

        return prepare(task, compile_with=compiled)


class Ipex28(Peer):
    """The original."""

    title = "IPEX 2.8"
    module = "intel_extension_for_pytorch"
    install = (
        "an environment with torch==2.8 and intel-extension-for-pytorch, and --env ipex28=PYTHON"
    )

    def missing(self) -> str:
        """Return why not; our own module of the same name does not count."""
        try:
            version = importlib.metadata.version("intel_extension_for_pytorch")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        return "" if version.startswith("2.8") else f"not installed ({self.install})"

    def version(self) -> str:
        """Return the version."""
        return importlib.metadata.version("intel_extension_for_pytorch")

    def prepare(self, task: Task) -> Prepared:
        """Optimize the model as its documentation says: inside autocast, traced and frozen for inference."""
        import intel_extension_for_pytorch as original

        return with_ipex(task, original, traced=True)


class TorchAO(Peer):
    """Quantization by torchao. It has no other form, so it runs int8 where the others run floating point."""

    title = "torchao"
    compiles = True
    module = "torchao"
    install = "pip install torchao"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Quantize the linear layers and compile."""
        if task.dtype == "float32":
            raise UnsupportedError("torchao quantizes: compare it with --dtype bfloat16 or int8")
        import torch._inductor.config as inductor
        from torchao import quantization as ao

        # The only one of its int4 forms that runs on a CPU.
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

        inductor.freezing = True
        int4 = task.kind == "llm" and task.dtype == "int4"

        def quantize(model: Any) -> Any:
            if int4:
                config = PrototypeInt4WeightOnlyConfig(group_size=GROUP, set_inductor_config=False)
            elif task.kind == "llm":
                config = ao.Int8WeightOnlyConfig()
            else:
                config = ao.Int8DynamicActivationInt8WeightConfig()
            before = _linears(model)
            ao.quantize_(model, config)
            if not before:
                raise UnsupportedError("the model has no linear layer to quantize")
            return model

        return prepare(
            task, change=quantize, compile_with=torch.compile, precision="int4" if int4 else "int8"
        )


def _linears(model: Any) -> int:

    return sum(isinstance(m, torch.nn.Linear) for m in model.modules())


class Zentorch(Peer):
    """zentorch."""

    title = "zentorch"
    compiles = True
    module = "zentorch"
    install = "pip install zentorch, of the version of torch"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Compile the model with its backend."""
        import zentorch  # noqa: F401  (registers the backend)

        if task.dtype in {"int8", "int4"}:
            raise UnsupportedError("only its floating point path is covered here")

        def compiled(model: Any) -> Any:
            return torch.compile(model, backend="zentorch")

        return prepare(task, compile_with=compiled)


# -- The calls of IPEX: ours and the original take the same ones ------------------------------------------------------


def with_ipex(
    task: Task, ipex: Any, *, traced: bool = False, compile_with: Change | None = None
) -> Prepared:
    """Return a task ready to run.

    Args:
        task: The task.
        ipex: The module, ours or the original.
        traced: Do as the original wants it: autocast around the model, then trace and freeze.
        compile_with: Compiles the model of a training step.
    """
    if task.kind == "train":
        return _train(task, ipex, compile_with)
    if task.kind == "llm":
        return _generate(task, ipex, traced)
    half = task.dtype == "bfloat16"
    model = workloads.load(task)
    example = tuple(torch.from_numpy(a) for a in task.inputs().values())
    precision = task.float_dtype
    if task.dtype == "int8":
        model, precision = _dynamic(ipex, model, example), "int8"
    else:
        model = ipex.optimize(model, dtype=torch.bfloat16 if half else None)

    def around() -> Any:
        return (
            torch.autocast("cpu", dtype=torch.bfloat16)
            if traced and half
            else contextlib.nullcontext()
        )

    if traced:
        with torch.no_grad(), around():
            model = torch.jit.trace(model, example, strict=False, check_trace=False)
            model = torch.jit.freeze(model)
            for _ in range(2):
                model(*example)
    return inference(task, model, precision, context=around)


def _dynamic(ipex: Any, model: Any, example: tuple[torch.Tensor, ...]) -> Any:
    quantization = ipex.quantization
    configuration = quantization.default_dynamic_qconfig_mapping
    prepared = quantization.prepare(model, configuration, example_inputs=example)
    return quantization.convert(prepared)


def _generate(task: Task, ipex: Any, traced: bool) -> Prepared:
    kinds = ipex.quantization
    configuration = None
    if task.dtype in {"int8", "int4"}:
        four = task.dtype == "int4"
        half = task.float_dtype == "bfloat16"
        plain = kinds.WoqLowpMode.BF16 if half else kinds.WoqLowpMode.NONE
        more = {"group_size": GROUP} if four and task.shape["hidden_size"] >= GROUP else {}
        configuration = kinds.get_weight_only_quant_qconfig_mapping(
            weight_dtype=kinds.WoqWeightDtype.INT4 if four else kinds.WoqWeightDtype.INT8,
            lowp_mode=kinds.WoqLowpMode.INT8 if four else plain,
            **more,
        )
    model: Any = workloads.load(task)
    model.config.architectures = ["LlamaForCausalLM"]
    dtype = getattr(torch, task.float_dtype)
    model = ipex.llm.optimize(
        model,
        dtype=dtype,
        quantization_config=configuration,
        inplace=True,
        deployment_mode=not traced,
    )

    def around() -> Any:
        half = traced and dtype == torch.bfloat16
        return torch.autocast("cpu", dtype=dtype) if half else contextlib.nullcontext()

    precision = task.dtype if configuration is not None else task.float_dtype
    return generator(task, model, precision, context=around)


def _train(task: Task, ipex: Any, compile_with: Change | None) -> Prepared:
    half = task.float_dtype == "bfloat16"
    dtype = torch.bfloat16 if half else None
    look_up = None
    if task.name == "dlrm":
        from importlib import import_module

        modules = import_module(f"{ipex.__name__}.nn.modules")
        functional = import_module(f"{ipex.__name__}.nn.functional")
        model = workloads.load(task, lambda: workloads.Dlrm(task.shape, functional.interaction))
        merged = modules.MergedEmbeddingBagWithSGD.from_embeddingbag_list(
            workloads.tables(task.shape, sparse=False), lr=0.1
        )
        if half:
            merged.to_bfloat16_train()
        starts = [torch.arange(task.shape["batch"])] * task.shape["tables"]

        def look_up(rows: torch.Tensor) -> Any:
            return merged(list(rows), starts)

        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model = workloads.load(task)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model, optimizer = ipex.optimize(model.train(), optimizer=optimizer, dtype=dtype, inplace=True)
    step = Step(model, [optimizer], look_up, task)
    return training(task, step, compile_with, task.float_dtype)

# SPDX-License-Identifier: Apache-2.0
"""Running a task with the calls of IPEX: ours and the original take the same ones."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from . import workloads
from .task import Prepared, Task
from .torch_work import GROUP, Change, Step, generator, inference, training

__all__ = ["prepare"]


def prepare(
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

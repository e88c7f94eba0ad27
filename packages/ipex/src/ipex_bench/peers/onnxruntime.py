# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: the model exported by torch, all graph optimizations, the CPU provider."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..task import Prepared, Task, UnsupportedError, greedy
from . import Peer

_HALF = "no bfloat16 kernels: float32"


class Engine(Peer):
    """ONNX Runtime. Its CPU provider has no bfloat16 kernels: it runs float32 where the others run bfloat16."""

    title = "ONNX Runtime"
    module = "onnxruntime"
    install = "pip install onnxruntime onnx"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Export, quantize if asked, and open a session."""
        if importlib.util.find_spec("onnx") is None:
            raise UnsupportedError("the export needs onnx (pip install onnx)")
        if task.kind == "llm":
            return _generator(task)
        if task.dtype == "int4":
            raise UnsupportedError("only language models have int4 weights")
        import torch

        from ..workloads import load

        arrays = task.inputs()
        example = [torch.from_numpy(a) for a in arrays.values()]
        file = _export(task, load(task), example, list(arrays), ["answer"])
        precision = "float32"
        if task.dtype == "int8":
            from onnxruntime.quantization import quantize_dynamic

            small = task.path / "model.int8.onnx"
            quantize_dynamic(str(file), str(small))
            file, precision = small, "int8"
        session = _session(task, file)

        def call() -> object:
            return session.run(None, arrays)[0]

        return Prepared(precision, call, {"call": call}, "" if task.dtype == precision else _HALF)


def _export(
    task: Task,
    model: Any,
    example: Sequence[Any],
    inputs: list[str],
    outputs: list[str],
    **more: Any,
) -> Path:
    """Write the graph of a model and return its file."""
    import torch

    file = task.path / "onnx" / "model.onnx"
    file.parent.mkdir(exist_ok=True)  # weights above 2 GB get files of their own beside it
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            tuple(example),
            str(file),
            input_names=inputs,
            output_names=outputs,
            opset_version=17,
            dynamo=False,
            **more,
        )
    return file


def _session(task: Task, file: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = task.threads
    options.inter_op_num_threads = 1
    # A thread that waits by spinning would take the cores from the engine whose turn is next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _generator(task: Task) -> Prepared:
    """Return the language model; what a step gives for the cache is bound to the inputs of the next one."""
    import numpy
    import onnxruntime

    from ..one_step import Step, arrays, load

    step = Step(load(task))
    axes = {"input_ids": [1], "position_ids": [1], "mask": [2, 3]}
    dynamic = {name: {axis: f"{name}.{axis}" for axis in found} for name, found in axes.items()}
    dynamic |= {name: {2: "tokens"} for name in step.past_names}
    dynamic |= {name: {2: "all"} for name in step.output_names[1:]}
    file = _export(
        task, step, step.example(), step.input_names, step.output_names, dynamic_axes=dynamic
    )
    precision, note = "float32", "" if task.dtype == "float32" else _HALF
    if task.dtype in {"int8", "int4"}:
        file, precision, note = _few_bits(task, file), task.dtype, ""
    session = _session(task, file)
    empty = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros(step.cache_shape, numpy.float32))
    past = [empty]

    def run(ids: Any, place: int) -> Any:
        if not place:
            past[:] = [empty] * len(step.past_names)
        binding = session.io_binding()
        for name, array in arrays(ids, place).items():
            binding.bind_cpu_input(name, array)
        for name, value in zip(step.past_names, past, strict=True):
            binding.bind_ortvalue_input(name, value)
        for name in step.output_names:
            binding.bind_output(name)
        session.run_with_iobinding(binding)
        logits, *past[:] = binding.get_outputs()
        return logits.numpy()

    return greedy(task, run, precision, note)


def _few_bits(task: Task, file: Path) -> Path:
    """Return the file of the model with weights of few bits in blocks, and with int8 activations for four bits."""
    try:
        from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer
    except ImportError as error:
        raise UnsupportedError(f"weights of few bits need {error.name}") from None
    import onnx

    from ..torch_work import GROUP

    four = task.dtype == "int4"
    quantizer = MatMulNBitsQuantizer(
        onnx.load(str(file)),
        block_size=GROUP,
        is_symmetric=True,
        accuracy_level=4 if four else None,
        bits=4 if four else 8,
    )
    quantizer.process()
    small = file.with_name(f"model.{task.dtype}.onnx")
    quantizer.model.save_model_to_file(str(small), use_external_data_format=True)
    return small

# SPDX-License-Identifier: Apache-2.0
"""OpenVINO: the model converted once, compiled for the CPU, one request at a time."""

from __future__ import annotations

import warnings
from typing import Any

from ..task import Prepared, Task, UnsupportedError, greedy
from . import Peer


class Engine(Peer):
    """OpenVINO's CPU plugin."""

    title = "OpenVINO"
    module = "openvino"
    install = "pip install openvino"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Convert by tracing in float32; the plugin chooses kernels for the precision it is told."""
        import openvino
        import torch

        from ..workloads import load

        if task.kind == "llm":
            return _generator(task)
        if task.dtype == "int4":
            raise UnsupportedError("only language models have int4 weights")
        model = load(task)
        arrays = list(task.inputs().values())
        with torch.no_grad():
            converted = openvino.convert_model(
                model, example_input=tuple(torch.from_numpy(a) for a in arrays)
            )
        for place, array in enumerate(arrays):
            converted.inputs[place].get_node().set_partial_shape(
                openvino.PartialShape(list(array.shape))
            )
        converted.validate_nodes_and_infer_types()
        precision = task.dtype
        if task.dtype == "int8":
            converted, precision = _quantize(converted, arrays), "int8"
        request = _compiled(task, converted).create_infer_request()

        def call() -> object:
            return request.infer(arrays, share_inputs=True, share_outputs=True)

        def answer() -> object:
            call()
            return request.get_output_tensor(0).data.copy()

        return Prepared(precision, answer, {"call": call})


def _compiled(task: Task, model: Any) -> Any:
    import openvino

    precision = "f32" if task.float_dtype == "float32" else "bf16"
    hints = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,  # 8 bits by default; the caches of the others are not quantized
        "INFERENCE_NUM_THREADS": task.threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }
    return openvino.Core().compile_model(model, "CPU", hints)


def _generator(task: Task) -> Prepared:
    """Return the language model with its cache as state, as OpenVINO's own pipelines have it."""
    import numpy
    import openvino
    import torch
    from openvino._offline_transformations import apply_make_stateful_transformation

    from ..one_step import Step, arrays, load

    step = Step(load(task), reorder=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of tracing
        model = openvino.convert_model(step, example_input=step.example())
    for place, name in enumerate(step.input_names):
        model.inputs[place].set_names({name})
    for place, name in enumerate(step.output_names):
        model.outputs[place].set_names({name})
    batch, heads, _, width = step.cache_shape
    shapes = {"input_ids": [1, -1], "position_ids": [1, -1], "mask": [1, 1, -1, -1], "order": [1]}
    shapes |= {name: [batch, heads, -1, width] for name in step.past_names}
    model.reshape({name: openvino.PartialShape(shape) for name, shape in shapes.items()})
    if task.dtype in {"int8", "int4"}:
        model = _few_bits(task, model)
    pairs = dict(zip(step.past_names, step.output_names[1:], strict=True))
    apply_make_stateful_transformation(model, pairs)
    # The plugin's attention with a cache wants to be told what an empty one is.
    empty = openvino.opset13.constant(numpy.zeros(step.cache_shape, numpy.float32))
    for node in model.get_ops():
        if node.get_type_name() == "ReadValue":
            node.set_arguments([empty])
    model.validate_nodes_and_infer_types()
    request = _compiled(task, model).create_infer_request()
    order = numpy.zeros(1, numpy.int32)

    def run(ids: Any, place: int) -> Any:
        if not place:
            request.reset_state()
        request.infer({**arrays(ids, place), "order": order}, share_inputs=True)
        return request.get_output_tensor(0).data

    return greedy(task, run, task.dtype)


def _few_bits(task: Task, model: Any) -> Any:
    """Return the model with weights of few bits of its own tool."""
    try:
        import nncf
    except ImportError:
        raise UnsupportedError("weights of few bits need nncf (pip install nncf)") from None
    from ..torch_work import GROUP

    if task.dtype == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    four = nncf.CompressWeightsMode.INT4_SYM
    return nncf.compress_weights(model, mode=four, group_size=GROUP, all_layers=True)


def _quantize(model: object, arrays: list) -> object:
    """Return the model with static int8 of its own tool, calibrated with the inputs of the task."""
    try:
        import nncf
    except ImportError:
        raise UnsupportedError("int8 needs nncf (pip install nncf)") from None
    return nncf.quantize(model, nncf.Dataset([tuple(arrays)]), subset_size=1)

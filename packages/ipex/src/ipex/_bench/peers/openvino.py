# SPDX-License-Identifier: Apache-2.0
"""OpenVINO: the model converted once, compiled for the CPU, one request at a time."""

from __future__ import annotations

from ..task import Prepared, Task, UnsupportedError
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """OpenVINO's CPU plugin."""

    title = "OpenVINO"
    module = "openvino"
    install = "pip install openvino"
    kinds = ("ops", "models")

    def prepare(self, task: Task) -> Prepared:
        """Convert by tracing in float32; the plugin chooses kernels for the precision it is told."""
        import openvino
        import torch

        from ..workloads import load

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
            converted, precision = _quantise(converted, arrays), "int8"
        hints = {
            "INFERENCE_PRECISION_HINT": "f32" if task.dtype == "float32" else "bf16",
            "INFERENCE_NUM_THREADS": task.threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        compiled = openvino.Core().compile_model(converted, "CPU", hints)
        request = compiled.create_infer_request()

        def call() -> object:
            return request.infer(arrays, share_inputs=True, share_outputs=True)

        def answer() -> object:
            call()
            return request.get_output_tensor(0).data.copy()

        return Prepared(precision, answer, {"call": call})


def _quantise(model: object, arrays: list) -> object:
    """Return the model with static int8 of its own tool, calibrated with the inputs of the task."""
    try:
        import nncf
    except ImportError:
        raise UnsupportedError("int8 needs nncf (pip install nncf)") from None
    return nncf.quantize(model, nncf.Dataset([tuple(arrays)]), subset_size=1)

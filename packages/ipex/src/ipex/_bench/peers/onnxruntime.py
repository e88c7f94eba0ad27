# SPDX-License-Identifier: Apache-2.0
"""ONNX Runtime: the model exported by torch, all graph optimisations, the CPU provider."""

from __future__ import annotations

import importlib.util
import warnings

from ..task import Prepared, Task, UnsupportedError
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """ONNX Runtime. Its CPU provider has no bfloat16 kernels: it runs float32 where the others run bfloat16."""

    title = "ONNX Runtime"
    module = "onnxruntime"
    install = "pip install onnxruntime onnx"
    kinds = ("ops", "models")

    def prepare(self, task: Task) -> Prepared:
        """Export, quantise if asked, and open a session."""
        import onnxruntime
        import torch

        from ..workloads import load

        if importlib.util.find_spec("onnx") is None:
            raise UnsupportedError("the export needs onnx (pip install onnx)")
        if task.dtype == "int4":
            raise UnsupportedError("only language models have int4 weights")
        model = load(task)
        arrays = task.inputs()
        file = task.path / "model.onnx"
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            torch.onnx.export(
                model,
                tuple(torch.from_numpy(a) for a in arrays.values()),
                str(file),
                input_names=list(arrays),
                output_names=["answer"],
                opset_version=17,
                dynamo=False,
            )
        precision = "float32"
        if task.dtype == "int8":
            from onnxruntime.quantization import quantize_dynamic

            small = task.path / "model.int8.onnx"
            quantize_dynamic(str(file), str(small))
            file, precision = small, "int8"
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = task.threads
        options.inter_op_num_threads = 1
        # A thread that waits by spinning would take the cores from the engine whose turn is next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            str(file), options, providers=["CPUExecutionProvider"]
        )

        def call() -> object:
            return session.run(None, arrays)[0]

        note = "" if task.dtype == precision else "no bfloat16 kernels: float32"
        return Prepared(precision, call, {"call": call}, note)

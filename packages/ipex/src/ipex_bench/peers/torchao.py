# SPDX-License-Identifier: Apache-2.0
"""torchao with Inductor: dynamic int8 for models, weight-only int8 and int4 for language models."""

from __future__ import annotations

from typing import Any

from ..task import Prepared, Task, UnsupportedError
from ..torch_work import GROUP, prepare
from . import Peer

__all__ = ["Engine"]


class Engine(Peer):
    """Quantization by torchao. It has no other form, so it runs int8 where the others run floating point."""

    title = "torchao"
    module = "torchao"
    install = "pip install torchao"
    kinds = ("ops", "models", "llm")

    def prepare(self, task: Task) -> Prepared:
        """Quantize the linear layers and compile."""
        if task.dtype == "float32":
            raise UnsupportedError("torchao quantizes: compare it with --dtype bfloat16 or int8")
        import torch
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
    import torch

    return sum(isinstance(m, torch.nn.Linear) for m in model.modules())

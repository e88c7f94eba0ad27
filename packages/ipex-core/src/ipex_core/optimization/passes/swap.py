# SPDX-License-Identifier: Apache-2.0
"""Passes that exchange one layer for one: dropout, recurrent layers, norms and activations; and graph capture."""

from __future__ import annotations

from torch import nn

from ipex_core import nn as inn
from ipex_core.kernels.policy import has_kernel
from ipex_core.module_swap.state_dict import attach, class_of, realize, state_of, swap_class
from ipex_core.nn.layers import IDENTITY_DROPOUTS
from ipex_core.optimization.passes import Context, Pass, swap_reason
from ipex_core.optimization.records import Log
from ipex_core.util import progress, return_free_memory

_RECURRENT: dict[type[nn.Module], type[nn.Module]] = {nn.LSTM: inn.OptimizedLSTM}

#: Layers with a kernel of ours -> (optimized class, op).
_KERNELS: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.LayerNorm: (inn.OptimizedLayerNorm, "layer_norm"),
    nn.RMSNorm: (inn.OptimizedRMSNorm, "rms_norm"),
    nn.GELU: (inn.OptimizedGELU, "gelu"),
    nn.Softmax: (inn.OptimizedSoftmax, "softmax"),
    nn.EmbeddingBag: (inn.OptimizedEmbeddingBag, "merged_embeddingbag_forward"),
}


class Dropout(Pass):
    """Make dropout layers free in inference."""

    name = "dropout"
    knob = "replace_dropout_with_identity"

    def apply(self, context: Context) -> None:
        """Exchange the classes."""
        for path, module in context.modules():
            new = IDENTITY_DROPOUTS.get(type(module))
            if new is None:
                continue
            reason = swap_reason(module)
            if reason is None:
                swap_class(module, new)
                context.log.add(
                    path, module, self.name, True, "identity in inference", "none (identity)"
                )
            else:
                context.log.add(path, module, self.name, False, reason)


class Recurrent(Pass):
    """LSTM layers: the stock op, whose oneDNN path is the fast one, made to accept any input dtype."""

    name = "lstm"
    knob = "optimize_lstm"

    def apply(self, context: Context) -> None:
        """Exchange the classes."""
        for path, module in context.modules():
            new = _RECURRENT.get(type(module))
            if new is None:
                continue
            reason = swap_reason(module)
            if reason is None:
                swap_class(module, new)
                text = "stock op: its oneDNN path needs no gradients"
                context.log.add(
                    path, module, self.name, True, text, "aten::lstm (mkldnn_rnn_layer)"
                )
            else:
                context.log.add(path, module, self.name, False, reason)


class Kernels(Pass):
    """Norms and activations with a kernel of ours."""

    name = "kernels"

    def applies(self, context: Context) -> bool:
        """Return whether the level asks for kernels."""
        return context.options.level == "O1"

    def apply(self, context: Context) -> None:
        """Exchange the classes."""
        for path, module in context.modules():
            new, op = _KERNELS.get(class_of(module), (None, ""))
            if new is None:
                continue
            reason = self._reason(module, op)
            if reason is not None:
                context.log.add(path, module, self.name, False, reason, "stock")
                continue
            swap_class(module, new)
            attach(module).kernel_op = op
            context.log.add(
                path, module, self.name, True, "kernel of a kernel package", f"ipex::{op}"
            )

    def _reason(self, module: nn.Module, op: str) -> str | None:
        if not has_kernel(op):
            return f"no kernel package implements {op}"
        shape = getattr(module, "normalized_shape", (1,))
        if len(shape) != 1:
            return "normalizes over several dimensions"
        if isinstance(module, nn.EmbeddingBag) and module.mode != "mean":
            return f"the stock op is faster for mode {module.mode}"
        if type(module) in _KERNELS:
            return swap_reason(module)
        return None


class Encoder(Pass):
    """Encoders of `torch.nn.Transformer`, whose stock op would unpack each weight in each call."""

    name = "encoder"  # always: cast weights concern the op, too

    def apply(self, context: Context) -> None:
        """Exchange the classes of layers with changed weights, and of what runs them."""
        for path, module in context.modules():
            if type(module) is not nn.TransformerEncoderLayer or swap_reason(module) is not None:
                continue
            states = [state_of(child) for child in module.modules()]
            if any(s is not None and (s.packing or s.dtype) for s in states):
                swap_class(module, inn.OptimizedTransformerEncoderLayer)
                text = "part by part: the stock op knows no packed or reduced weights"
                context.log.add(path, module, self.name, True, text)
        for _, module in context.modules():
            if type(module) is nn.TransformerEncoder and swap_reason(module) is None:
                layers = list(module.layers)
                if layers and all(type(x) is inn.OptimizedTransformerEncoderLayer for x in layers):
                    swap_class(module, inn.OptimizedTransformerEncoder)


#: Bytes of replaced weights after which freed memory is returned to the system.
RETURN_BYTES = 64 << 20


class Realize(Pass):
    """Carry out the plans: one module at a time, so that at most one weight exists twice."""

    name = "realize"  # always: passes before this one only plan

    def apply(self, context: Context) -> None:
        """Fold, cast, lay out and pack."""
        from ipex_core.module_swap.state_dict import SavedTensor

        registry: dict[int, SavedTensor] = {}
        todo = [(p, m) for p, m in context.modules() if state_of(m) is not None]
        freed = 0
        for _, module in progress(todo):
            freed += sum(p.nbytes for p in module._parameters.values() if p is not None)
            realize(module, registry)
            if freed >= RETURN_BYTES:
                return_free_memory()
                freed = 0


class GraphMode(Pass):
    """Let the model capture itself as a graph; its class and forward stay."""

    name = "graph_mode"
    knob = "graph_mode"

    def apply(self, context: Context) -> None:
        """Capture lazily, at the first call for each kind of input."""
        from ipex_core.optimization.graph_mode import GraphCall

        text = "not called yet: capture happens at the first call without gradients"
        context.log.add("", context.model, self.name, True, text)
        context.model._compiled_call_impl = GraphCall(context.model, context.log)

    def undo(self, model: nn.Module, log: Log) -> None:
        """Call the forward directly again."""
        if log.options.graph_mode:
            model._compiled_call_impl = None

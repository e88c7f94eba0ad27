# SPDX-License-Identifier: Apache-2.0
"""Convolutions, transposed ones too, and what follows them."""

from __future__ import annotations

import torch

from ipex_core.fusion.torchscript.graph import (
    Editor,
    Node,
    Value,
    constant,
    is_constant,
    is_tensor,
    key_of,
    only_use,
    scalar,
    weight,
)
from ipex_core.packing import onednn

__all__ = ["CONV", "TRANSPOSED", "Convolutions"]

CONV = "mkldnn::_convolution_pointwise"
TRANSPOSED = "mkldnn::_convolution_transpose_pointwise"
#: Where these ops have the name of the activation; its numbers and algorithm follow.
_POST = {CONV: 7, TRANSPOSED: 8}
_NAMES = {CONV: "conv", TRANSPOSED: "conv_transpose"}

#: Activations that oneDNN computes with a convolution -> its name for them.
_ACTIVATIONS = {
    "aten::relu": "relu",
    "aten::sigmoid": "sigmoid",
    "aten::tanh": "tanh",
    "aten::silu": "swish",
    "aten::hardswish": "hardswish",
    "aten::leaky_relu": "leaky_relu",
    "aten::hardtanh": "hardtanh",
    "aten::gelu": "gelu",
}
#: The layout of weights for which oneDNN is fastest.
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


class Convolutions:
    """The patterns of convolutions on one graph."""

    def __init__(self, editor: Editor) -> None:
        self.editor = editor

    def run(self) -> None:
        """Apply all of them."""
        self.editor.each("aten::_convolution", self._conv)
        for kind in _ACTIVATIONS:
            self.editor.each(kind, self._activation)
        self.editor.each("aten::add", self._add)

    def _conv(self, node: Node) -> str | None:
        x, w, b, stride, padding, dilation, transposed, output_padding, groups, *_ = node.inputs()
        dim = next((d for d in (3, 4, 5) if weight(w, d) is not None), None)
        if dim is None or not is_constant(b) or not isinstance(constant(transposed), bool):
            return None
        kernel = constant(w)
        lists = [constant(v) for v in (padding, output_padding, stride, dilation)]
        if not all(_numbers(v, dim - 2) for v in lists):
            return None
        if not onednn.supports(kernel.dtype) or kernel.numel() == 0:
            return None
        bias = constant(b)
        if bias is not None and bias.dtype != kernel.dtype:
            return None
        kind = TRANSPOSED if constant(transposed) else CONV
        if kind == CONV:
            del lists[1]
        elif dim == 3:
            return None  # oneDNN has none for signals
        post = ["none", self.editor.scalars([], node), ""]
        arguments = [x, self._laid_out(kernel), b, *lists, groups, *post]
        self.editor.replace(node, self.editor.op(kind, arguments, node).output())
        return _NAMES[kind]

    def _laid_out(self, kernel: torch.Tensor) -> torch.Tensor:
        key = key_of(kernel)
        if key not in self.editor.packed:
            layout = _FORMATS.get(kernel.dim(), torch.contiguous_format)
            self.editor.packed[key] = kernel.contiguous(memory_format=layout)
        return self.editor.packed[key]

    def _plain(self, value: Value, user: Node) -> Node | None:
        """Return the convolution that makes a value, if nothing was fused to it and it has one reader."""
        node = value.node()
        place = _POST.get(node.kind())
        if place is None or not only_use(value, user):
            return None
        return node if constant(node.inputsAt(place)) == "none" else None

    def _activation(self, node: Node) -> str | None:
        name = _ACTIVATIONS[node.kind()]
        conv = self._plain(node.inputsAt(0), node)
        if conv is None:
            return None
        algorithm = ""
        numbers: list[float] = []
        if name == "gelu":
            algorithm = constant(node.inputsAt(1))
        elif name in ("leaky_relu", "hardtanh"):
            values = list(node.inputs())[1:]
            numbers = [n for n in map(scalar, values) if n is not None]
            if len(numbers) != len(values):
                return None
        place = _POST[conv.kind()]
        conv.replaceInput(place, self.editor.constant(name, conv))
        conv.replaceInput(place + 1, self.editor.scalars(numbers, conv))
        conv.replaceInput(place + 2, self.editor.constant(algorithm, conv))
        node.output().replaceAllUsesWith(node.inputsAt(0))
        node.destroy()
        self.editor.upgrade(_NAMES[conv.kind()])
        return f"{_NAMES[conv.kind()]} + {'silu' if name == 'swish' else name}"

    def _add(self, node: Node) -> str | None:
        if node.inputsSize() != 3 or constant(node.inputsAt(2)) != 1:
            return None
        a, b = list(node.inputs())[:2]
        for value, other in ((b, a), (a, b)):
            conv = self._plain(value, node)
            if conv is None or is_constant(other) or not is_tensor(other) or other == value:
                continue
            # Of the others oneDNN has none, or not in all dtypes: the sum goes into the result.
            whole = conv.kind() == CONV and constant(conv.inputsAt(1)).dim() == 4
            uses = node.output().uses()
            relu = uses[0].user if len(uses) == 1 and uses[0].user.kind() == "aten::relu" else None
            name = _NAMES[conv.kind()]
            if not whole:
                self.editor.replace(node, self.editor.call("add_in_place", [value, other], node))
                self.editor.upgrade(name)
                return f"{name} + add"
            x, w, bias, *lists = list(conv.inputs())[:7]
            arguments = [x, other, w, bias, *lists, relu is not None]
            new = self.editor.call("conv_add", arguments, node)
            if relu is not None:
                relu.output().replaceAllUsesWith(node.output())
                relu.destroy()
            self.editor.replace(node, new)
            conv.destroy()
            self.editor.upgrade(name)
            return f"{name} + add" if relu is None else f"{name} + add + relu"
        return None


def _numbers(value: object, count: int) -> bool:
    return (
        isinstance(value, list) and len(value) == count and all(isinstance(i, int) for i in value)
    )

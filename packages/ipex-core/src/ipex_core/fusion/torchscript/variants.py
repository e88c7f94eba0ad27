# SPDX-License-Identifier: Apache-2.0
"""Other spellings of linear layers and of their activations, rewritten to the one that the patterns know."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ipex_core.fusion.torchscript.graph import (
    Editor,
    Node,
    Value,
    constant,
    is_constant,
    key_of,
    only_use,
    weight,
)
from ipex_core.kernels.policy import choose_linear

__all__ = ["normalize", "packs"]

#: Nodes whose result is a tensor of a floating dtype if their weight is a constant of one -> place of the weight.
_FLOATING = {"aten::linear": (1, (2,)), "aten::_convolution": (1, (3, 4, 5))}


def normalize(editor: Editor, linears: bool) -> None:
    """Rewrite ``y * sigmoid(y)`` behind a layer to silu and, with ``linears``, products with a weight to linear layers.

    Nothing is reported for these: the patterns that follow do that.
    """
    found = len(editor.done)

    def bind(pattern: Callable[[Editor, Node], None]) -> Callable[[Node], None]:
        return lambda node: pattern(editor, node)

    if linears:
        editor.each("aten::addmm", bind(_addmm))
        editor.each("aten::matmul", bind(_matmul))
    editor.each("aten::mul", bind(_swish))
    assert len(editor.done) == found


def packs(n: int, k: int, dtype: torch.dtype) -> bool:
    """Return whether a linear layer of this size is faster with a packed weight of ours."""
    return choose_linear(dtype, n, k, None).form == "ipex"


def _swish(editor: Editor, node: Node) -> None:
    for value, gate in (tuple(node.inputs()), tuple(node.inputs())[::-1]):
        sigmoid = gate.node()
        if sigmoid.kind() != "aten::sigmoid" or sigmoid.inputsAt(0) != value:
            continue
        place, dims = _FLOATING.get(value.node().kind(), (0, ()))
        if not any(weight(value.node().inputsAt(place), dim) is not None for dim in dims):
            continue
        if only_use(gate, node) and all(u.user in (node, sigmoid) for u in value.uses()):
            editor.replace(node, editor.op("aten::silu", [value], node).output())
            sigmoid.destroy()
            return


def _addmm(editor: Editor, node: Node) -> None:
    """``addmm(bias, x, weight)``, as GPT-2 and what `torch.nn.Linear` once was write a linear layer."""
    bias, x, w, beta, alpha = node.inputs()
    matrix = weight(w, 2)
    if matrix is None or weight(bias, 1) is None or {constant(beta), constant(alpha)} != {1}:
        return
    k, n = matrix.shape
    if constant(bias).numel() == n and packs(n, k, matrix.dtype):
        _linear(editor, node, x, w, bias)


def _matmul(editor: Editor, node: Node) -> None:
    """``x @ weight`` and ``x @ weight + bias``."""
    x, w = node.inputs()
    matrix = weight(w, 2)
    if (
        matrix is None
        or is_constant(x)
        or not packs(matrix.shape[1], matrix.shape[0], matrix.dtype)
    ):
        return
    add, vector = _bias_behind(node)
    if add is None or vector is None or vector.shape != (matrix.shape[1],):
        _linear(editor, node, x, w, None)
    elif vector.dtype == matrix.dtype:
        # A new bias: its constant may come after the product.
        _linear(editor, node, x, w, editor.constant(vector, node))
        editor.replace(add, next(v for v in add.inputs() if not is_constant(v)))


def _bias_behind(node: Node) -> tuple[Node | None, torch.Tensor | None]:
    """Return a sum with a constant vector that is the only use of a product, and the vector."""
    uses = node.output().uses()
    add = uses[0].user if len(uses) == 1 else None
    if add is None or add.kind() != "aten::add" or add.inputsSize() != 3:
        return None, None
    if constant(add.inputsAt(2)) != 1 or not only_use(node.output(), add):
        return None, None
    other = next((v for v in list(add.inputs())[:2] if v != node.output()), None)
    return add, None if other is None else weight(other, 1)


def _linear(editor: Editor, node: Node, x: Value, w: Value, bias: Value | None) -> None:
    matrix = constant(w)
    key = key_of(matrix)
    turned = editor.turned.setdefault(key, matrix.t().contiguous())
    editor.replace(node, editor.op("aten::linear", [x, turned, bias], node).output())

# SPDX-License-Identifier: Apache-2.0
"""A rewritten forward of the model itself, whose class stays what it is."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import torch
from torch import fx, nn

from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.forward import GeneratedForward, generate
from ipex_core.nn import functional
from ipex_core.util.symbolic import Tracer
from ipex_quant.int8.dataflow import Add, Event, Flow, activation_of
from ipex_quant.int8.modules.matmul import PRODUCTS, Interaction, MatMul, why_float
from ipex_quant.int8.modules.pool import Mean
from ipex_quant.util.modules import replace_module


class RewrittenForward(GeneratedForward):
    """Runs other code in place of a module's forward; installed as ``module.__dict__["forward"]``.

    Unlike the forwards that ``optimize`` installs it stays for good: the modules that it calls compute other things
    than the modules of the original.

    Args:
        module: The module; it has the children that the code calls.
        source: Code of a function ``forward`` of the module and its arguments.
        names: For each global name of the code where it comes from, as ``"module:attribute"``.
        lines: The graph that the code was made from, as text.
    """

    def __init__(
        self, module: nn.Module, source: str, names: dict[str, str], lines: list[str]
    ) -> None:
        super().__init__(module, source, names)
        self.lines = lines

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the code on the module."""
        return self._function(self._module(), *args, **kwargs)

    def _rest(self) -> tuple[Any, ...]:
        return (self.lines,)


# --- rewriting a float model ------------------------------------------------------------------------------------------


_ADDS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "iadd"})
_ADD_TARGETS: tuple[Any, ...] = (operator.add, operator.iadd, torch.add)
#: Products of two tensors as a trace shows them.
_PRODUCT_TARGETS: tuple[Any, ...] = (operator.matmul, torch.matmul, torch.bmm)
_F = nn.functional
_MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu_": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
}
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    getattr(owner, name): kind
    for name, kind in _MODULES.items()
    for owner in (_F, torch)
    if hasattr(owner, name)
}
_Pooling = dict[Any, tuple[Any, tuple[str, ...]]]
_WINDOW = ("kernel_size", "stride", "padding")
_MAX = (*_WINDOW, "dilation", "ceil_mode")
_AVG = (*_WINDOW, "ceil_mode", "count_include_pad")
_SIZE = ("output_size",)
#: Pooling functions as a trace shows them: the module, and its arguments in their order.
_POOLS: _Pooling = {
    **{
        getattr(owner, f"max_pool{d}d"): (getattr(nn, f"MaxPool{d}d"), (*_MAX, *more))
        for d in (1, 2, 3)
        for owner, more in ((torch, ()), (_F, ("return_indices",)))
    },
    **{
        getattr(_F, f"adaptive_avg_pool{d}d"): (getattr(nn, f"AdaptiveAvgPool{d}d"), _SIZE)
        for d in (1, 2, 3)
    },
    _F.avg_pool1d: (nn.AvgPool1d, _AVG),
    _F.avg_pool2d: (nn.AvgPool2d, (*_AVG, "divisor_override")),
    "mean": (None, ("dim", "keepdim")),
    torch.mean: (None, ("dim", "keepdim")),
}
_POOL_NAMES = frozenset(
    {"mean", *(f"{k}_pool{d}d" for k in ("max", "avg", "adaptive_avg") for d in (1, 2, 3))}
)
#: What may stand between a convolution and pooling.
_BETWEEN = frozenset({"activation", "add", "batch_norm", "same_codes"})
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


def remove_dropout(model: nn.Module) -> None:
    """Replace dropout layers, which do nothing in evaluation mode."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name and type(module) in _DROPOUTS and not has_hooks(module):
            replace_module(model, name, nn.Identity().eval())


def containers_to_rewrite(flow: Flow, named: frozenset[str], products: bool) -> list[str]:
    """Return the modules whose forward itself adds to, activates or pools results of layers.

    Also those that multiply activations with one of the functions in ``named``, and with ``products`` those that
    multiply large ones.
    """
    found = {}
    for event in flow.events:
        if event.role == "function" and event.name in _ADDS | set(_MODULES):
            kinds = ("conv",) if event.name in _ADDS else ("conv", "linear", "add")
            if any(_source_role(flow, value) in kinds for value in event.inputs):
                found[event.path] = True
        product = event.role == "function" and event.name in PRODUCTS | named
        product = product and (
            event.name in named or (products and not why_float(event.shapes, False))
        )
        if product and not any(map(flow.constant, event.inputs)):
            found[event.path] = True
        pools = event.role == "function" and event.name in _POOL_NAMES
        if pools and _comes_from_conv(flow, event.inputs[0]):
            found[event.path] = True
    for path, events in flow.calls.items():
        if len(events) > 1 and events[0].role == "activation":
            found[path.rpartition(".")[0]] = True
    return list(found)


def _comes_from_conv(flow: Flow, value: int) -> bool:
    event = flow.producers.get(value)
    while event is not None and (
        event.role in _BETWEEN
        or (event.role == "function" and event.name in _ADDS | set(_MODULES) | _POOL_NAMES)
    ):
        event = flow.producers.get(event.inputs[0])
    return event is not None and event.role == "conv"


def _source_role(flow: Flow, value: int) -> str:
    event: Event | None = flow.producers.get(value)
    if event is not None and event.role == "batch_norm":
        event = flow.producers.get(event.inputs[0])
    if event is not None and event.role == "function" and event.name in _ADDS:
        return "add"
    return event.role if event is not None else ""


class _Shallow(Tracer):
    """Traces one forward; the modules that it calls stay calls."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for every module."""
        return True


def rewrite(container: nn.Module) -> fx.GraphModule | None:
    """Return a module of the same children whose sums, activations and pools are modules, or None if it cannot be."""
    if has_hooks(container) or isinstance(container, (nn.Sequential, nn.ModuleList)):
        return None
    result = _with_modules(container)
    if result is not None:
        result.delete_all_unused_submodules()
    return result


def rewrite_model(model: nn.Module) -> RewrittenForward | None:
    """Rewrite the forward of a model, which keeps its class; return the forward, or None if it cannot be."""
    if "forward" in model.__dict__ or isinstance(model, (nn.Sequential, fx.GraphModule)):
        return None
    result = _with_modules(model)
    if result is None:
        return None
    source, names = generate(result.graph)
    if names is None:
        return None
    for name, child in result.named_children():
        if name not in model._modules:
            model.add_module(name, child)
    forward = RewrittenForward(model, source, names, lines_of(result))
    model.__dict__["forward"] = forward
    return forward


def undo_rewrite_model(model: nn.Module, children: list[str]) -> None:
    """Take the rewritten forward away again, and all children but those named."""
    model.__dict__.pop("forward", None)
    for name in set(model._modules) - set(children):
        del model._modules[name]


def lines_of(module: fx.GraphModule) -> list[str]:
    """Return the graph of a module as text that does not depend on the version of torch."""
    names: dict[fx.Node, str] = {}
    lines = []
    for number, node in enumerate(module.graph.nodes):
        names[node] = f"%{number}"
        target = node.target if isinstance(node.target, str) else node.target.__name__
        inputs = [names[other] for other in node.all_input_nodes]
        lines.append(" ".join([node.op, target, *inputs]))
    return lines


def _with_modules(container: nn.Module) -> fx.GraphModule | None:
    if not _plain_signature(container):
        return None
    try:
        graph = _Shallow().trace(container)
    except Exception:  # control flow on data, or whatever else a forward does: it stays as it is
        return None
    for node in graph.nodes:
        node.type = None  # annotations that are strings cannot be pickled
    result = fx.GraphModule(container, graph, type(container).__name__)
    calls = Counter(str(node.target) for node in graph.nodes if node.op == "call_module")
    for node in list(graph.nodes):
        if node.op == "call_module":
            module = result.get_submodule(str(node.target))
            if calls[str(node.target)] > 1 and activation_of(module):
                node.target = _add(result, str(node.target), copy.deepcopy(module))
            continue
        made = _module_for(node)
        if made is not None:
            name = _add(result, type(made).__name__.lower(), made.eval())
            with graph.inserting_after(node):
                call = graph.call_module(name, tuple(_operands(node)))
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    result.recompile()
    return result.train(container.training)


def _plain_signature(container: nn.Module) -> bool:
    import inspect

    parameters = inspect.signature(container.forward).parameters.values()
    plain = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return all(p.kind is plain and p.default is inspect.Parameter.empty for p in parameters)


def _operands(node: fx.Node) -> list[fx.Node]:
    return [arg for arg in node.args if isinstance(arg, fx.Node)]


def _module_for(node: fx.Node) -> nn.Module | None:
    by_function = node.op == "call_function"
    by_method = node.op == "call_method"
    if not by_function and not by_method:
        return None
    operands = _operands(node)
    if node.target in _POOLS:
        return _pool_for(node)
    if (by_function and node.target in _ADD_TARGETS) or (by_method and node.target in _ADDS):
        in_place = node.target is operator.iadd or node.target == "add_"
        if len(operands) != 2 or len(node.args) != 2 or node.kwargs:
            return None
        # A later reader of the first operand would see the sum.
        return None if in_place and len(operands[0].users) != 1 else Add()
    if by_function and node.target is functional.interaction:
        return Interaction() if len(operands) == len(node.args) > 1 else None
    if (by_function and node.target in _PRODUCT_TARGETS) or (by_method and node.target in PRODUCTS):
        plain = len(operands) == len(node.args) == 2 and not node.kwargs
        # A parameter is no activation: it would be quantized at each call.
        return MatMul() if plain and all(it.op != "get_attr" for it in operands) else None
    kind = _FUNCTIONS.get(node.target) if by_function else _MODULES.get(str(node.target))
    options = {name: value for name, value in node.kwargs.items() if name != "inplace"}
    if kind is None or len(node.args) != 1 or len(operands) != 1 or options:
        return None
    return kind()


def _pool_for(node: fx.Node) -> nn.Module | None:
    """Return a pooling module for a call of a function, if its arguments are constants."""
    kind, names = _POOLS[node.target]
    if len(node.args) > 1 + len(names) or len(node.all_input_nodes) != 1 or not node.args:
        return None
    options = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    if not options.keys() <= set(names):
        return None
    if kind is not None:
        made: nn.Module = kind(**{k: v for k, v in options.items() if v != []})
        return made
    dims = options.get("dim")
    dims = (dims,) if isinstance(dims, int) else dims
    if not isinstance(dims, (tuple, list)) or not all(isinstance(d, int) for d in dims) or not dims:
        return None
    return Mean(tuple(int(str(d)) for d in dims), bool(options.get("keepdim", False)))


def _add(module: nn.Module, name: str, child: nn.Module) -> str:
    number = 1
    while hasattr(module, f"{name}_{number}"):
        number += 1
    module.add_module(f"{name}_{number}", child)
    return f"{name}_{number}"

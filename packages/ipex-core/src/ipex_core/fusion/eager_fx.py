# SPDX-License-Identifier: Apache-2.0
"""Fusion of eager models: a trace of their modules, layers that read one input, and patterns of several modules."""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import operator
import sys
import textwrap
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ipex_core.fusion import GraphReport
from ipex_core.kernels.policy import has_kernel
from ipex_core.library.spec import FLOATS
from ipex_core.module_swap.base import has_hooks
from ipex_core.module_swap.forward import FusedForward, Guard
from ipex_core.module_swap.state_dict import class_of
from ipex_core.nn import OptimizedLinear, functional
from ipex_core.nn.layers import IDENTITY_DROPOUTS
from ipex_core.nn.merged_linear import linears, may_merge, merge
from ipex_core.util import quiet
from ipex_core.util.symbolic import Recordings, Tracer, names_in

_LIBRARY = ("torch.nn", "ipex_core.nn")
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_IN_PLACE_OPERATORS = (
    "iadd",
    "iand",
    "ifloordiv",
    "ilshift",
    "imatmul",
    "imod",
    "imul",
    "ior",
    "ipow",
    "irshift",
    "isub",
    "itruediv",
    "ixor",
)
_IN_PLACE = {*_IN_PLACE_OPERATORS, "setitem", "delitem", "__setitem__"}
#: Names in a forward that make it depend on more than its arguments and attributes, or on what a stand-in is not.
_TELLTALES = frozenset(
    {
        "Tensor",
        "get_autocast_dtype",
        "inference_mode",
        "is_autocast_cpu_enabled",
        "is_autocast_enabled",
        "is_grad_enabled",
        "is_inference_mode_enabled",
        "is_tensor",
        "random",
    }
)


def release(tracer: fx.Tracer) -> None:
    """Let go of the module: nodes and proxies of a trace are cycles and would keep it alive."""
    for name in (
        "root",
        "tensor_attrs",
        "submodule_paths",
        "module_stack",
        "scope",
        "root_module_name",
    ):
        tracer.__dict__.pop(name, None)


class _OnlyStandIns(TorchFunctionMode):
    """Refuses ops on anything but stand-ins; not ``strict``: only those that leave something behind."""

    def __init__(self, strict: bool) -> None:
        super().__init__()
        self.strict = strict

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if name != "__get__" and not any(issubclass(kind, fx.Proxy) for kind in types):
            writes = name in ("_set_grad_enabled", "__setitem__", "__set__") or (
                name.startswith("__i") if name.endswith("__") else name.endswith("_")
            )
            if self.strict or writes or "out" in kwargs or _draws(name):
                raise RuntimeError(f"{name} does not depend on the inputs")
        return func(*args, **kwargs)


@functools.cache
def _draws(name: str) -> bool:
    """Return whether a function draws random numbers, which other threads would miss."""
    if name == "gumbel_softmax":
        return True
    packet = getattr(torch.ops.aten, name, None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.nondeterministic_seeded in getattr(packet, it).tags for it in overloads)


@contextlib.contextmanager
def untouched(root: nn.Module, strict: bool) -> Iterator[list[str]]:
    """Keep a trace from changing anything.

    Args:
        root: The module that is traced.
        strict: Refuse every op on real tensors, not only those that write.

    Yields:
        A list that at the end holds the names of the attributes that were changed, and changed back.
    """
    before = {module: _content(module) for module in root.modules()}
    changed: list[str] = []
    with quiet(), contextlib.ExitStack() as stack:
        for module, content in before.items():
            stack.callback(_put_back, module, content, changed)
        stack.enter_context(_OnlyStandIns(strict))
        yield changed


_Content = dict[str, tuple[Any, Any]]


def _content(module: nn.Module) -> _Content:
    """Return the attributes and, of containers, a shallow copy."""
    return {
        key: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for key, value in module.__dict__.items()
    }


def _put_back(module: nn.Module, before: _Content, changed: list[str]) -> None:
    for key in [k for k in module.__dict__ if k not in before]:
        del module.__dict__[key]
        changed.append(key)
    for key, (value, copy) in before.items():
        if module.__dict__.get(key, before) is not value:
            module.__dict__[key] = value
            changed.append(key)
        if copy is None or _same(value, copy):
            continue
        value.clear()
        value.extend(copy) if isinstance(value, list) else value.update(copy)
        changed.append(key)


def _same(a: Any, b: Any) -> bool:
    """Return whether two containers hold the same objects."""
    if len(a) != len(b):
        return False
    if isinstance(a, dict):
        return all(x is y and a[x] is b[y] for x, y in zip(a, b, strict=True))
    return isinstance(a, set) or all(x is y for x, y in zip(a, b, strict=True))


# --------------------------------------------------------------------------------------------------------------------
# The trace of one module


class _StandIn(fx.Proxy):
    """A proxy that records ``a += b`` as such; `torch.fx.Proxy` records an addition to a new tensor."""


def _record(function: Any) -> Any:
    def method(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return method


for _name in _IN_PLACE_OPERATORS:
    setattr(_StandIn, f"__{_name}__", _record(getattr(operator, _name)))


class _Tracer(Tracer):
    """Traces with children as leaves and optional arguments at their defaults."""

    proxy_buffer_attributes = True
    stand_in = _StandIn

    def __init__(self, names: list[str], recordings: Recordings | None) -> None:
        super().__init__(recordings)
        self._names = names
        self.entered: list[str] = []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # An activation written as a module of its own (no parameters, no children) is looked into.
        plain = not m._parameters and not m._buffers and not m._modules and not has_hooks(m)
        library = type(m).__module__.startswith(_LIBRARY)
        if library or not plain or "." in module_qualified_name:
            return True
        self.entered.append(module_qualified_name)
        return False

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self._names]
        return root_fn, [self.root, *proxies]


def _required_arguments(module: nn.Module) -> list[str]:
    """Return the names of the arguments without default.

    Raises:
        RuntimeError: One of them can be given by keyword only.
    """
    names = []
    for parameter in inspect.signature(type(module).forward).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty:
            raise RuntimeError(
                f"forward must not require keyword-only arguments, got {parameter.name!r}"
            )
        if parameter.default is parameter.empty:
            names.append(parameter.name)
    return names[1:]


def trace(
    module: nn.Module, recordings: Recordings | None = None
) -> tuple[fx.Graph, list[str], list[str]]:
    """Trace the forward of one module.

    Args:
        module: The module.
        recordings: What traces of the same pass have in common.

    Returns:
        The graph, the names of its arguments and the children that were looked into.

    Raises:
        Exception: Whatever the forward does with a stand-in for a tensor; RuntimeError if it changes the module or
            requires a keyword-only argument.
    """
    names = _required_arguments(module)
    tracer = _Tracer(names, recordings)
    try:
        with untouched(module, strict=True) as changed:
            graph = tracer.trace(module)
    finally:
        release(tracer)
    if changed:
        raise RuntimeError(
            f"forward must not change attributes of modules, got a change of {changed[0]!r}"
        )
    return graph, names, sorted(set(tracer.entered))


# --------------------------------------------------------------------------------------------------------------------
# What a rewritten forward relies on


def guards_of(module: nn.Module, entered: list[str], fused: list[str]) -> tuple[Guard, ...]:
    """Return the plain attributes that a forward may read; a trace holds their values as constants.

    Args:
        module: The module.
        entered: Children that the trace looked into.
        fused: Children whose call was fused away.
    """
    guards: list[Guard] = []
    for name in sorted(set(fused)):
        layer = module.get_submodule(name)
        if isinstance(layer, nn.GELU):
            guards.append((name, "approximate", "", layer.approximate))
    for child in ["", *entered]:
        owner = module.get_submodule(child)
        names = _names(type(owner)) - _OWN
        for name in sorted(names & owner.__dict__.keys()):
            found = _constants(owner.__dict__[name], names)
            guards += ((child, name, key, constant) for key, constant in found)
    return tuple(guards)


def _constants(value: Any, names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield a plain value under an empty key, or the plain attributes of a configuration that may be read."""
    if _plain(value):
        yield "", value
    elif hasattr(value, "__dict__") and not isinstance(
        value, (nn.Module, type, types.ModuleType, types.FunctionType)
    ):
        for key in sorted(names & vars(value).keys()):
            if _plain(vars(value)[key]):
                yield key, vars(value)[key]


#: Attributes every module has.
_OWN = frozenset(nn.Module().__dict__)


def _plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) or (
        isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)
    )


def _names(kind: type[nn.Module]) -> set[str]:
    """Return the names in the forward of a class, in its own methods and in functions next to it."""
    names: set[str] = set()
    forward = kind.forward
    todo: list[Any] = [forward]
    seen: set[Any] = set()
    while todo:
        function = inspect.unwrap(todo.pop())
        code = getattr(function, "__code__", None)
        if code is None or code in seen or len(seen) > 200:
            continue
        seen.add(code)
        found = names_in(code)
        names |= found
        for name in found:
            method = inspect.getattr_static(kind, name, None)
            for other in (
                getattr(method, "fget", method),
                getattr(function, "__globals__", {}).get(name),
            ):
                if isinstance(other, types.FunctionType) and not _of_torch(other):
                    todo.append(other)
    return names


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").split(".")[0] == "torch"


def reason_against(module: nn.Module, graph: fx.Graph, entered: list[str]) -> str | None:
    """Return why a module whose trace succeeded must not be rewritten, or None."""
    for child in ["", *entered]:
        found = sorted(_names(type(module.get_submodule(child))) & _TELLTALES)
        if found:
            return f"the forward looks at {found[0]}"
    for node in graph.nodes:
        for written in _written(node, module):
            if not _private(written, module):
                return "the forward changes a tensor in place"
    return None


def _written(node: fx.Node, root: nn.Module) -> list[fx.Node]:
    """Return the nodes whose tensors a node may overwrite."""
    if node.op == "call_module":
        child = root.get_submodule(str(node.target))
        writes = any(
            getattr(m, "inplace", False) and not isinstance(m, nn.modules.dropout._DropoutNd)
            for m in child.modules()
        )
        return node.all_input_nodes if writes else []
    if node.op not in ("call_method", "call_function"):
        return []
    if isinstance(node.kwargs.get("out"), fx.Node):
        return node.all_input_nodes
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    # Functions such as relu take `inplace` as one of their flags.
    flagged = node.kwargs.get("inplace") or (
        getattr(node.target, "__module__", "") == "torch.nn.functional" and True in node.args
    )
    if not named and not flagged:
        return []
    first = [a for a in node.args[:1] if isinstance(a, fx.Node)]
    return first or node.all_input_nodes


#: Layers and functions whose result is a tensor of its own.
_FRESH_LAYERS = (
    nn.Linear,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.modules.conv._ConvNd,
    nn.Embedding,
    nn.modules.pooling._MaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
)
_FRESH = {"add", "mul", "sub", "truediv", "matmul", "linear", "bmm", "softmax", "layer_norm"}


def _private(node: fx.Node, root: nn.Module) -> bool:
    """Return whether nothing but its single user can see the tensor of a node."""
    if len(node.users) != 1:
        return False
    if node.op == "call_module":
        if isinstance(root.get_submodule(str(node.target)), _FRESH_LAYERS):
            return True
    elif node.op not in ("call_function", "call_method"):
        return False
    elif getattr(node.target, "__name__", node.target) in _FRESH:
        return True
    inputs = node.all_input_nodes
    return bool(inputs) and all(_private(source, root) for source in inputs)


# --- layers that read one input ---------------------------------------------------------------------------------------


_HELPER = "ipex_linears"
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
_CONDITIONAL = (
    ast.Lambda,
    ast.IfExp,
    ast.BoolOp,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def merge_by_source(module: nn.Module) -> tuple[list[list[str]], str | None]:
    """Merge what can be merged in a module; return the names of each group, or the reason why there is no group."""
    forward = type(module).forward
    if not isinstance(forward, types.FunctionType) or hasattr(forward, "__wrapped__"):
        return [], "the forward is decorated"
    if forward.__code__.co_freevars:
        return [], "the forward is a closure"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return [], "the source of the forward is not available"
    function = tree.body[0]
    if (
        not isinstance(function, ast.FunctionDef)
        or function.decorator_list
        or not function.args.args
    ):
        return [], "the forward is not a plain function"
    owner = function.args.args[0].arg
    groups = []
    for calls in _same_input(function, owner):
        names = list(dict.fromkeys(_attribute(call) for _, call in calls))
        members = tuple(module._modules[n] for n in names if n in module._modules)
        real = tuple(m for m in members if m is not None)
        if len(names) == len(calls) == len(real) and may_merge(real):
            groups.append((names, calls))
    if not groups:
        return [], "no linear layers of equal form are fed by the same input"
    names_of = _namespace(forward, function)
    if names_of is None:
        return [], "the forward uses names that cannot be found"
    for names, calls in groups:
        members = tuple(module._modules[name] for name in names)
        if not merge(tuple(m for m in members if m is not None)):
            continue
        _rewrite(function, owner, names, calls)
    _strip(function)
    function.name = "forward"
    source = ast.unparse(ast.fix_missing_locations(tree))
    names_of[_HELPER] = "ipex_core.nn.merged_linear:linears"
    module.__dict__["forward"] = FusedForward(module, source, names_of, None, (), ())
    return [names for names, _ in groups], None


_Calls = list[tuple[int, ast.Call]]


def _attribute(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    return call.func.attr


def _unconditional(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _CONDITIONAL):
            yield from _unconditional(child)


def _same_input(function: ast.FunctionDef, owner: str) -> list[_Calls]:
    """Return groups of calls ``owner.<layer>(name)`` that see the same value of ``name``."""
    version: dict[str, int] = defaultdict(int)
    found: dict[tuple[str, int], _Calls] = defaultdict(list)
    uses: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for position, statement in enumerate(function.body):
        if isinstance(statement, _SIMPLE):
            for node in _unconditional(statement):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == owner
                    and len(node.args) == 1
                    and isinstance(node.args[0], ast.Name)
                    and not node.keywords
                ):
                    name = node.args[0].id
                    found[name, version[name]].append((position, node))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses[node.id].append((position, id(node)))
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
                version[node.id] += 1
    return [
        calls for (name, _), calls in found.items() if len(calls) > 1 and _alone(uses[name], calls)
    ]


def _alone(uses: list[tuple[int, int]], calls: _Calls) -> bool:
    """Return whether nothing else touches the input between the first and the last call."""
    arguments = {id(call.args[0]) for _, call in calls}
    first, last = calls[0][0], calls[-1][0]
    return all(node in arguments for position, node in uses if first < position <= last)


def _rewrite(function: ast.FunctionDef, owner: str, names: list[str], calls: _Calls) -> None:
    replacements = {id(call): f"_ipex_{_attribute(call)}" for _, call in calls}

    class Replace(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            name = replacements.get(id(node))
            return node if name is None else ast.copy_location(ast.Name(name, ast.Load()), node)

    first = calls[0][1]
    argument = first.args[0]
    assert isinstance(argument, ast.Name)
    layers = ", ".join(f"{owner}.{name}" for name in names)
    targets = ", ".join(f"_ipex_{name}" for name in names)
    line = ast.parse(f"{targets} = {_HELPER}({argument.id}, {layers})").body[0]
    index = next(i for i, s in enumerate(function.body) if any(n is first for n in ast.walk(s)))
    function.body = [Replace().visit(statement) for statement in function.body]
    function.body.insert(index, line)


def _strip(function: ast.FunctionDef) -> None:
    """Remove annotations, which may name things that exist only for type checkers."""
    arguments = function.args
    for argument in [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        arguments.vararg,
        arguments.kwarg,
    ]:
        if argument is not None:
            argument.annotation = None
    function.returns = None
    for node in ast.walk(function):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(value=None)


def _namespace(forward: types.FunctionType, function: ast.FunctionDef) -> dict[str, str] | None:
    """Return where each global name of the forward comes from."""
    module = forward.__module__
    if sys.modules.get(module) is None or forward.__globals__ is not vars(sys.modules[module]):
        return None
    used = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
    if "super" in used or "__class__" in used:
        return None
    return {name: f"{module}:{name}" for name in used if name in forward.__globals__}


# --- patterns ---------------------------------------------------------------------------------------------------------


_MAX_OPS = 16
#: Code of a norm's forward and what it works on -> epsilon and offset, or None.
_norms: dict[Any, tuple[float, float] | None] = {}


def find_rms_norm(module: nn.Module, graph: fx.Graph) -> fx.Graph | None:
    """Return a graph that calls the fused norm if the module is an RMS norm, else None."""
    parameters = [(n, p) for n, p in module._parameters.items() if p is not None]
    inputs = graph.find_nodes(op="placeholder")
    if module._modules or len(parameters) != 1 or len(inputs) != 1 or len(graph.nodes) > _MAX_OPS:
        return None
    name, weight = parameters[0]
    if weight.dim() != 1 or weight.dtype not in FLOATS or weight.device.type != "cpu":
        return None
    # Constants are in the code, so modules of one code compute the same.
    key = (type(module), graph.python_code("self").src, weight.dtype, weight.shape)
    if key not in _norms:
        _norms[key] = _read_rms_norm(module, name, weight)
    found = _norms[key]
    return None if found is None else _graph(str(inputs[0].target), name, *found)


def _read_rms_norm(
    module: nn.Module, name: str, weight: torch.Tensor
) -> tuple[float, float] | None:
    """Return epsilon and offset of the RMS norm that the ATen graph of a module is, or None."""
    from ipex_core.fusion.aten import Context, graph_of
    from ipex_core.fusion.aten.norm_rotary import fuse_norms

    def run(x: torch.Tensor, weight: torch.Tensor) -> Any:
        return torch.func.functional_call(module, {name: weight}, (x,))

    x = torch.zeros(3, 5, weight.numel(), dtype=weight.dtype)
    try:
        with quiet():
            found = graph_of(run, x, torch.zeros_like(weight))
    except Exception:  # it does something else
        return None
    report = GraphReport(type(module).__name__, inference=True)
    fuse_norms(Context(found, set(), report, always=True))
    result = found.output_node().args[0]
    if not isinstance(result, fx.Node) or result.target is not torch.ops.ipex.rms_norm.default:
        return None
    source, scale, eps, offset = result.args
    return (eps, offset) if [source, scale] == found.find_nodes(op="placeholder") else None  # type: ignore[return-value]


def _graph(argument: str, weight: str, eps: float, offset: float) -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder(argument)
    parameter: Any = graph.create_node("get_attr", weight)
    graph.output(graph.call_function(functional.rms_norm, (x, parameter, eps, offset)))
    return graph


# --- patterns ---------------------------------------------------------------------------------------------------------


_ADD = (operator.add, operator.iadd, torch.add)
_MUL = (operator.mul, operator.imul, torch.mul)
_RELU = (F.relu, torch.relu)


class Rewriter:
    """Matches and replaces; collects what was fused and which children are no longer called.

    Args:
        graph: Trace of ``root``.
        root: The module.
        remove_dropout: Whether to replace calls of dropout by their inputs.
        concat_linear: Whether to merge linear layers that read the same tensor.
        fuse: Whether to apply the other patterns.
    """

    def __init__(
        self,
        graph: fx.Graph,
        root: nn.Module,
        *,
        remove_dropout: bool,
        concat_linear: bool,
        fuse: bool,
    ) -> None:
        self.graph = graph
        self.root = root
        self.remove_dropout = remove_dropout
        self.concat_linear = concat_linear
        self.fuse = fuse
        self.done: list[str] = []
        self.children: list[str] = []

    def run(self) -> tuple[list[str], list[str]]:
        """Apply all patterns; return what was fused and the children that are bypassed."""
        if self.remove_dropout:
            self._each(self._dropout)
        if self.concat_linear:
            self._each(self._concat)
        if not self.fuse:
            return self.done, self.children
        self._each(self._gated)
        self._each(self._linear_activation)
        self._each(self._linear_add)
        self._each(self._add_norm)
        self._each(self._attention)
        self._each(self._gelu)
        return self.done, self.children

    def _each(self, pattern: Callable[[fx.Node], None]) -> None:
        for node in list(self.graph.nodes):
            if node.op != "output" and (node.users or node.op == "placeholder"):
                pattern(node)

    # ---- what a node is

    def _child(self, node: fx.Node) -> nn.Module | None:
        """Return the child a node calls, if its call may be fused."""
        if node.op != "call_module":
            return None
        child = self.root._modules.get(str(node.target))
        if child is None or has_hooks(child) or "forward" in child.__dict__:
            return None
        return child

    def _is_linear(self, node: Any, packed: bool = False) -> bool:
        if not isinstance(node, fx.Node) or len(node.users) != 1:
            return False
        child = self._child(node)
        if child is None or class_of(child) is not nn.Linear:
            return False
        return not packed or (isinstance(child, OptimizedLinear) and child._packed is not None)

    def _activation(self, node: Any) -> str | None:
        """Return the name of the activation a node computes."""
        if not isinstance(node, fx.Node):
            return None
        child = self._child(node)
        if child is not None:
            if isinstance(child, nn.GELU) and class_of(child) is nn.GELU:
                return "gelu_tanh" if child.approximate == "tanh" else "gelu"
            return {nn.SiLU: "silu", nn.ReLU: "relu"}.get(type(child))
        if node.op == "call_method" and node.target == "relu":
            return "relu"
        if node.op != "call_function":
            return None
        if node.target is F.gelu:
            mode = node.kwargs.get("approximate", node.args[1] if len(node.args) > 1 else "none")
            return "gelu_tanh" if mode == "tanh" else "gelu"
        if node.target is F.silu:
            return "silu"
        return "relu" if node.target in _RELU else None

    def _operands(self, node: fx.Node, kinds: tuple[Any, ...]) -> tuple[fx.Node, fx.Node] | None:
        """Return the two tensor operands of an addition or a multiplication."""
        match = node.op == "call_function" and node.target in kinds and not node.kwargs
        if not match or len(node.args) != 2:
            return None
        a, b = node.args
        return (a, b) if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b else None

    # ---- replacing

    def _replace(self, node: fx.Node, function: Any, args: tuple[Any, ...], text: str) -> fx.Node:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(function, args)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)
        self.done.append(text)
        return new

    def _module_node(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Make a node that holds the child that another node calls."""
        with self.graph.inserting_before(before):
            return self.graph.create_node("get_attr", str(node.target))

    def _drop(self, node: fx.Node) -> None:
        """Remove a node that has no users left, remembering the child it called."""
        if node.op == "call_module":
            self.children.append(str(node.target))
        self.graph.erase_node(node)

    # ---- patterns

    def _dropout(self, node: fx.Node) -> None:
        child = self._child(node)
        if child is not None and class_of(child) in IDENTITY_DROPOUTS:
            node.replace_all_uses_with(node.all_input_nodes[0])
            self._drop(node)

    def _concat(self, node: fx.Node) -> None:
        """Merge the linear layers among the users of a node."""
        users = [
            u
            for u in node.users
            if u.op == "call_module" and u.args == (node,) and not u.kwargs and self._child(u)
        ]
        users.sort(key=list(self.graph.nodes).index)
        names = [str(u.target) for u in users]
        members = tuple(self.root.get_submodule(name) for name in names)
        if len(set(names)) != len(names) or not may_merge(members) or not merge(members):
            return
        with self.graph.inserting_before(users[0]):
            layers = [self.graph.create_node("get_attr", str(u.target)) for u in users]
            both = self.graph.call_function(linears, (node, *layers))
            parts = [
                self.graph.call_function(operator.getitem, (both, i)) for i in range(len(users))
            ]
        for user, part in zip(users, parts, strict=True):
            user.replace_all_uses_with(part)
            self.graph.erase_node(user)
        self.done.append(f"concat of {', '.join(names)}")

    def _gated(self, node: fx.Node) -> None:
        operands = self._operands(node, _MUL)
        if operands is None:
            return
        for gate, up in (operands, operands[::-1]):
            post = self._activation(gate)
            op = "silu_mul" if post == "silu" else "gelu_mul"
            if (
                post not in ("silu", "gelu", "gelu_tanh")
                or not has_kernel(op)
                or len(gate.users) != 1
            ):
                continue
            source = gate.all_input_nodes[0]
            self._replace(node, functional.act_mul, (source, up, post), f"ipex::{op}")
            self._drop(gate)
            return

    def _linear_activation(self, node: fx.Node) -> None:
        post = self._activation(node)
        if post is None or len(node.all_input_nodes) != 1:
            return
        linear = node.all_input_nodes[0]
        if not self._is_linear(linear, packed=True):
            return
        module = self._module_node(linear, node)
        args = (module, linear.args[0], post)
        if node.op == "call_module":
            self.children.append(str(node.target))
        self._replace(node, functional.linear, args, f"linear + {post}")
        self._drop(linear)

    def _linear_add(self, node: fx.Node) -> None:
        operands = self._operands(node, _ADD)
        if operands is None:
            return
        for linear, residual in (operands, operands[::-1]):
            if self._is_linear(linear, packed=True):
                module = self._module_node(linear, node)
                args = (module, linear.args[0], "none", residual)
                self._replace(node, functional.linear, args, "linear + add")
                self._drop(linear)
                return

    def _add_norm(self, node: fx.Node) -> None:
        child = self._child(node)
        if child is None or not node.args or not isinstance(node.args[0], fx.Node):
            return
        kind = class_of(child)
        if kind is nn.LayerNorm:
            function, op = functional.add_layer_norm, "add_layer_norm"
        elif kind is nn.RMSNorm:
            function, op = functional.add_rms_norm, "add_rms_norm"
        else:
            return
        total = node.args[0]
        operands = self._operands(total, _ADD)
        if operands is None or not has_kernel(op):
            return
        with self.graph.inserting_before(total):
            module = self.graph.create_node("get_attr", str(node.target))
            both = self.graph.call_function(function, (*operands, module))
            normed = self.graph.call_function(operator.getitem, (both, 0))
            summed = self.graph.call_function(operator.getitem, (both, 1))
        node.replace_all_uses_with(normed)
        self._drop(node)
        total.replace_all_uses_with(summed)
        self.graph.erase_node(total)
        self.done.append(f"ipex::{op}")

    def _attention(self, node: fx.Node) -> None:
        stock = node.op == "call_function" and node.target is F.scaled_dot_product_attention
        if stock and has_kernel("attention"):
            node.target = functional.attention
            self.done.append("ipex::attention")

    def _gelu(self, node: fx.Node) -> None:
        """Use the own GELU for calls of the function; modules were exchanged before."""
        if node.op == "call_function" and node.target is F.gelu and has_kernel("gelu"):
            node.target = functional.gelu
            self.done.append("ipex::gelu")

# SPDX-License-Identifier: Apache-2.0
"""The graph passes of ``torch.compile(backend="ipex")``: one file per family of patterns.

**Where they run.** On the ATen graph that AOTAutograd makes, as Inductor's ``joint_custom_pre_pass``: functional,
without mutation or aliases, with composite ops decomposed, before Inductor has rewritten anything. There a model spells
an RMS norm as ``mean``, ``rsqrt`` and ``mul`` however its author wrote it, so that one matcher covers all the ways of
all releases of transformers. The other levels are worse:

* On Dynamo's graph every spelling (``x.pow(2)``, ``x ** 2``, ``torch.square``, methods, functions, in-place variants,
  ``nn.Module`` calls) would be a pattern of its own, and autocast has not been applied yet.
* After Inductor's own joint passes softmax has been rewritten by scale and parts of attentions are gone; after
  freezing, linear layers already carry oneDNN's packed weights.

**Weights.** A weight is packed by an op in the graph, ``pack_linear_weight(weight)``. Freezing turns the parameter into
a constant right after the passes, and Inductor's constant folding runs the packing once. Without freezing no weight is
packed.

**Matching** is written by hand on top of `graph` rather than with ``torch._inductor.pattern_matcher``: its traced
patterns need one registration for each combination of dtypes, masks and scales, and cannot say why a near miss was not
taken, which `ipex.explain` has to say.

A pass never changes what a graph computes, so a match only has to decide two things: whether it is *exactly* the op
(shapes, dtypes, no other user of an intermediate), and whether the op is at least as fast (`ipex_core.kernels.policy`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ipex_core.fusion import Fusion, GraphReport, Reader
from ipex_core.library.spec import FLOATS, dtype_name

__all__ = [
    "CASTS",
    "Context",
    "DEVICES",
    "FLOATS",
    "PURE",
    "READER",
    "VIEWING",
    "arguments",
    "between",
    "binary",
    "describe",
    "graph_of",
    "half_of_last",
    "is_call",
    "items",
    "module_of",
    "narrowed",
    "number",
    "part_of_last",
    "same",
    "scaled",
    "shape_of",
    "static",
    "uncast",
    "val",
]


aten = torch.ops.aten
prims = torch.ops.prims

#: Where our ops run; what each device has of kernels is asked apart.
DEVICES = ("cpu", "xpu")

CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_FULL = (aten.full.default, aten.scalar_tensor.default)
_OF_CONSTANTS: Mapping[Any, Callable[..., float]] = {
    aten.lift_fresh_copy.default: lambda x: x,
    aten.mul.Tensor: operator.mul,
    aten.sqrt.default: lambda x: math.sqrt(x) if x >= 0 else math.nan,
}

#: Ops that make a constant of constants: layout and dtype changes of a weight.
PURE = frozenset(
    {
        *CASTS,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.view.default,
        aten.reshape.default,
        aten.clone.default,
        aten.cat.default,
        aten.slice.Tensor,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.detach.default,
        aten.alias.default,
    }
)

#: Ops whose result lies in the memory of their first argument.
VIEWING = frozenset(
    {
        aten.view.default,
        aten.permute.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.alias.default,
    }
)


def is_call(node: Any, *targets: Any) -> bool:
    """Return whether a node calls one of these ops."""
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def val(node: Any) -> Tensor | None:
    """Return the fake tensor a node stands for, or None."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def shape_of(node: Any) -> tuple[Any, ...] | None:
    """Return the shape of a tensor node; sizes may be symbolic."""
    value = val(node)
    return None if value is None else tuple(value.shape)


def same(left: Sequence[Any] | None, right: Sequence[Any] | None) -> bool:
    """Return whether sizes are known to be equal, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if left is None or right is None or len(left) != len(right):
        return False
    return all(statically_known_true(a == b) for a, b in zip(left, right, strict=True))


def static(shape: Sequence[Any]) -> bool:
    """Return whether all sizes are numbers."""
    return all(isinstance(s, int) for s in shape)


def uncast(node: Any) -> Any:
    """Step over conversions to a wider floating dtype, which lose nothing, and over copies."""
    while is_call(node, *CASTS, aten.clone.default, aten.alias.default):
        inner, outer = val(node.args[0]), val(node)
        if inner is None or outer is None or inner.dtype not in FLOATS or outer.dtype not in FLOATS:
            break
        if inner.dtype != outer.dtype and inner.dtype.itemsize >= outer.dtype.itemsize:
            break
        node = node.args[0]
    return node


def narrowed(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """Return the conversion of a node to a dtype, if that is the only thing done with it."""
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    value = val(user)
    return user if is_call(user, *CASTS) and value is not None and value.dtype == dtype else None


def between(node: Any, source: fx.Node) -> list[fx.Node]:
    """Return a chain of first arguments from a node down to a source, without the source."""
    chain = []
    while node is not source:
        chain.append(node)
        node = node.args[0]
    return chain


def number(value: Any) -> float | None:
    """Return a scalar argument: a Python number, or a 0-D tensor that the graph fills with one."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    value = uncast(value)
    if shape_of(value) != ():
        return None
    if is_call(value, *_FULL):
        fill = value.args[-1]
        return float(fill) if isinstance(fill, (int, float)) else None
    return _constant(value)


def _constant(value: Any) -> float | None:
    """Return what a 0-D node made of constants of the graph is, or None."""
    if isinstance(value, (int, float)):
        return float(value)
    if is_call(value, *_OF_CONSTANTS) and not value.kwargs:
        args = [_constant(arg) for arg in value.args]
        return None if None in args else float(_OF_CONSTANTS[value.target](*args))
    if is_call(value, *CASTS):
        inner, cast = _constant(value.args[0]), val(value)
        if inner is None or cast is None or cast.dtype not in FLOATS:
            return None
        with no_dispatch():
            return float(torch.tensor(inner, dtype=torch.float64).to(cast.dtype))
    if not isinstance(value, fx.Node) or value.op != "get_attr":
        return None
    tensor = getattr(value.graph.owning_module, str(value.target), None)
    if not isinstance(tensor, Tensor) or tensor.dim() or tensor.dtype not in FLOATS:
        return None
    with no_dispatch():
        return float(tensor.item())


def binary(node: Any, *targets: Any) -> tuple[Any, Any] | None:
    """Return the two operands of an op without further arguments (``alpha``)."""
    if not is_call(node, *targets) or len(node.args) != 2 or node.kwargs:
        return None
    return node.args[0], node.args[1]


def scaled(node: Any) -> tuple[fx.Node, float] | None:
    """Match ``x * number`` or ``x / number``; return x and the factor."""
    found = READER.find(("scale", "x", "#factor"), node)
    return None if found is None else (found["x"], found["factor"])


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a call of an op by their names, in the order of its schema, with defaults."""
    declared = node.target._schema.arguments  # type: ignore[union-attr]
    given = {a.name: a.default_value for a in declared}
    given.update(zip(tuple(given), node.args, strict=False))
    return {**given, **node.kwargs}


def part_of_last(node: Any) -> tuple[fx.Node, int, int, fx.Node] | None:
    """Match a part of the last dimension; return what is cut, its first and last place, and the op that cuts."""
    if is_call(node, aten.slice.Tensor):
        cut, given = node, arguments(node)
        start, end, step = given["start"] or 0, given["end"], given["step"]
    elif is_call(node, operator.getitem) and is_call(node.args[0], aten.split.Tensor):
        cut, step = node.args[0], 1
        given = arguments(cut)
        if not isinstance(given["split_size"], int):
            return None
        start, end = (i * given["split_size"] for i in (node.args[1], node.args[1] + 1))
    else:
        return None
    shape = shape_of(cut.args[0])
    if not shape or not isinstance(shape[-1], int) or step != 1:
        return None
    size = shape[-1]
    end = size if end is None else end
    if given["dim"] not in (-1, len(shape) - 1) or not isinstance(start, int):
        return None
    if not isinstance(end, int):
        return None
    start, end = (i + size if i < 0 else min(i, size) for i in (start, end))
    return cut.args[0], start, end, cut


def half_of_last(node: Any) -> tuple[fx.Node, int, fx.Node] | None:
    """Match one half of the last dimension; return what is halved, 0 or 1, and the op that cuts it."""
    part = part_of_last(node)
    if part is None:
        return None
    source, start, end, cut = part
    size = source.meta["val"].shape[-1]
    halves = ((0, size // 2), (size // 2, size))
    return (source, int(start > 0), cut) if size % 2 == 0 and (start, end) in halves else None


#: Ops that descriptions name.
_NAMED = frozenset(
    (
        *(aten.add.Tensor, aten.add.Scalar, aten.mul.Tensor, aten.mul.Scalar, aten.sub.Tensor),
        *(aten.div.Tensor, aten.div.Scalar, aten.pow.Tensor_Scalar),
        *(aten.sqrt.default, aten.rsqrt.default),
        *(aten.relu.default, aten.silu.default, aten.sigmoid.default, aten.erf.default),
        *(aten.tanh.default, aten.exp.default, aten.neg.default),
        *(aten.where.self, aten.eq.Scalar, aten.logical_not.default),
    )
)
_REDUCTIONS: Mapping[Any, str] = {
    aten.mean.dim: "row_mean",
    aten.sum.dim_IntList: "row_sum",
    aten.amax.default: "row_max",
    aten.any.dim: "row_any",
}
#: Op with several results, and which of them it is.
_RESULTS: Mapping[Any, str] = {
    (aten.max.dim, 0): "row_max",
    (aten.var_mean.correction, 0): "row_variance",
    (aten.var_mean.correction, 1): "row_mean",
}


class _Reader(Reader):
    """Reads graphs of ATen ops."""

    def call(self, value: Any) -> tuple[str, tuple[Any, ...], tuple[Any, ...]] | None:
        if not isinstance(value, fx.Node) or value.op != "call_function":
            return None
        half = half_of_last(value)
        if half is not None:
            return ("low", "high")[half[1]], half[:1], tuple(dict.fromkeys((value, half[2])))
        if value.target is aten.full.default:
            return "full", value.args[1:2], ()
        if value.target is aten.cat.default:
            parts, rank = arguments(value)["tensors"], len(shape_of(value) or ())
            if arguments(value)["dim"] in (-1, rank - 1) and len(parts) == 2:
                return "halves", tuple(parts), (value,)
            return None
        name, node = _REDUCTIONS.get(value.target), value
        if value.target is operator.getitem and isinstance(value.args[0], fx.Node):
            node = value.args[0]
            name = _RESULTS.get((node.target, value.args[1]))
        if name is not None:
            given = arguments(node)
            plain = given.get("correction", 0) == 0 and given.get("dtype") is None
            rank = len(shape_of(node.args[0]) or ())
            if not plain or not given["keepdim"] or given["dim"] not in _last(rank):
                return None
            return name, node.args[:1], tuple(dict.fromkeys((value, node)))
        if value.target not in _NAMED or value.kwargs:
            return None
        return value.target._opname, value.args, (value,)

    def number(self, value: Any) -> float | None:
        return number(value)

    def source(self, value: Any) -> tuple[Any, tuple[Any, ...]]:
        source = uncast(value)
        return source, tuple(between(value, source))


def _last(rank: int) -> tuple[Any, ...]:
    """Return the ways to name the last of some dimensions."""
    return -1, rank - 1, [-1], [rank - 1]


READER = _Reader()


class _Recorder(TorchDispatchMode):
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self._tensors: list[Tensor] = []  # an id is unique only while its tensor lives
        self._nodes: dict[int, fx.Node] = {}
        for number, tensor in enumerate(tensors):
            self.put(tensor, self.graph.placeholder(f"x{number}"))

    def put(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        self._tensors.append(tensor)
        self._nodes[id(tensor)] = node

    def node(self, tensor: Tensor) -> fx.Node:
        return self._nodes[id(tensor)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise ValueError(f"graph_of: ops must not write to arguments, got {func}")
        given = tree_map_only(Tensor, self.node, (args, kwargs))
        result = func(*args, **kwargs)
        call = self.graph.call_function(func, *given)
        for index, value in enumerate(result) if isinstance(result, (tuple, list)) else ():
            self.put(value, self.graph.call_function(operator.getitem, (call, index)))
        if isinstance(result, Tensor):
            self.put(result, call)
        elif not isinstance(result, (tuple, list)):
            raise ValueError(f"graph_of: ops must return tensors, got {result!r} of {func}")
        return result


def graph_of(function: Callable[..., Tensor], *tensors: Tensor) -> fx.Graph:
    """Return the ops of ATen that a function calls with these tensors.

    ``make_fx`` would replace methods of ``nn.Module`` for all threads meanwhile.

    Raises:
        Exception: Whatever the function raises; ValueError if an op writes to an argument or returns a number; KeyError
            for a tensor from elsewhere.
    """
    recorder = _Recorder(tensors)
    with torch.no_grad(), recorder:
        result = function(*tensors)
    recorder.graph.output(recorder.node(result))
    return recorder.graph


def items(node: fx.Node, index: int) -> list[fx.Node]:
    """Return the nodes that take one result of an op with several."""
    return [u for u in node.users if u.target is operator.getitem and u.args[1] == index]


def describe(node: Any) -> str:
    """Return shape and dtype of a node for messages."""
    value = val(node)
    if value is None:
        return str(node)
    sizes = ", ".join(map(str, value.shape))
    return f"{dtype_name(value.dtype)}[{sizes}]"


def module_of(node: fx.Node) -> str:
    """Return the path of the innermost module that a node comes from."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    return (
        path.removeprefix("L['self']")
        .replace("._modules['", ".")
        .replace("']", "")
        .replace("L['fn']", "")
        .lstrip(".")
    )


# --- a graph while passes work on it ----------------------------------------------------------------------------------


@dataclasses.dataclass
class Context:
    """One graph while the passes work on it.

    Attributes:
        graph: The graph.
        constants: Placeholders that freezing turns into constants.
        report: Where decisions go.
        always: Whether the tables of measured speed are left aside.
        disabled: Names of patterns that are off.
        kernels: Tells whether an op has a native kernel.
        weights: For linear nodes made here: the constant weight ``[N, K]`` and the bias.
    """

    graph: fx.Graph
    constants: set[fx.Node]
    report: GraphReport
    always: bool = False
    disabled: frozenset[str] = frozenset()
    kernels: Callable[[str], bool] = lambda op: True
    weights: dict[fx.Node, tuple[fx.Node, fx.Node | None]] = dataclasses.field(default_factory=dict)

    def nodes(self, *targets: Any) -> Iterator[fx.Node]:
        """Yield the nodes that call one of these ops, in the order of the graph, as long as they are in it."""
        wanted = set(targets)
        for node in [n for n in self.graph.nodes if n.op == "call_function" and n.target in wanted]:
            if not node._erased:
                yield node

    def is_constant(self, node: Any) -> bool:
        """Return whether freezing makes a constant of a node."""
        if not isinstance(node, fx.Node):
            return False
        if node.op == "placeholder":
            return node in self.constants
        if node.op == "get_attr":
            return True
        return (
            node.op == "call_function"
            and node.target in PURE
            and bool(node.all_input_nodes)
            and all(map(self.is_constant, node.all_input_nodes))
        )

    def reject(self, pattern: str, node: fx.Node, op: str, reason: str) -> None:
        """Record why a pattern leaves a place alone."""
        self.report.add(Fusion(pattern, False, op, reason, module_of(node), describe(node)))

    def outside_user(self, interior: Iterable[fx.Node], root: fx.Node) -> fx.Node | None:
        """Return an intermediate result that something outside the match uses, or None."""
        inside = {*interior, root}
        for node in inside:
            if node is not root and any(user not in inside for user in node.users):
                return node
        return None

    def call(
        self, before: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}
    ) -> fx.Node:
        """Insert a call in front of a node, with its fake result."""
        with self.graph.inserting_before(before):
            node = self.graph.call_function(target, args, dict(kwargs))
        fake_args, fake_kwargs = fx.node.map_arg((args, dict(kwargs)), lambda n: n.meta.get("val"))
        node.meta.update(
            {k: before.meta[k] for k in ("stack_trace", "nn_module_stack") if k in before.meta}
        )
        # Without Python's decompositions some ops of torch (padding) fix sizes that vary.
        with enable_python_dispatcher(), self.fake_mode():
            node.meta["val"] = target(*fake_args, **fake_kwargs)
        return node

    def fake_mode(self) -> Any:
        """Return the context in which ops run on the fake results of the graph."""
        from torch._guards import detect_fake_mode

        mode = detect_fake_mode([v for v in map(val, self.graph.nodes) if v is not None][:8])
        return mode if mode is not None else contextlib.nullcontext()

    def replace(
        self,
        pattern: str,
        root: fx.Node,
        interior: Iterable[fx.Node],
        target: Any,
        args: tuple[Any, ...],
        text: str,
        kwargs: Mapping[str, Any] = {},
        cut: int | None = None,
    ) -> fx.Node | None:
        """Put one op in the place of a match, unless something else needs what lies inside.

        Args:
            pattern: Name of the pattern.
            root: The node whose value the op computes.
            interior: Nodes between the inputs of the op and the root.
            target: The op.
            args: Its arguments.
            text: What was fused.
            kwargs: Its keyword arguments.
            cut: How much of the last dimension of its result is wanted, if not all.

        Returns:
            The new node, or None where the match was rejected.
        """
        interior = list(interior)
        op = str(target).removesuffix(".default").replace(".", "::")
        blocker = self.outside_user(interior, root)
        if blocker is not None:
            self.reject(pattern, root, op, f"{blocker.name} inside the pattern has another user")
            return None
        node = call = self.call(root, target, args, kwargs)
        if cut is not None:
            node = self.call(
                root, aten.slice.Tensor, (call, len(call.meta["val"].shape) - 1, 0, cut)
            )
        result, expected = val(node), val(root)
        if (
            result is None
            or expected is None
            or result.dtype != expected.dtype
            or not same(result.shape, expected.shape)
        ):
            got, want = describe(node), describe(root)
            self.drop([call, node])
            self.reject(pattern, root, op, f"the op gives {got}, the graph has {want}")
            return None
        root.replace_all_uses_with(node)
        if not same(result.stride(), expected.stride()):
            self._lay_out(node)
        self.fused(pattern, root, call, text)
        self.drop([root, *interior])
        return node

    def _lay_out(self, node: fx.Node) -> None:
        """Tell the views of a node that it lies otherwise now; where a view cannot be one any more, it copies."""
        with self.fake_mode():
            for user in node.users:
                if user.target not in VIEWING:
                    continue
                args = fx.node.map_arg(user.args, lambda n: n.meta.get("val"))
                try:
                    user.meta["val"] = user.target(*args)
                except (RuntimeError, ValueError):
                    user.target = aten.reshape.default
                    user.meta["val"] = user.target(*args)
                self._lay_out(user)

    def fused(self, pattern: str, root: fx.Node, node: fx.Node, text: str) -> None:
        """Record a replacement."""
        op = str(node.target).removesuffix(".default").replace(".", "::")
        self.report.add(Fusion(pattern, True, op, text, module_of(root), describe(root)))

    def drop(self, nodes: Iterable[fx.Node]) -> None:
        """Remove nodes that have no users left, last ones first."""
        pending = set(nodes)
        while True:
            dead = [n for n in pending if not n.users or n._erased]
            if not dead:
                return
            for node in dead:
                if not node._erased:
                    self.graph.erase_node(node)
                pending.discard(node)
                self.weights.pop(node, None)

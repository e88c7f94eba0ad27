# SPDX-License-Identifier: Apache-2.0
"""From a fused graph to programs: one instruction a node, and calls of torch for what has none."""

from __future__ import annotations

import dataclasses
import operator
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._library.fake_class_registry import FakeScriptObject

from ipex_core.fusion.aten import arguments, val
from ipex_core.kernels.policy import has_kernel
from ipex_core.library.kernels import specs
from ipex_core.library.spec import FLOATS
from ipex_core.precompiled.graph import INT8_CONV
from ipex_core.precompiled.pointwise import Chain, find_chains
from ipex_core.precompiled.writes import WRAPPED, writing
from ipex_core.program import Program, ProgramBuilder, Register

aten = torch.ops.aten
prims = torch.ops.prims


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor between two steps."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A number that depends on sizes that vary: the index of its expression."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """A step that runs a program.

    Attributes:
        program: What runs.
        inputs: A `Slot` or a `Size` for each input of the program.
        results: Slots for its outputs.
        frees: Slots that nothing reads afterwards.
    """

    program: Program
    inputs: tuple[Slot | Size, ...]
    results: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A step that calls an op which has no instruction.

    Attributes:
        op: The op of torch.
        args: Its arguments, with `Slot` and `Size` in the places of tensors and numbers.
        kwargs: Its arguments by name.
        results: Slots for its results; -1 for one that nothing reads.
        frees: Slots that nothing reads afterwards.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    results: tuple[int, ...]
    frees: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The op as ``namespace::name.overload``."""
        return op_name(self.op)


def op_name(op: Any) -> str:
    """Return an op as ``namespace::name.overload``."""
    return f"{op.namespace}::{op._opname}.{op._overloadname}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a model does at a call.

    Attributes:
        steps: Programs and calls, in order.
        constants: Slot -> tensor that calls read.
        inputs: Slots of the tensors that are given.
        outputs: A `Slot`, a `Size` or a plain value for each leaf of the results.
        copied: Which of the outputs are copied, since they are constants.
        slots: Number of slots.
        sizes: Texts of the expressions of sizes that vary.
    """

    steps: tuple[Run | Call, ...]
    constants: dict[int, Tensor]
    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    copied: frozenset[int]
    slots: int
    sizes: tuple[str, ...]

    @property
    def calls(self) -> Counter[str]:
        """Name of an op without an instruction -> how often it is called."""
        called = (step for step in self.steps if isinstance(step, Call))
        return Counter(step.name for step in called if step.op is not CHOSEN)

    @property
    def linears(self) -> int:
        """How many linear layers torch computes, since it was measured to be faster."""
        return sum(isinstance(step, Call) and step.op is CHOSEN for step in self.steps)

    @property
    def int8_convolutions(self) -> int:
        """How many instructions are convolutions on 8-bit codes."""
        programs = (step.program for step in self.steps if isinstance(step, Run))
        return sum(one.op.startswith("int8_conv") for p in programs for one in p.instructions)

    @property
    def instructions(self) -> int:
        """The number of instructions in all programs."""
        return sum(len(s.program.instructions) for s in self.steps if isinstance(s, Run))


#: Stands for a linear layer only where torch's was chosen: elsewhere graphs have it in parts.
CHOSEN = aten.linear.default
#: Ops that give a tensor another shape.
_RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
_SAME = (aten.alias.default, aten.detach.default)


def lower(module: fx.GraphModule, forms: Sequence[str | None]) -> Plan:
    """Write a graph as programs, with calls of torch between them where an op has no instruction.

    Args:
        module: A fused graph with its constants.
        forms: For each result the layout it must have, of `forms_of`.
    """
    return _Lowering(module, forms).plan()


def is_int8_conv(node: fx.Node) -> bool:
    """Return whether a node is a convolution of static INT8."""
    target: Any = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and (target.name() == INT8_CONV)
    )


def is_object(node: fx.Node) -> bool:
    """Return whether an input of a graph is an object of another library, which ops take."""
    return node.op == "placeholder" and isinstance(node.meta.get("val"), FakeScriptObject)


class _Unfit(Exception):
    """A node that the instruction of its op does not take."""


class _Lowering:
    def __init__(self, module: fx.GraphModule, forms: Sequence[str | None]) -> None:
        self.module = module
        self.forms = forms
        self.graph = module.graph
        self.chains = find_chains(self.graph)
        #: Node inside a chain -> the root of the chain.
        self.inner = {node: chain.root for chain in self.chains.values() for node in chain.inner}
        self.builder = ProgramBuilder()
        self.registers: dict[fx.Node, Register] = {}  # of this segment
        self.imports: list[Any] = []  # of this segment: Slot or Size
        self.of_size: dict[int, Register] = {}
        self.written: list[fx.Node] = []
        self.slots: dict[fx.Node, int] = {}
        self.count = 0
        self.sizes: dict[str, int] = {}
        self.constants: dict[int, Tensor] = {}
        self.numbers: dict[int, Tensor] = {}
        self.steps: list[Run | Call] = []
        self.done: set[fx.Node] = set()

    # ---- values

    def slot(self, node: fx.Node) -> int:
        if node not in self.slots:
            self.slots[node] = self.count
            self.count += 1
        return self.slots[node]

    def size(self, value: Any) -> int:
        """Return the number of an expression of sizes that vary."""
        return self.sizes.setdefault(str(value.node.expr), len(self.sizes))

    def constant(self, node: fx.Node) -> Tensor | None:
        if node.op != "get_attr":
            return None
        value: Any = self.module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return value if isinstance(value, Tensor) else None

    def register(self, node: Any) -> Register:
        """Return the register of a tensor in the program that is being written."""
        if not isinstance(node, fx.Node):
            raise _Unfit
        if node in self.registers:
            return self.registers[node]
        value = self.constant(node)
        if value is not None:
            if value.device.type != "cpu" or value.layout != torch.strided:
                raise _Unfit
            register = self.builder.constant(value)
        elif node in self.slots and val(node) is not None:
            register = self.builder.input(node.name)
            self.imports.append(Slot(self.slots[node]))
        else:
            raise _Unfit
        self.registers[node] = register
        return register

    def integer(self, value: Any) -> Any:
        """Return a number, or the register of one that varies."""
        if isinstance(value, fx.Node):
            value = value.meta.get("val")
        if isinstance(value, torch.SymInt):
            index = self.size(value)
            if index not in self.of_size:
                self.of_size[index] = self.builder.input_int(f"size {index}")
                self.imports.append(Size(index))
            return self.of_size[index]
        if isinstance(value, int):
            return value
        raise _Unfit

    def number(self, value: int) -> Register:
        """Return the register of a constant of no dimensions."""
        if value not in self.numbers:
            self.numbers[value] = torch.tensor(value)
        return self.builder.constant(self.numbers[value])

    def integers(self, values: Any) -> list[Any]:
        return [self.integer(value) for value in values]

    # ---- the walk

    def plan(self) -> Plan:
        inputs: list[int] = []
        for node in self.graph.nodes:
            if node.op == "placeholder":
                if val(node) is not None or is_object(node):
                    inputs.append(self.slot(node))
            elif node.op == "output":
                return self.finish(node, tuple(inputs))
            elif node.op == "call_function" and node not in self.inner:
                if val(node) is None and isinstance(
                    node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool)
                ):
                    continue
                if node.target is operator.getitem and (
                    node in self.registers or node in self.slots
                ):
                    continue  # written with the op whose result it is
                if not self.write(node):
                    self.call(node)
            self.done.add(node)
        raise AssertionError("a graph without results")

    def write(self, node: fx.Node) -> bool:
        """Append instructions for a node, unless it has none."""
        chain = self.chains.get(node)
        rule = _RULES.get(node.target)
        try:
            if chain is not None:
                result: Any = self.chain(chain)
            elif rule is not None:
                result = rule(self, node)
            elif getattr(node.target, "namespace", "") == "ipex":
                result = self.own(node)
            elif is_int8_conv(node):
                result = self.int8_conv(node)
            else:
                return False
        except _Unfit:
            return False
        if isinstance(result, tuple):
            for user in node.users:
                if user.target is operator.getitem:
                    self.registers[user] = result[user.args[1]]  # type: ignore[index]
                    self.written.append(user)
        else:
            self.registers[node] = result
            self.written.append(node)
        return True

    def chain(self, chain: Chain) -> Register:
        inputs = [self.register(node) for node in chain.inputs]
        if not inputs:
            raise _Unfit
        register: Register = self.builder.call(
            "pointwise", inputs, list(chain.code), list(chain.constants), chain.dtype
        )
        return register

    def own(self, node: fx.Node) -> Any:
        """Append an instruction for an op of ours."""
        name = node.target._opname  # type: ignore[union-attr]
        if name not in specs() or not has_kernel(name) or node.target._overloadname != "default":  # type: ignore[union-attr]
            raise _Unfit
        args = [self.argument(value) for value in node.args]
        kwargs = {key: self.argument(value) for key, value in node.kwargs.items()}
        return self.builder.call(name, *args, **kwargs)

    def int8_conv(self, node: fx.Node) -> Any:
        """Append a convolution on codes, into the memory of its residual where nothing else reads that."""
        given = arguments(node)
        values = [self.argument(value) for value in given.values()]
        free = self.dies(node, given["residual"])
        return self.builder.call("int8_conv_sum_" if free else "int8_conv", *values)

    def dies(self, node: fx.Node, value: Any) -> bool:
        """Return whether a tensor has memory of its own and ``node`` is the last to read it, once."""
        if not isinstance(value, fx.Node) or not is_int8_conv(value):
            return False
        if list(node.args).count(value) + list(node.kwargs.values()).count(value) != 1:
            return False
        others = [user for user in value.users if user is not node]
        return all(user in self.done and is_int8_conv(user) for user in others)

    def argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self.register(value) if val(value) is not None else self.integer(value)
        if isinstance(value, (list, tuple)):
            return [self.argument(one) for one in value]
        return self.integer(value) if isinstance(value, torch.SymInt) else value

    # ---- steps

    def flush(self) -> None:
        """End the program that is being written."""
        kept = [
            node
            for node in self.written
            if any(
                user not in self.done and user not in self.registers for user in self.users(node)
            )
        ]
        if kept:
            program = self.builder.build([self.registers[node] for node in kept])
            self.steps.append(
                Run(program, tuple(self.imports), tuple(self.slot(node) for node in kept))
            )
        self.builder = ProgramBuilder()
        self.registers, self.imports, self.of_size, self.written = {}, [], {}, []

    def users(self, node: fx.Node) -> list[fx.Node]:
        """Return what reads a node: for a node inside a chain, its root."""
        found = []
        for user in node.users:
            while user in self.inner:
                user = self.inner[user]
            found.append(user)
        return found

    def call(self, node: fx.Node) -> None:
        """Append a step for an op without an instruction."""
        if node.target is operator.getitem:
            raise AssertionError(f"a result of {node.args[0]} that is nowhere")
        self.flush()
        op: Any = node.target
        positional, named = node.args, dict(node.kwargs)
        if op is WRAPPED:
            positional = ()
            op, named = writing(node)
        args = tuple(self.outer(value) for value in positional)
        kwargs = tuple((key, self.outer(value)) for key, value in named.items())
        found = node.meta.get("val")
        if isinstance(found, (list, tuple)):
            results = [-1] * len(found)
            for user in node.users:
                if user.target is operator.getitem:
                    results[user.args[1]] = self.slot(user)  # type: ignore[index]
        else:
            results = [self.slot(node)]
        self.steps.append(Call(op, args, kwargs, tuple(results)))

    def outer(self, value: Any) -> Any:
        """Return an argument of a step."""
        if isinstance(value, fx.Node):
            held = self.constant(value)
            if held is not None:
                if value not in self.slots:
                    self.constants[self.slot(value)] = held
                return Slot(self.slots[value])
            if val(value) is None and not is_object(value):
                return self.outer(value.meta.get("val"))
            return Slot(self.slots[value])
        if isinstance(value, torch.SymInt):
            return Size(self.size(value))
        if isinstance(value, (list, tuple)):
            return tuple(map(self.outer, value))
        return value

    def finish(self, node: fx.Node, inputs: tuple[int, ...]) -> Plan:
        leaves = node.args[0]
        assert isinstance(leaves, (list, tuple))
        leaves = self.laid_out(node, leaves)
        self.flush()
        outputs = tuple(self.outer(leaf) for leaf in leaves)
        copied = frozenset(
            i for i, leaf in enumerate(leaves) if isinstance(leaf, fx.Node) and self.is_kept(leaf)
        )
        kept = {one.index for one in outputs if isinstance(one, Slot)} | set(self.constants)
        return Plan(
            tuple(_with_frees(self.steps, kept)),
            self.constants,
            inputs,
            outputs,
            copied,
            self.count,
            tuple(self.sizes),
        )

    def laid_out(self, node: fx.Node, leaves: Sequence[Any]) -> list[Any]:
        """Return the results in the layouts that users rely on; a kernel may give another."""
        changed: list[Any] = []
        for leaf, form in zip(leaves, self.forms, strict=True):
            made = isinstance(leaf, fx.Node) and leaf.op == "call_function"
            if made and form is not None and val(leaf) is not None:
                with self.graph.inserting_before(node):
                    same = self.graph.call_function(aten.alias.default, (leaf,))
                same.meta["val"] = val(leaf)
                try:
                    self.registers[same] = self.builder.call(form, self.register(leaf))
                except _Unfit:
                    self.graph.erase_node(same)
                else:
                    self.written.append(same)
                    leaf = same
            changed.append(leaf)
        node.args = (changed,)
        return changed

    def is_kept(self, node: fx.Node) -> bool:
        """Return whether a result may lie in the memory of a constant."""
        while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
            if node.target not in _VIEWS:
                return False
            node = node.args[0]
        return node.op == "get_attr"


def _with_frees(steps: Sequence[Run | Call], kept: set[int]) -> list[Run | Call]:
    last: dict[int, int] = {}
    for number, step in enumerate(steps):
        values = step.inputs if isinstance(step, Run) else (step.args, [v for _, v in step.kwargs])
        for index in (*_slots(values), *(i for i in step.results if i >= 0)):
            last[index] = number
    frees: dict[int, list[int]] = {}
    for index, number in last.items():
        if index not in kept:
            frees.setdefault(number, []).append(index)
    return [
        dataclasses.replace(step, frees=tuple(sorted(frees.get(number, ()))))
        for number, step in enumerate(steps)
    ]


def _slots(value: Any) -> list[int]:
    if isinstance(value, Slot):
        return [value.index]
    if isinstance(value, (list, tuple)):
        return [index for one in value for index in _slots(one)]
    return []


# --- rules ------------------------------------------------------------------------------------------------------------


_Rule = Callable[[_Lowering, fx.Node], Any]
_RULES: dict[Any, _Rule] = {}


def _rule(*targets: Any) -> Callable[[_Rule], _Rule]:
    def keep(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(targets, rule))
        return rule

    return keep


def _dtype_of(node: Any) -> torch.dtype | None:
    found = val(node)
    return None if found is None else found.dtype


@_rule(*_RESHAPES)
def _reshape(low: _Lowering, node: fx.Node) -> Any:
    found = val(node)
    assert found is not None
    sizes = [low.integer(size) for size in found.shape]
    if 0 in [size for size in sizes if isinstance(size, int)]:  # 0 keeps a size
        raise _Unfit
    varying = [i for i, size in enumerate(sizes) if not isinstance(size, int)]
    if len(varying) == 1:
        sizes[varying[0]] = -1
    return low.builder.call("reshape", low.register(node.args[0]), sizes)


#: Ops that an instruction computes from the same arguments.
_ALIKE: dict[Any, str] = {
    aten.permute.default: "permute",
    aten.transpose.int: "transpose",
    aten.expand.default: "expand",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
}


@_rule(*_ALIKE)
def _alike(low: _Lowering, node: fx.Node) -> Any:
    return low.builder.call(_ALIKE[node.target], *map(low.argument, node.args))


#: Dtypes that an instruction can name.
_NAMED = (
    *(*FLOATS, torch.float64, torch.float8_e5m2, torch.float8_e4m3fn, torch.float8_e8m0fnu),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
)


@_rule(prims.convert_element_type.default)
def _cast(low: _Lowering, node: fx.Node) -> Any:
    x, dtype = node.args
    if dtype not in _NAMED:  # complex numbers, say
        raise _Unfit
    return low.builder.call("cast", low.register(x), dtype)


@_rule(aten.t.default)
def _t(low: _Lowering, node: fx.Node) -> Any:
    found = val(node)
    x = low.register(node.args[0])
    return x if found is None or found.dim() != 2 else low.builder.call("permute", x, [1, 0])


@_rule(aten.squeeze.dims)
def _squeeze_dims(low: _Lowering, node: fx.Node) -> Any:
    x, found = low.register(node.args[0]), val(node.args[0])
    assert found is not None
    dims: Any = node.args[1]
    for dim in sorted((d % found.dim() for d in dims), reverse=True):
        x = low.builder.call("squeeze", x, dim)
    return x


@_rule(aten.slice.Tensor)
def _slice(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    start = 0 if a["start"] is None else a["start"]
    end = 2**63 - 1 if a["end"] is None else a["end"]
    numbers = [low.integer(value) for value in (a["dim"], start, end, a["step"])]
    return low.builder.call("slice", low.register(a["self"]), *numbers)


@_rule(aten.select.int)
def _select(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    return low.builder.call("select", low.register(a["self"]), a["dim"], low.integer(a["index"]))


@_rule(aten.split_with_sizes.default, aten.split.Tensor)
def _split(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    x, dim, parts, start = low.register(a["self"]), a["dim"], [], 0
    for part in node.meta["val"]:
        if not isinstance(part.shape[dim], int):
            raise _Unfit
        parts.append(low.builder.call("slice", x, dim, start, start + part.shape[dim], 1))
        start += part.shape[dim]
    return tuple(parts)


@_rule(aten.unbind.int)
def _unbind(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    x = low.register(a["self"])
    return tuple(low.builder.call("select", x, a["dim"], i) for i in range(len(node.meta["val"])))


@_rule(*_SAME)
def _same(low: _Lowering, node: fx.Node) -> Any:
    return low.register(node.args[0])


@_rule(aten.clone.default)
def _clone(low: _Lowering, node: fx.Node) -> Any:
    if any(user.op == "output" for user in _through_views(node)):
        raise _Unfit  # the caller may write to it
    form = node.kwargs.get("memory_format")
    if form == torch.channels_last:
        return low.builder.call("channels_last", low.register(node.args[0]))
    if form in (None, torch.preserve_format):
        return low.register(node.args[0])  # nothing in the graph writes
    return low.builder.call("contiguous", low.register(node.args[0]))


def _through_views(node: fx.Node) -> list[fx.Node]:
    found, edge = [], [node]
    while edge:
        for user in edge.pop().users:
            found.append(user)
            if user.target in _VIEWS:
                edge.append(user)
    return found


@_rule(aten.cat.default)
def _cat(low: _Lowering, node: fx.Node) -> Any:
    tensors = node.args[0]
    found = [val(one) for one in tensors]  # type: ignore[union-attr]
    out = val(node)
    fits = all(one is not None and out is not None and one.dtype == out.dtype for one in found)
    if not fits or len({one.dim() for one in found if one is not None}) != 1:
        raise _Unfit
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    return low.builder.call("cat", [low.register(one) for one in tensors], dim)  # type: ignore[union-attr]


@_rule(aten.constant_pad_nd.default)
def _pad(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    if not isinstance(a["value"], (int, float)) or _dtype_of(node) not in FLOATS:
        raise _Unfit
    return low.builder.call(
        "pad", low.register(a["self"]), low.integers(a["pad"]), float(a["value"])
    )


@_rule(aten.embedding.default)
def _embedding(low: _Lowering, node: fx.Node) -> Any:
    weight, ids = node.args[:2]
    if _dtype_of(ids) not in (torch.int32, torch.int64):
        raise _Unfit
    return low.builder.call("embedding", low.register(weight), low.register(ids))


def _pair(values: Any, default: Any = None) -> list[int]:
    if not values:
        values = default
    if any(not isinstance(value, int) for value in values):
        raise _Unfit
    return list(values) if len(values) == 2 else list(values) * 2


@_rule(aten.max_pool2d_with_indices.default, aten.max_pool2d.default, aten.avg_pool2d.default)
def _pool(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    found = val(a["self"])
    if found is None or found.dim() != 4 or found.dtype not in FLOATS:
        raise _Unfit
    several = node.target is aten.max_pool2d_with_indices.default
    if several and any(u.target is operator.getitem and u.args[1] == 1 for u in node.users):
        raise _Unfit
    kernel = _pair(a["kernel_size"])
    window = (kernel, _pair(a["stride"], kernel), _pair(a["padding"]))
    x, ceil = low.register(a["self"]), bool(a["ceil_mode"])
    if node.target is aten.avg_pool2d.default:
        rest = (bool(a["count_include_pad"]), a["divisor_override"])
        return low.builder.call("avg_pool2d", x, *window, ceil, *rest)
    pooled = low.builder.call("max_pool2d", x, *window, _pair(a["dilation"]), ceil)
    return (pooled,) if several else pooled


@_rule(aten.convolution.default)
def _depthwise(low: _Lowering, node: fx.Node) -> Any:
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    found = val(x)
    plain = low.constant(weight) if isinstance(weight, fx.Node) else None
    if found is None or found.dim() != 4 or found.dtype not in FLOATS or plain is None:
        raise _Unfit
    channels = found.shape[1]
    alone = groups == channels and plain.shape[:2] == (channels, 1) and not transposed
    same = plain.dtype == found.dtype and _dtype_of(bias) in (None, found.dtype)
    known = plain.device.type == "cpu" and plain.layout == torch.strided
    if not (alone and same and known):
        raise _Unfit
    values = plain.detach()[:, 0].permute(1, 2, 0).contiguous()
    return low.builder.call(
        "depthwise_convolution",
        low.register(x),
        low.builder.constant(values),
        None if bias is None else low.register(bias),
        *map(_pair, (stride, padding, dilation)),
    )


@_rule(aten.native_group_norm.default)
def _group_norm(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    found = val(a["input"])
    if found is None or found.dtype not in FLOATS or not isinstance(a["group"], int):
        raise _Unfit
    if any(user.target is operator.getitem and user.args[1] != 0 for user in node.users):
        raise _Unfit
    affine = [
        None if one is None else low.builder.call("cast", low.register(one), torch.float32)
        for one in (a["weight"], a["bias"])
    ]
    x = low.register(a["input"])
    return (low.builder.call("group_norm", x, a["group"], *affine, float(a["eps"])),)


@_rule(
    aten.upsample_bilinear2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
)
def _upsample(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    found, out = val(node.args[0]), val(node)
    if found is None or out is None or found.dim() != 4 or found.dtype not in FLOATS:
        raise _Unfit
    given = a["scale_factors"] if "scale_factors" in a else (a["scales_h"], a["scales_w"])
    scales = [0.0 if scale is None else scale for scale in given or (None, None)]
    if not all(isinstance(scale, (int, float)) for scale in scales):
        raise _Unfit
    scales = list(map(float, scales))
    x, size = low.register(node.args[0]), low.integers(out.shape[2:])
    if "align_corners" in a:
        return low.builder.call("upsample_bilinear2d", x, *size, bool(a["align_corners"]), *scales)
    return low.builder.call("upsample_nearest2d", x, *size, *scales)


@_rule(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default)
def _reduce(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    found, out = val(a["self"]), val(node)
    if found is None or out is None or found.dtype not in FLOATS or found.dtype != out.dtype:
        raise _Unfit
    names: dict[Any, str] = {aten.mean.dim: "mean", aten.sum.dim_IntList: "sum"}
    name = names.get(node.target, "amax")
    dims = a["dim"] if a["dim"] else list(range(found.dim()))
    return low.builder.call(name, low.register(a["self"]), list(dims), bool(a["keepdim"]))


@_rule(aten.bmm.default, aten.mm.default)
def _bmm(low: _Lowering, node: fx.Node) -> Any:
    a, b = node.args[:2]
    left, right = val(a), val(b)
    if left is None or right is None or left.dtype not in FLOATS or left.dtype != right.dtype:
        raise _Unfit
    x, y = low.register(a), low.register(b)
    if left.dim() == 3:
        return low.builder.call("bmm", x, y)
    x, y = (low.builder.call("unsqueeze", one, 0) for one in (x, y))
    return low.builder.call("squeeze", low.builder.call("bmm", x, y), 0)


# ---- integers

_WHOLE_NUMBERS = (torch.int32, torch.int64, torch.bool)
#: Op -> function of the instruction. Codes of 8 bit stay with torch, whose loops are vectors.
_INTEGERS: dict[Any, str] = {
    aten.add.Tensor: "add",
    aten.sub.Tensor: "sub",
    aten.mul.Tensor: "mul",
    aten.where.self: "where",
    aten.remainder.Scalar: "remainder",
    aten.remainder.Tensor: "remainder",
    aten.bitwise_and.Tensor: "bitwise_and",
    aten.bitwise_or.Tensor: "bitwise_or",
    aten.bitwise_xor.Tensor: "bitwise_xor",
    **{
        getattr(aten, name).default: name
        for name in ("neg", "abs", "minimum", "maximum", "bitwise_not")
    },
    **{
        getattr(getattr(aten, name), overload): name
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for overload in ("Scalar", "Tensor")
    },
    aten.div.Tensor_mode: "floor_divide",
}


@_rule(*_INTEGERS)
def _integer(low: _Lowering, node: fx.Node) -> Any:
    found, kwargs = val(node), dict(node.kwargs)
    function = _INTEGERS[node.target]
    if found is None or found.dtype not in _WHOLE_NUMBERS:
        raise _Unfit
    if function == "floor_divide" and kwargs.pop("rounding_mode", None) != "floor":
        raise _Unfit
    if kwargs or (function == "bitwise_not" and found.dtype == torch.bool):
        raise _Unfit
    operands = []
    for one in node.args:
        if isinstance(one, fx.Node):
            if _dtype_of(one) not in _WHOLE_NUMBERS:
                raise _Unfit
            operands.append(low.register(one))
        elif isinstance(one, int):
            # A tensor that is kept, as the builder knows constants by it.
            operands.append(low.number(int(one)))
        else:
            raise _Unfit
    return low.builder.call("integer", operands, function, found.dtype)


@_rule(aten.clamp.default, aten.clamp_min.default, aten.clamp_max.default)
def _bounds(low: _Lowering, node: fx.Node) -> Any:
    a, dtype = arguments(node), _dtype_of(node)
    bounds = a.get("min"), a.get("max")
    whole = all(one is None or isinstance(one, int) for one in bounds)
    if dtype not in _WHOLE_NUMBERS or dtype != _dtype_of(a["self"]) or not whole:
        raise _Unfit
    x = low.register(a["self"])
    for bound, function in zip(bounds, ("maximum", "minimum"), strict=True):
        if bound is not None:
            x = low.builder.call("integer", [x, low.number(bound)], function, dtype)
    return x


@_rule(aten.gather.default)
def _gather(low: _Lowering, node: fx.Node) -> Any:
    a = arguments(node)
    found = val(a["self"])
    if found is None or found.dim() == 0:
        raise _Unfit
    return low.builder.call("gather", low.register(a["self"]), a["dim"], low.register(a["index"]))


@_rule(aten.index.Tensor)
def _index(low: _Lowering, node: fx.Node) -> Any:
    indices: Any = node.args[1]
    places = [dim for dim, one in enumerate(indices) if one is not None]
    if len(places) != 1 or _dtype_of(indices[places[0]]) not in (torch.int32, torch.int64):
        raise _Unfit
    return low.builder.call(
        "take", low.register(node.args[0]), places[0], low.register(indices[places[0]])
    )


#: Ops whose result may lie in the memory of their first argument here.
_VIEWS = frozenset(
    {
        *_RESHAPES,
        *_SAME,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.expand.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.slice.Tensor,
        aten.select.int,
        aten.unbind.int,
        aten.split_with_sizes.default,
        aten.split.Tensor,
        aten.clone.default,
        prims.convert_element_type.default,
        operator.getitem,
    }
)

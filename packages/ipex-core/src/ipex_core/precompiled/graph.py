# SPDX-License-Identifier: Apache-2.0
"""From a model to a fused graph: what is recorded, what becomes a constant, and which passes run."""

from __future__ import annotations

import dataclasses
import inspect
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from ipex_core.errors import ExportError
from ipex_core.fusion import GraphReport
from ipex_core.fusion.aten import PURE, VIEWING, Context, arguments, is_call, module_of, val
from ipex_core.fusion.aten.conv import pack_convolutions
from ipex_core.fusion.aten.linear import leave_linears
from ipex_core.fusion.aten.passes import run_passes
from ipex_core.library.spec import FLOATS
from ipex_core.recording import record
from ipex_core.util.symbolic import hints

aten = torch.ops.aten

#: What Inductor writes out and kernels do better whole.
_WHOLE = (
    *("batch_norm", "upsample", "max_pool2d", "grid_sampler", "native_group_norm"),
    *("reflection_pad", "replication_pad"),
)
#: The convolution of INT8 models, which has an instruction.
INT8_CONV = "ipex_quant::int8_conv"
#: Checks that `torch.export` writes down; the sizes and dtypes of inputs are checked before a run.
_CHECKS = ("_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "_guards_fn")
#: A constant that repeats the memory of a smaller one is not written out beyond this many bytes.
_REPEATED = 1 << 20


@dataclasses.dataclass(frozen=True)
class Input:
    """One leaf of the arguments of a model.

    Attributes:
        name: As errors call it.
        dtype: Of a tensor; None for a value that is fixed.
        shape: Sizes as numbers, or as texts of expressions of the sizes that vary.
        value: The fixed value.
    """

    name: str
    dtype: torch.dtype | None = None
    shape: tuple[int | str, ...] = ()
    value: Any = None


@dataclasses.dataclass
class Recorded:
    """A fused graph whose weights are attributes.

    Attributes:
        module: The graph with its constants.
        inputs: The leaves of the arguments.
        in_spec: Form of ``(args, kwargs)``.
        out_spec: Form of the results.
        ranges: Symbol of a size that varies -> its least and largest value.
        conditions: Texts of expressions that must hold for sizes that vary.
        report: The decisions of the passes.
        forms: Layout of each result, of `forms_of`.
        eager_bytes: The most memory that intermediate results of the graph as recorded take at a time.
    """

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    in_spec: Any
    out_spec: Any
    ranges: dict[str, tuple[int, int | None]]
    conditions: tuple[str, ...]
    report: GraphReport
    forms: tuple[str | None, ...]
    eager_bytes: int = 0


def capture(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Recorded:
    """Record a model, fold what is constant, and fuse.

    Raises:
        ExportError: The model cannot be recorded, writes to its inputs or buffers, or reads values of tensors.
    """
    program = record(
        "precompile", model, args, kwargs, dynamic_shapes, decompositions(), (INT8_CONV,)
    )
    name = type(model).__name__
    report = GraphReport(f"precompile of {name}", inference=True, frozen=True)
    module = program.graph_module
    conditions = _drop_checks(module.graph)
    _check(program)
    inputs = _lift(program, list(inspect.signature(model.forward).parameters))
    eager_bytes = peak_bytes(module.graph)
    forms = forms_of(module.graph)
    fuse(module, report, always=True)
    spec = program.call_spec
    return Recorded(
        module,
        inputs,
        spec.in_spec,
        spec.out_spec,
        dict(_ranges(program)),
        conditions,
        report,
        forms,
        eager_bytes,
    )


def fuse(
    module: fx.GraphModule, report: GraphReport, disabled: Iterable[str] = (), always: bool = False
) -> None:
    """Fold what is constant and run the passes.

    Args:
        module: A functional graph of ATen ops with its weights as attributes.
        report: Collects the decisions.
        disabled: Names of patterns to leave out.
        always: Leave the tables of measured speed aside.
    """
    ctx = Context(module.graph, set(), report, always=True)
    _clean(module.graph)
    _lay_out_memory(ctx)
    _fold_batch_norms(module, ctx)
    _convolve_small_images(module, ctx)
    _flatten_volumes(module, ctx)
    _widen_convolutions(module, ctx)
    _flatten_transposed(module, ctx)
    fold_constants(module, leave=PURE)  # the passes know weights through these
    run_passes(module.graph, report, (), disabled, always)
    fold_constants(module)
    leave_linears(Context(module.graph, set(), report))
    _view_whole_lookups(module, ctx)
    pack_convolutions(module.graph, report, disabled, always, time_groups=True)
    _share(module.graph)
    fold_constants(module)
    module.graph.eliminate_dead_code()


def forms_of(graph: fx.Graph) -> tuple[str | None, ...]:
    """Return for each result whether it is ``"contiguous"`` or ``"channels_last"``, as users rely on; else None."""
    forms: list[str | None] = []
    for leaf in graph.output_node().args[0]:  # type: ignore[union-attr]
        value = val(leaf)
        form = None
        if value is not None and value.layout == torch.strided:
            example = torch.empty_strided(hints(value.shape), hints(value.stride()), device="meta")
            if example.is_contiguous():
                form = "contiguous"
            elif example.dim() == 4 and example.is_contiguous(memory_format=torch.channels_last):
                form = "channels_last"
        forms.append(form)
    return tuple(forms)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the compositions of Inductor, which the passes expect, without ops that stay whole."""
    from torch._decomp import decomposition_table
    from torch._inductor.decomposition import select_decomp_table
    from torch._prims_common import suggest_memory_format

    table = {**select_decomp_table(), aten.glu.default: decomposition_table[aten.glu.default]}
    joined = table[aten.cat.default]

    def cat(tensors: list[Tensor], dim: int = 0) -> Any:
        # Inductor copies the only tensor that is not empty with its strides; what torch.cat returns can be viewed.
        found = joined(tensors, dim)
        if found is NotImplemented:
            return found
        return found.contiguous(memory_format=suggest_memory_format(found))

    table[aten.cat.default] = cat
    return {op: rule for op, rule in table.items() if not any(part in str(op) for part in _WHOLE)}


def _check(program: torch.export.ExportedProgram) -> None:
    for output in program.graph_signature.output_specs:
        if output.kind in (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION):
            what = "buffer" if output.kind == OutputKind.BUFFER_MUTATION else "input"
            raise ExportError(
                f"precompile: the model must not write to its {what}s, got a write to {output.target!r}"
            )
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in program.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator):
            raise ExportError(
                f"precompile: the model must not have control flow that depends on data, got {node.target}"
            )
        if free_unbacked_symbols(node.meta.get("val")):
            where = f" ({module})" if (module := module_of(node)) else ""
            raise ExportError(
                "precompile: the sizes of a model must not depend on values of its tensors, got"
                f" {node.target}{where}"
            )


def _drop_checks(graph: fx.Graph) -> tuple[str, ...]:
    """Remove the checks of torch.export; return the conditions on sizes among them.

    A check that a bool tensor is true becomes the op that checks a tensor.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    conditions = []
    tensors: dict[Any, Any] = {}  # symbol of a bool that is read -> tensor
    for node in graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default):
        if isinstance(node.meta["val"], torch.SymBool):
            tensors.update(dict.fromkeys(node.meta["val"].node.expr.free_symbols, node.args[0]))
    for node in list(graph.nodes):
        if node.op == "call_module" or (
            node.op == "call_function" and getattr(node.target, "_opname", "") in _CHECKS
        ):
            if is_call(node, aten._assert_scalar.default) and isinstance(node.args[0], fx.Node):
                held = node.args[0].meta["val"].node.expr
                read = list(free_unbacked_symbols(held))
                if len(read) == 1 and read[0] in tensors:
                    no, yes = (str(held.subs(read[0], n)) == "True" for n in (0, 1))
                    if not yes:
                        continue  # `_check` refuses the model
                    if not no:
                        tensor = tensors[read[0]]
                        text = (
                            f"precompile: the inputs fail a check of {module_of(tensor) or 'the model'};"
                            " call the model itself for its message"
                        )
                        with graph.inserting_before(node):
                            graph.call_function(aten._assert_async.msg, (tensor, text))
                elif read:
                    continue
                elif held.free_symbols:
                    conditions.append(str(held))
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return tuple(dict.fromkeys(conditions))


def _lift(program: torch.export.ExportedProgram, parameters: list[str]) -> tuple[Input, ...]:
    """Turn parameters and buffers into attributes of the graph; return what the user gives.

    Args:
        program: The recorded program.
        parameters: Names of the parameters of the forward.
    """
    module, graph = program.graph_module, program.graph_module.graph
    nodes = {node.name: node for node in graph.find_nodes(op="placeholder")}
    inputs: list[Input] = []
    spec = program.call_spec.in_spec
    names = _leaf_names(spec, parameters)
    for one in program.graph_signature.input_specs:
        node = nodes.get(one.arg.name)
        if one.kind == InputKind.USER_INPUT:
            name = names[len(inputs)]
            inputs.append(_input(name, one.arg, node))
            if node is not None and val(node) is None and not node.users:
                graph.erase_node(node)
            elif node is not None and val(node) is None:
                raise ExportError(
                    f"precompile: input {name} must be a tensor or a fixed value, got"
                    f" {type(node.meta.get('val')).__name__}"
                )
            continue
        if one.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            raise ExportError(
                f"precompile: the model must not have states of the kind {one.kind.name}"
            )
        assert node is not None and one.target is not None
        value = program.state_dict.get(one.target)
        if value is None:
            value = program.constants[one.target]
        hold(module, node, value)
    return tuple(inputs)


def add_constant(module: fx.GraphModule, graph: fx.Graph, value: Tensor) -> fx.Node:
    """Insert a node for a tensor that the graph keeps."""
    number = len(module._buffers)
    while f"ipex_constant_{number}" in module._buffers:
        number += 1
    name = f"ipex_constant_{number}"
    module.register_buffer(name, value, persistent=False)
    return graph.get_attr(name)


def hold(module: fx.GraphModule, node: fx.Node, value: Tensor) -> None:
    """Put a constant in the place of an input of the graph."""
    with module.graph.inserting_before(node):
        held = add_constant(module, module.graph, value.detach())
    held.meta.update(node.meta)
    node.replace_all_uses_with(held)
    module.graph.erase_node(node)


def _leaf_names(spec: Any, parameters: list[str]) -> list[str]:
    """Return what errors call the leaves of ``(args, kwargs)``: "mask", "batch.ids"."""
    from torch.utils import _pytree as pytree

    filled = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    names = []
    for path, _ in pytree.tree_flatten_with_path(filled)[0]:
        parts = [
            str(getattr(part, "key", getattr(part, "idx", getattr(part, "name", part))))
            for part in path[1:]  # the first is args or kwargs
        ]
        first: Any = path[0]
        if first.idx == 0 and int(parts[0]) < len(parameters):
            parts[0] = parameters[int(parts[0])]
        names.append(".".join(parts))
    return names


def _input(name: str, argument: Any, node: fx.Node | None) -> Input:
    value = None if node is None else val(node)
    if value is None:
        return Input(name, value=getattr(argument, "value", None))
    shape = tuple(size if isinstance(size, int) else str(size.node.expr) for size in value.shape)
    if value.layout != torch.strided or value.device.type != "cpu":
        raise ExportError(
            f"precompile: input {name} must be a dense tensor on the CPU, got {value.layout} on {value.device}"
        )
    return Input(name, value.dtype, shape)


def _ranges(program: torch.export.ExportedProgram) -> Iterator[tuple[str, tuple[int, int | None]]]:
    for symbol, span in program.range_constraints.items():
        # 2 is what torch says of every size that varies; 1 and 0 run as well.
        low = 0 if span.lower <= 2 else int(span.lower)
        yield str(symbol), (low, None if span.upper >= 2**31 else int(span.upper))


# --- passes -----------------------------------------------------------------------------------------------------------


def _clean(graph: fx.Graph) -> None:
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    remove_noop_ops(graph)
    graph.eliminate_dead_code()


def _lay_out_memory(ctx: Context) -> None:
    """Let ``as_strided`` read memory that lies as it did when the graph was recorded; programs choose their own."""
    for node in ctx.nodes(aten.as_strided.default):
        a = arguments(node)
        found = val(a["self"])
        if found is None:
            continue
        strides = hints(found.stride())
        order = sorted(range(found.dim()), key=lambda dim: -strides[dim])
        shape, start = hints(found.shape), found.storage_offset()
        example = torch.empty_strided(shape, strides, device="meta").permute(order)
        offset = start if a["storage_offset"] is None else a["storage_offset"]
        if not example.is_contiguous() or not isinstance(start, int) or not isinstance(offset, int):
            continue
        x = ctx.call(node, aten.permute.default, (a["self"], order))
        x = ctx.call(node, aten.clone.default, (x,), {"memory_format": torch.contiguous_format})
        x = ctx.call(node, aten.reshape.default, (x, [-1]))
        node.args, node.kwargs = (x, a["size"], a["stride"], offset - start), {}


def _constant(module: fx.GraphModule, node: Any) -> Tensor | None:
    """Return the value of a constant node."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = getattr(module, str(node.target), None)
    return value if isinstance(value, Tensor) else None


def _fold_batch_norms(module: fx.GraphModule, ctx: Context) -> None:
    """Put batch norms with fixed statistics into the convolution before, or make one op of each."""
    graph = module.graph
    for node in ctx.nodes(aten._native_batch_norm_legit_no_training.default):
        given: tuple[Any, ...] = node.args
        x, weight, bias, mean, var, _, eps = given
        kept = [user for user in node.users if user.users]
        whole = all(user.target is operator.getitem and user.args[1] == 0 for user in kept)
        tensors = [_constant(module, one) for one in (weight, bias, mean, var)]
        known = all(
            (tensor is None) == (one is None)
            for one, tensor in zip((weight, bias, mean, var), tensors, strict=True)
        )
        value = val(x)
        if not whole or not known or tensors[2] is None or value is None:
            continue
        # float64 keeps its precision.
        wide = torch.promote_types(value.dtype, torch.float32)
        gamma, beta, center, spread = (
            t.to(wide) if t is not None else torch.full(tensors[2].shape, fill, dtype=wide)
            for t, fill in zip(tensors, (1.0, 0.0, 0.0, 1.0), strict=True)
        )
        factor = gamma * torch.rsqrt(spread + float(eps))
        new = _into_convolution(module, ctx, x, factor, beta - center * factor)
        if new is None and value.dtype not in FLOATS:
            continue
        if new is None:
            held = _held(ctx, node, gamma, beta, center, spread)
            new = ctx.call(node, torch.ops.ipex.frozen_batch_norm.default, (x, *held, float(eps)))
        for user in kept:
            user.replace_all_uses_with(new)
        graph.eliminate_dead_code()


def _into_convolution(
    module: fx.GraphModule, ctx: Context, node: fx.Node, factor: Tensor, shift: Tensor
) -> fx.Node | None:
    """Scale the weight of a convolution and shift its bias; return it, or None where that is not possible."""
    if not is_call(node, aten.convolution.default) or len(node.users) != 1:
        return None
    given: tuple[Any, ...] = node.args
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = given
    plain, offset = _constant(module, weight), _constant(module, bias)
    if plain is None or (bias is not None and offset is None):
        return None
    if transposed:
        # [in, out / groups, ...]: the groups lie one after the other in the first dimension.
        per_group = factor.view(groups, 1, -1).expand(-1, plain.shape[0] // groups, -1)
        by = per_group.reshape(plain.shape[0], -1, *[1] * (plain.dim() - 2))
    else:
        by = factor.view(-1, *[1] * (plain.dim() - 1))
    folded = (plain.to(factor.dtype) * by).to(plain.dtype)
    offset = None if offset is None else offset.to(factor.dtype)
    moved = (shift if offset is None else offset * factor + shift).to(plain.dtype)
    held = _held(ctx, node, folded, moved)
    node.args = (
        *(x, *held, stride, padding, dilation),
        *(transposed, output_padding, groups),
    )
    return node


def _held(ctx: Context, before: fx.Node, *values: Tensor) -> list[fx.Node]:
    """Insert nodes for tensors that the graph keeps."""
    module: Any = ctx.graph.owning_module
    with ctx.graph.inserting_before(before):
        held = [add_constant(module, ctx.graph, value) for value in values]
    for node, value in zip(held, values, strict=True):
        mode: Any = ctx.fake_mode()
        known = hasattr(mode, "from_tensor")
        node.meta["val"] = mode.from_tensor(value, static_shapes=True) if known else value
    return held


#: What makes images larger and sums over pixels of one channel alone.
_UPSAMPLING = (
    aten.upsample_bilinear2d.vec,
    aten.upsample_bilinear2d.default,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest2d.default,
)
#: An image must have so many times the pixels of the smaller one.
_LEAST_GROWTH = 2


def _convolve_small_images(module: fx.GraphModule, ctx: Context) -> None:
    """Convolve images with a window of one pixel before they are made larger and joined, not after.

    Such a convolution sums over channels and upsampling over pixels, so that either may come first.
    """
    for node in ctx.nodes(aten.convolution.default):
        given: tuple[Any, ...] = node.args
        x, weight, bias, stride, padding, _, transposed, _, groups = given
        plain, result = _constant(module, weight), val(node)
        if plain is None or result is None or plain.shape[2:] != (1, 1):
            continue
        if transposed or groups != 1 or any(n != 1 for n in stride) or any(padding):
            continue
        alone = len(x.users) == 1 and is_call(x, aten.cat.default) and x.args[1:] in ((1,), (-3,))
        parts: list[fx.Node] = list(x.args[0]) if alone else [x]
        small, whole = [], []
        first = 0
        for part in parts:
            value: Any = val(part)
            columns = slice(first, first + value.shape[1])
            first = columns.stop
            if _grows(part) and plain.shape[0] <= value.shape[1]:
                small.append((part, columns))
            else:
                whole.append((part, columns))
        if not small:
            continue

        def convolve(
            x: fx.Node, columns: list[slice], bias: Any, node: fx.Node = node, plain: Tensor = plain
        ) -> fx.Node:
            rows = torch.cat([plain[:, one] for one in columns], 1)
            (held,) = _held(ctx, node, rows)
            rest = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
            return ctx.call(node, aten.convolution.default, (x, held, bias, *rest))

        total: fx.Node | None = None
        for part, columns in small:
            inner: Any = part.args[0]
            own = bias if total is None and not whole else None
            one = ctx.call(
                node, part.target, (convolve(inner, [columns], own), *part.args[1:]), part.kwargs
            )
            total = one if total is None else ctx.call(node, aten.add.Tensor, (total, one))
        if whole:
            images = [part for part, _ in whole]
            joined = images[0]
            if len(images) > 1:
                joined = ctx.call(node, aten.cat.default, (images, 1))
            one = convolve(joined, [columns for _, columns in whole], bias)
            total = ctx.call(node, aten.add.Tensor, (one, total))
        assert total is not None
        node.replace_all_uses_with(total)
        module.graph.erase_node(node)
    module.graph.eliminate_dead_code()


def _grows(node: fx.Node) -> bool:
    """Return whether a node, which one other reads, makes images larger that have known sizes."""
    if node.target not in _UPSAMPLING or len(node.users) != 1:
        return False
    before, after = val(node.args[0]), val(node)
    if before is None or after is None or before.dim() != 4:
        return False
    sizes = (*before.shape[2:], *after.shape[2:])
    if not all(isinstance(size, int) for size in sizes):
        return False
    return bool(sizes[0] * sizes[1] * _LEAST_GROWTH <= sizes[2] * sizes[3])


def _widen_convolutions(module: fx.GraphModule, ctx: Context) -> None:
    """Write convolutions of sequences as convolutions of images of one line, which have a kernel."""
    graph = module.graph
    for node in ctx.nodes(aten.convolution.default):
        given: tuple[Any, ...] = node.args
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = given
        value, plain = val(x), _constant(module, weight)
        if value is None or value.dim() != 3 or (transposed and plain is None):
            continue
        image = ctx.call(node, aten.unsqueeze.default, (x, 2))
        if plain is None:
            window = ctx.call(node, aten.unsqueeze.default, (weight, 2))
        else:
            (window,) = _held(ctx, node, plain.unsqueeze(2))
        args = (
            *(image, window, bias, [1, *stride], [0, *padding], [1, *dilation]),
            *(transposed, [0, *output_padding], groups),
        )
        wide = ctx.call(node, aten.convolution.default, args)
        line = ctx.call(node, aten.squeeze.dim, (wide, 2))
        node.replace_all_uses_with(line)
        graph.erase_node(node)


#: Products of zeros in a transposed convolution that is written as one that is not, at most so many to each other one.
_MOST_ZEROS = 1.0


def _flatten_transposed(module: fx.GraphModule, ctx: Context) -> None:
    """Write transposed convolutions as convolutions that give a block of the result at each place.

    With a stride of s, the place f = s q + r of the result sums over the inputs q - m with the weights r + s m. So each
    r is a convolution of its own, and all of them are one with as many times the channels.
    """
    for node in ctx.nodes(aten.convolution.default):
        given: tuple[Any, ...] = node.args
        x, weight, bias, stride, padding, dilation, transposed, extra, groups = given
        plain, offset = _constant(module, weight), _constant(module, bias)
        value = val(x)
        if plain is None or value is None or value.dim() != 4 or not transposed or groups != 1:
            continue
        if (offset is None) != (bias is None) or value.dtype not in FLOATS or 0 in plain.shape:
            continue
        into, out = plain.shape[:2]
        sizes = [d * (k - 1) + 1 for d, k in zip(dilation, plain.shape[2:], strict=True)]
        # Output padding may reach behind the last window.
        taps = [
            -(-max(k, k + e - p) // s)
            for k, s, p, e in zip(sizes, stride, padding, extra, strict=True)
        ]
        places = math.prod(t * s for t, s in zip(taps, stride, strict=True))
        if places > (1 + _MOST_ZEROS) * plain.shape[2] * plain.shape[3]:
            continue
        wide = plain.new_zeros(into, out, *(t * s for t, s in zip(taps, stride, strict=True)))
        wide[:, :, : sizes[0] : dilation[0], : sizes[1] : dilation[1]] = plain
        parts = wide.view(into, out, taps[0], stride[0], taps[1], stride[1]).flip(2, 4)
        # The channels of the result innermost, as kernels like them.
        flat = parts.permute(3, 5, 1, 0, 2, 4).reshape(-1, into, *taps).contiguous()
        rows, columns = stride
        held = _held(ctx, node, flat, *([] if offset is None else [offset.repeat(rows * columns)]))
        n, height, width = (
            size if isinstance(size, int) else ctx.call(node, aten.sym_size.int, (x, dim))
            for dim, size in enumerate(value.shape)
            if dim != 1
        )

        def times(size: Any, more: int, by: int, node: fx.Node = node) -> tuple[Any, Any]:
            if isinstance(size, int):
                return size + more, (size + more) * by
            longer = ctx.call(node, operator.add, (size, more)) if more else size
            return longer, ctx.call(node, operator.mul, (longer, by))

        (high, lines), (long, line) = (
            times(size, tap - 1, by)
            for size, tap, by in ((height, taps[0], rows), (width, taps[1], columns))
        )
        around = [tap - 1 for tap in taps]
        args = (x, held[0], held[1] if len(held) > 1 else None, [1, 1], around, [1, 1])
        blocks = ctx.call(node, aten.convolution.default, (*args, False, [0, 0], 1))
        blocks = ctx.call(node, aten.reshape.default, (blocks, [n, rows, columns, out, high, long]))
        ordered = ctx.call(node, aten.permute.default, (blocks, [0, 4, 1, 5, 2, 3]))
        whole = ctx.call(node, aten.reshape.default, (ordered, [n, lines, line, out]))
        image = ctx.call(node, aten.permute.default, (whole, [0, 3, 1, 2]))
        for i in range(2):
            behind = taps[i] * stride[i] + padding[i] - sizes[i] - extra[i]
            if padding[i] or behind:
                end = -behind if behind else 2**63 - 1
                image = ctx.call(node, aten.slice.Tensor, (image, 2 + i, padding[i], end))
        node.replace_all_uses_with(image)
        module.graph.erase_node(node)


def _flatten_volumes(module: fx.GraphModule, ctx: Context) -> None:
    """Write convolutions of volumes as convolutions of images that have the slices of a window as channels."""
    for node in ctx.nodes(aten.convolution.default):
        given: tuple[Any, ...] = node.args
        x, weight, bias, stride, padding, dilation, transposed, _, groups = given
        plain, value, result = _constant(module, weight), val(x), val(node)
        if plain is None or value is None or result is None or transposed or groups != 1:
            continue
        if value.dim() != 5 or value.dtype not in FLOATS or 0 in plain.shape:
            continue
        if not all(isinstance(size, int) for size in (*value.shape[1:], *result.shape[1:])):
            continue
        last = ctx.call(node, aten.permute.default, (x, [0, 2, 3, 4, 1]))
        if padding[0]:
            around = [*[0] * 6, padding[0], padding[0]]
            last = ctx.call(node, aten.constant_pad_nd.default, (last, around, 0.0))
        depth, taps = result.shape[2], plain.shape[2]
        slices = []
        for tap in range(taps):
            first = tap * dilation[0]
            args = (last, 1, first, first + (depth - 1) * stride[0] + 1, stride[0])
            slices.append(ctx.call(node, aten.slice.Tensor, args))
        both = slices[0] if taps == 1 else ctx.call(node, aten.cat.default, (slices, -1))
        channels = taps * plain.shape[1]
        sizes = [-1, *value.shape[3:], channels]
        images = ctx.call(node, aten.reshape.default, (both, sizes))
        images = ctx.call(node, aten.permute.default, (images, [0, 3, 1, 2]))
        flat = plain.permute(0, 2, 1, 3, 4).reshape(plain.shape[0], channels, *plain.shape[3:])
        rest = (stride[1:], padding[1:], dilation[1:], False, [0, 0], 1)
        held = _held(ctx, node, flat.contiguous())
        images = ctx.call(node, aten.convolution.default, (images, held[0], bias, *rest))
        images = ctx.call(node, aten.permute.default, (images, [0, 2, 3, 1]))
        sizes = [-1, depth, *result.shape[3:], plain.shape[0]]
        volume = ctx.call(node, aten.reshape.default, (images, sizes))
        volume = ctx.call(node, aten.permute.default, (volume, [0, 4, 1, 2, 3]))
        node.replace_all_uses_with(volume)
        module.graph.erase_node(node)


def _view_whole_lookups(module: fx.GraphModule, ctx: Context) -> None:
    """Write ``x[rows, columns]`` as a view where the indices count through all of ``x``, as masks of models do."""
    for node in ctx.nodes(aten.index.Tensor):
        x: Any = node.args[0]
        indices: Any = node.args[1]
        shape, value = val(x), val(node)
        tensors = [_constant(module, one) for one in indices]
        if shape is None or value is None or len(tensors) != shape.dim():
            continue
        dims = []
        for size, index in zip(shape.shape, tensors, strict=True):
            if not isinstance(size, int) or index is None or index.numel() != size:
                break
            if not torch.equal(index.flatten(), torch.arange(size, dtype=index.dtype)):
                break
            # Counted from the end, where the indices broadcast.
            wide = [d - index.dim() for d, n in enumerate(index.shape) if n != 1]
            dims.append(wide[0] if wide else None)
        placed = [d for d in dims if d is not None]
        if len(dims) == shape.dim() and placed == sorted(set(placed)):
            view = ctx.call(node, aten.reshape.default, (x, list(value.shape)))
            node.replace_all_uses_with(view)
            module.graph.erase_node(node)


def is_random(node: fx.Node) -> bool:
    """Return whether two calls of a node may differ."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def fold_constants(module: fx.GraphModule, leave: Collection[Any] = ()) -> None:
    """Compute what depends on constants alone, once.

    Views that repeat a small constant stay in the graph, as do random numbers.

    Args:
        module: The graph with its constants.
        leave: Ops whose results are not put into the graph.
    """
    graph = module.graph
    first = next(iter(graph.nodes))
    known: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            if isinstance(value, Tensor):
                known[node] = value
        elif node.op == "call_function" and not is_random(node) and node.users:
            if not all(one in known for one in node.all_input_nodes):
                continue
            if _symbolic(node):
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
            with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                known[node] = node.target(*args, **kwargs)
    coded: set[fx.Node] = set()  # the passes know weights of 8 and 4 bits as they are written
    for node, value in known.items():
        dtype = getattr(value, "dtype", None)
        if dtype not in FLOATS or not coded.isdisjoint(node.all_input_nodes):
            coded.add(node)
    for node, value in known.items():
        if node.op == "get_attr" or not isinstance(value, Tensor):
            continue
        if all(
            user in known and (user.target not in leave or node in coded) for user in node.users
        ):
            continue
        if node.target in leave or _repeats(value):
            continue
        with graph.inserting_before(first):
            held = add_constant(module, graph, value)
        held.meta.update(node.meta)
        node.replace_all_uses_with(held)
    graph.eliminate_dead_code()
    used = {str(node.target) for node in graph.find_nodes(op="get_attr")}
    for name in [name for name, _ in module.named_buffers() if name not in used]:
        if "." not in name:
            delattr(module, name)


def _symbolic(node: fx.Node) -> bool:
    """Return whether an argument or the result has a size that varies."""
    found = val(node)
    if found is not None and not all(isinstance(size, int) for size in found.shape):
        return True
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _repeats(value: Tensor) -> bool:
    if value.layout != torch.strided:
        return False
    size = value.numel() * value.element_size()
    return size > _REPEATED and size > 2 * value.untyped_storage().nbytes()


def _share(graph: fx.Graph) -> None:
    """Compute equal calls once."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            key: Any = ("get_attr", node.target)
        elif node.op == "call_function" and not is_random(node):
            key = (node.target, _frozen(node.args), _frozen(tuple(sorted(node.kwargs.items()))))
        else:
            continue
        first = known.setdefault(key, node)
        if first is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return ("list", *map(_frozen, value))
    if isinstance(value, dict):
        return ("dict", *sorted((key, _frozen(one)) for key, one in value.items()))
    return (type(value), value)  # True is not 1


# --- memory -----------------------------------------------------------------------------------------------------------


def _bytes(node: fx.Node) -> int:
    """Return the size of the tensors of a node; sizes that vary count as in the example."""
    found = node.meta.get("val")
    total = 0
    for value in found if isinstance(found, (list, tuple)) else (found,):
        if isinstance(value, Tensor) and value.layout == torch.strided:
            total += math.prod(hints(value.shape)) * value.element_size()
    return total


def peak_bytes(graph: fx.Graph) -> int:
    """Return the most memory that the results of a graph take at a time; views take none."""
    views = {*VIEWING, aten.t.default, aten.detach.default, operator.getitem}
    roots: dict[fx.Node, fx.Node] = {}
    last: dict[fx.Node, int] = {}
    nodes = list(graph.nodes)
    for number, node in enumerate(nodes):
        base = node.args[0] if node.target in views and node.args else node
        roots[node] = roots.get(base, node) if isinstance(base, fx.Node) else node
        last[roots[node]] = number
        for one in node.all_input_nodes:
            last[roots[one]] = number
    frees: dict[int, list[fx.Node]] = {}
    for node, number in last.items():
        frees.setdefault(number, []).append(node)
    now = most = 0
    for number, node in enumerate(nodes):
        if node.op == "call_function" and roots[node] is node:
            now += _bytes(node)
            most = max(most, now)
        now -= sum(_bytes(one) for one in frees.get(number, ()) if one.op == "call_function")
    return most

# SPDX-License-Identifier: Apache-2.0
"""Chains of element-wise ops of a compiled graph as kernels, whose SYCL source is written for the graph.

Also what else compilers get for the device. Plain ``torch.compile`` needs a Triton for XPU, and torch's error then says
what works without one. Frozen TorchScript programs are rewritten (`ipex_xpu_kernels._rewriter`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import fx

from ipex_xpu_kernels._names import resolve

_aten: Any = torch.ops.aten
_TYPES = {
    torch.float32: "float",
    torch.bfloat16: "ipex::bf16",
    torch.float16: "sycl::half",
}
#: Inputs of a kernel; a chain with more is left as it is.
_MOST_INPUTS = 12
#: Elements of a result: to compile a kernel takes seconds, which fewer would hardly win back.
_FEWEST_ELEMENTS = 4096

_Values = Sequence[str]
#: Op -> names of its arguments that are no tensors with their defaults, and its value in C++ of the values of its
#: arguments: all numbers are float.
_OPS: dict[Any, tuple[dict[str, Any], Callable[..., str]]] = {}


def _op(target: Any, value: Callable[..., str], **defaults: Any) -> None:
    _OPS[target] = (defaults, value)


for _target in (_aten.add.Tensor, _aten.add.Scalar):
    _op(_target, lambda a, b, alpha: f"({a} + {alpha} * {b})", alpha=1)
for _target in (_aten.sub.Tensor, _aten.sub.Scalar):
    _op(_target, lambda a, b, alpha: f"({a} - {alpha} * {b})", alpha=1)
for _target in (_aten.mul.Tensor, _aten.mul.Scalar):
    _op(_target, lambda a, b: f"({a} * {b})")
for _target in (_aten.div.Tensor, _aten.div.Scalar):
    _op(_target, lambda a, b: f"({a} / {b})")
_op(_aten.rsub.Scalar, lambda a, b, alpha: f"({b} - {alpha} * {a})", alpha=1)
_op(_aten.pow.Tensor_Scalar, lambda a, b: f"sycl::pow({a}, {b})")
_op(_aten.neg.default, lambda a: f"(-{a})")
_op(_aten.reciprocal.default, lambda a: f"(1.f / {a})")
_op(_aten.rsqrt.default, lambda a: f"(1.f / sycl::sqrt({a}))")
_op(_aten.sigmoid.default, lambda a: f"(1.f / (1.f + sycl::exp(-{a})))")
_op(_aten.silu.default, lambda a: f"({a} / (1.f + sycl::exp(-{a})))")
_op(_aten.relu.default, lambda a: f"({a} != {a} ? {a} : sycl::fmax({a}, 0.f))")
_op(_aten.square.default, lambda a: f"({a} * {a})")
for _name in ("abs", "exp", "log", "sqrt", "sin", "cos", "tanh", "erf"):
    _function = "fabs" if _name == "abs" else _name
    _op(getattr(_aten, _name).default, lambda a, f=_function: f"sycl::{f}({a})")


def _gelu(x: str, approximate: str) -> str:
    if approximate == "tanh":
        inner = f"0.79788456080286536f * ({x} + 0.044715f * {x} * {x} * {x})"
        return f"(0.5f * {x} * (1.f + sycl::tanh({inner})))"
    return f"(0.5f * {x} * (1.f + sycl::erf({x} * 0.70710678118654752f)))"


_op(_aten.gelu.default, _gelu, approximate="none")


def _number(value: Any) -> str:
    if math.isinf(value):
        return "(-__builtin_inff())" if value < 0 else "__builtin_inff()"
    return '__builtin_nanf("")' if math.isnan(value) else f"({float(value)!r}f)"


def _tensor(node: Any) -> torch.Tensor | None:
    """Return what a node gives, if it is a dense tensor of a dtype that kernels have and its sizes are known."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.device.type != "xpu":
        return None
    known = all(isinstance(size, int) for size in value.shape)
    fits = known and value.dtype in _TYPES and 0 < value.numel() < 2**31
    return value if fits and value.is_contiguous() else None


def _joins(argument: Any, result: torch.Tensor) -> bool:
    """Whether an argument is a number, or a tensor of the shape of the result or of its last dimensions."""
    if isinstance(argument, (int, float)) and not isinstance(argument, bool):
        return True
    tensor = _tensor(argument)
    if tensor is None or tensor.dtype != result.dtype or tensor.dim() > result.dim():
        return False
    return tensor.dim() == 0 or tensor.shape == result.shape[result.dim() - tensor.dim() :]


def _fits(node: fx.Node) -> bool:
    result = _tensor(node)
    if node.op != "call_function" or node.target not in _OPS or result is None:
        return False
    defaults, _ = _OPS[node.target]
    if not set(node.kwargs) <= set(defaults):
        return False
    rest = node.kwargs.values()
    plain = all(isinstance(v, (int, float, str)) and not isinstance(v, bool) for v in rest)
    return plain and all(_joins(argument, result) for argument in node.args)


def _chains(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return groups of two or more nodes, in their order, of which only the last one is used by others."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    taken: set[fx.Node] = set()
    found = []
    for last in reversed(list(graph.nodes)):
        if last in taken or not _fits(last):
            continue
        shape = last.meta["val"].shape
        chain = {last}
        waiting = list(last.all_input_nodes)
        while waiting:
            node = waiting.pop()
            joins = node not in taken and node not in chain and _fits(node)
            if joins and node.meta["val"].shape == shape and set(node.users) <= chain:
                chain.add(node)
                waiting += node.all_input_nodes
        inputs = {i for node in chain for i in node.all_input_nodes} - chain
        large = last.meta["val"].numel() >= _FEWEST_ELEMENTS
        if large and len(chain) > 1 and len(inputs) <= _MOST_INPUTS:
            taken |= chain
            found.append(sorted(chain, key=order.__getitem__))
    return found[::-1]


def _source(chain: Sequence[fx.Node], inputs: Sequence[fx.Node]) -> tuple[str, str]:
    """Return the name and the source of the kernel of a chain."""
    dtype = _TYPES[chain[-1].meta["val"].dtype]
    names: dict[fx.Node, str] = {}
    lines = []
    parameters = []
    for i, node in enumerate(inputs):
        value = node.meta["val"]
        whole = value.shape == chain[-1].meta["val"].shape
        place = "i" if whole else f"i % {value.numel()}"
        parameters.append(f"const {dtype}* x{i}")
        lines.append(f"  const float v{i} = ipex::load(x{i}, {place});")
        names[node] = f"v{i}"
    for i, node in enumerate(chain):
        defaults, value = _OPS[node.target]
        given = {**defaults, **node.kwargs}
        arguments = [names[a] if isinstance(a, fx.Node) else _number(a) for a in node.args]
        rest = {k: v if isinstance(v, str) else _number(v) for k, v in given.items()}
        names[node] = f"t{i}"
        lines.append(f"  const float t{i} = {value(*arguments, **rest)};")
    parameters += [f"{dtype}* y", "long n"]
    lines.append(f"  ipex::store(y, i, t{len(chain) - 1});")
    body = "\n".join(["  const long i = ipex::global_id();", "  if (i >= n) return;", *lines])
    signature = ", ".join(parameters)
    name = "chain_" + hashlib.sha256(f"{signature}{body}".encode()).hexdigest()[:16]
    return name, f"IPEX_KERNEL(1) void {name}({signature}) {{\n{body}\n}}\n"


#: Kernels of this process by name.
_kernels: dict[str, Any] = {}


def _compile(sources: dict[str, str]) -> None:
    new = {name: text for name, text in sources.items() if name not in _kernels}
    if new:
        text = '#include "ipex/xpu.h"\n' + "\n".join(new.values())
        _kernels.update(resolve("load_inline")("chains", text, sorted(new)).kernels)


def _caller(name: str) -> Callable[..., torch.Tensor]:
    kernel = _kernels[name]

    def chain(shape: Sequence[int], *inputs: torch.Tensor) -> torch.Tensor:
        with torch.xpu.device(inputs[0].device):
            result = torch.empty(shape, dtype=inputs[0].dtype, device=inputs[0].device)
            n = result.numel()
            kernel(*(x.contiguous() for x in inputs), result, n, size=n)
        return result

    chain.__name__ = chain.__qualname__ = name
    return chain


def fuse(module: fx.GraphModule) -> list[str]:
    """Replace chains of element-wise ops by kernels, all compiled at once.

    Intermediate values are float and not rounded to the dtype of the tensors.

    Args:
        module: A graph of aten ops, whose nodes have values; it is changed.

    Returns:
        Notes on what was done.
    """
    chains = _chains(module.graph)
    if not chains:
        return []
    made = []
    for chain in chains:
        inputs = list(dict.fromkeys(i for n in chain for i in n.all_input_nodes if i not in chain))
        made.append((chain, inputs, *_source(chain, inputs)))
    try:
        _compile({name: source for *_, name, source in made})
    except resolve("SyclCompileError") as error:
        return [f"element-wise chains were not compiled: {str(error).splitlines()[-1]}"]
    replaced: dict[fx.Node, fx.Node] = {}
    for chain, inputs, name, _ in made:
        last = chain[-1]
        shape = tuple(last.meta["val"].shape)
        with module.graph.inserting_before(last):
            new = module.graph.call_function(
                _caller(name), (shape, *(replaced.get(i, i) for i in inputs))
            )
        new.meta = dict(last.meta)
        last.replace_all_uses_with(new)
        replaced[last] = new
        for node in reversed(chain):
            module.graph.erase_node(node)
    return [f"{len(chains)} chains of {sum(map(len, chains))} element-wise ops as SYCL kernels"]


#: Added to torch's error of a missing Triton.
HINT = (
    " ipex-xpu-kernels has no Triton for its device. Use torch.compile(model, backend='ipex'), backend='aot_eager'"
    " or the model without torch.compile: they do not need Triton."
)


def install() -> None:
    """Add all of it to the modules of torch and ipex, once these are imported."""
    from ipex_core.util.import_hooks import when_imported

    when_imported("ipex_core.compiler", _add)
    when_imported("ipex_core.jit", _add_rewriter)
    when_imported("torch._inductor.exc", _add_hint)


def _add(compiler: ModuleType) -> None:
    if fuse not in compiler.xpu_passes:
        compiler.xpu_passes.append(fuse)


def _add_rewriter(jit: ModuleType) -> None:
    jit.rewriters["xpu"] = _rewrite


def _rewrite(graph: Any) -> list[str]:
    from ipex_xpu_kernels import _rewriter

    return _rewriter.rewrite(graph)


def _add_hint(module: ModuleType) -> None:
    missing: Any = getattr(module, "TritonMissing", None)
    if missing is None:
        return  # of a torch that calls it otherwise

    class TritonMissing(missing):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            text, *others = BaseException.__getattribute__(self, "args")
            self.args = (f"{text}{HINT}", *others)

    TritonMissing.__module__, TritonMissing.__qualname__ = module.__name__, "TritonMissing"
    module.TritonMissing = TritonMissing  # type: ignore[attr-defined]

# SPDX-License-Identifier: Apache-2.0
"""The ``torch.compile`` backend ``"ipex"``.

It is Inductor with inference defaults and our ops. torch finds it through the entry-point group
``torch_dynamo_backends``, so ``torch.compile(model, backend="ipex")`` works without importing ipex::

    model = torch.compile(model.eval(), backend="ipex")
    with torch.no_grad():
        model(x)

Three things happen beyond plain Inductor, all of them only for graphs that need no gradient:

* **Freezing that takes effect.** ``options={"freezing": True}`` of stock ``torch.compile`` does nothing, because Dynamo
  has already turned the parameters into inputs when the option is read. Here the parameter inputs are turned back into
  constants, each protected by an identity guard, so that Inductor folds and prepacks the weights. Weights that change
  afterwards are noticed at the next call: the graph then runs unfrozen, with a warning. Buffers that the graph itself
  writes to, such as the keys and values of a static cache, stay inputs: anybody may change them at any time.
* **No need for ``no_grad``.** A graph with no input that requires grad is compiled for inference even when grad mode
  is on.
* **Patterns.** Attention, norms, rotary embeddings, gated MLPs, linear layers with what follows them and weight-only
  quantized products become ops of ours where that is not slower; see `ipex_core.fusion.aten`. `ipex.explain` of a
  compiled model lists them, and those that were left alone, with the reason.

A graph that needs gradients goes through AOTAutograd and plain Inductor. Graphs of the device xpu run op by op where
there is no Triton for it, with the ipex ops that have patterns.
"""

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ipex_core.compiler import (
    CompiledGraph,
    FrozenGraph,
    Options,
    compiled_often,
    lift_parameters,
    read_options,
)
from ipex_core.fusion import GraphReport, Origin, remember, tensor_refs
from ipex_core.kernels.policy import prefer_ipex_attention

__all__ = ["compile", "ipex_backend", "prefer_ipex_attention"]

#: What we set beyond Inductor's own defaults when no gradient is needed. ``options`` wins over it.
INFERENCE_DEFAULTS: Mapping[str, Any] = {"freezing": True}

#: The places among Inductor's passes between freezing and its own fusions, and behind these.
_FROZEN, _AFTER = "post_grad_custom_pre_pass", "post_grad_custom_post_pass"

_COMPILER_BACKENDS = ("inductor",)
_compiler_backend = "inductor"

_Compiled = Callable[..., Any]
#: Whether calls in C++ cost less than those in Python: with torch 2.11 they took an eighth more.
_CALLS_IN_CPP = torch.__version__ >= "2.13"


# --------------------------------------------------------------------------------------------------------------------
# Public entry points


def ipex_backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> _Compiled:
    """Compile one Dynamo graph; the function behind ``torch.compile(..., backend="ipex")``.

    Args:
        gm: the captured graph.
        example_inputs: one value per graph input.
        mode: ``None`` or a mode of ``torch.compile`` (``"default"``, ``"reduce-overhead"``, ``"max-autotune"``,
            ``"max-autotune-no-cudagraphs"``). In the place of CUDA graphs, part of two of them, the CPU gets the calls
            between kernels in C++ (Inductor's option ``"cpp_wrapper"``) in graphs for inference, from torch 2.13 on.
        options: Inductor options (``torch._inductor.list_options()``), e.g. ``{"freezing": False}``, and ours:
            ``"ipex.disable"``, names of patterns to leave out or True for all; ``"ipex.always"``, True to let patterns
            fire also where Inductor's own code was measured to be as fast; ``"ipex.program"``, True to run frozen
            graphs as programs of the kernel package, which takes seconds to compile and needs no compiler of C++,
            ``"auto"`` to do so where few ops lack an instruction, False to let Inductor write code. Without it:
            ``"auto"``, and False with a mode, an option of Inductor or ``"ipex.always"``.

    Returns:
        A callable that takes the graph inputs.

    Raises:
        ValueError: for an unknown mode or option, or an option value of the wrong type. Inside ``torch.compile`` it
            arrives as the cause of ``BackendCompilerFailed``.
    """
    asked = read_options(mode, options)
    name, origin = _origin(gm, example_inputs)
    report = GraphReport(name, inference=not _needs_grad(gm, example_inputs))
    compiled = _compile(gm, example_inputs, asked, report)
    remember(compiled, report, origin)
    return compiled


def compile(
    model: fx.GraphModule,
    example_inputs: Sequence[Any],
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> _Compiled:
    """Compile a graph module with the ipex backend, without Dynamo.

    Most users want ``torch.compile(model, backend="ipex")``.

    Args:
        model: A graph module, for instance of ``torch.fx.symbolic_trace``.
        example_inputs: One value per input of the graph.
        mode: None or a mode of ``torch.compile``.
        options: Options of Inductor, as ``torch.compile`` takes them, and ours; see `ipex_backend`.

    Returns:
        A callable that takes the inputs of the graph.

    Raises:
        ValueError: An unknown mode or option, or an option value of the wrong type.

    Example:
        >>> import torch
        >>> from ipex_core.compile_backend import compile
        >>> gm = torch.fx.symbolic_trace(torch.nn.Linear(4, 4).eval().requires_grad_(False))
        >>> compile(gm, [torch.ones(2, 4)])(torch.ones(2, 4)).shape
        torch.Size([2, 4])
    """
    return ipex_backend(model, example_inputs, mode=mode, options=options)


def set_compiler_backend(backend: str = "inductor") -> None:
    """Choose the compiler behind `compile`: there is ``"inductor"``.

    ``"torchscript"``, which IPEX had, too, chooses it with a warning: it takes all that TorchScript took, and more.

    Raises:
        ValueError: at once, for any other name.
    """
    global _compiler_backend
    if backend == "torchscript":
        warnings.warn(
            '_set_compiler_backend: backend "torchscript" is not offered, "inductor" is used, which compiles the same'
            " models; for a TorchScript program call torch.jit.trace on the model",
            stacklevel=2,
        )
        backend = "inductor"
    if backend not in _COMPILER_BACKENDS:
        raise ValueError(
            f"_set_compiler_backend: backend must be one of {list(_COMPILER_BACKENDS)}, got {backend!r}"
        )
    _compiler_backend = backend


def get_compiler_backend() -> str:
    """Return the name of the compiler behind `compile`."""
    return _compiler_backend


#: The names that these functions have in IPEX.
_set_compiler_backend, _get_compiler_backend = set_compiler_backend, get_compiler_backend


# --------------------------------------------------------------------------------------------------------------------
# Compiling


def _compile(
    gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Options, report: GraphReport
) -> CompiledGraph:
    if _on_xpu(gm, example_inputs):
        from ipex_core.compiler import compile_eager

        return CompiledGraph(compile_eager(gm, example_inputs, asked, report), report)
    patches = dict(asked.inductor)
    if not report.inference:
        report.notes.append("a gradient is needed: Inductor's own code, no patterns")
        return CompiledGraph(_compile_training(gm, example_inputs, patches, report), report)
    patches = {**INFERENCE_DEFAULTS, **patches}
    written: list[Tensor] = []
    patches.update(_custom_passes(asked, patches, report, written))
    # Inductor freezes only when grad mode is off. Nothing here requires grad, and Dynamo guards both the mode and the
    # inputs' requires_grad, so turning it off for the compilation changes no result.
    with torch.no_grad():
        if not patches["freezing"] or compiled_often():
            if patches["freezing"]:
                report.notes.append(
                    "compiled often: not frozen, so that one graph serves all the rest"
                )
            return CompiledGraph(_inference(gm, example_inputs, patches, asked, report), report)
        return _compile_frozen(gm, example_inputs, patches, asked, report, written)


def _on_xpu(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Whether a graph works with tensors of xpu and Inductor has no compiler for them."""
    known = [*example_inputs, *gm.parameters(), *gm.buffers()]
    # A graph may make its tensors, too, and take none.
    made = [node.meta.get("example_value", node.meta.get("val")) for node in gm.graph.nodes]
    if not any(isinstance(t, Tensor) and t.device.type == "xpu" for t in (*known, *made)):
        return False
    try:
        from triton.backends import backends  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        return True
    return "intel" not in backends  # a backend of other GPUs does not help


def _needs_grad(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    if any(n.target is torch._C._functorch._grad_increment_nesting for n in gm.graph.nodes):
        return True  # torch.func.grad, vjp or jacrev inside: its own derivatives, whatever the inputs require
    if not torch.is_grad_enabled() and not _enables_grad(gm):
        return False
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    return any(t.requires_grad for t in (*tensors, *gm.parameters(), *gm.buffers()))


def _enables_grad(gm: fx.GraphModule) -> bool:
    """Whether the graph itself turns grad mode on (``with torch.enable_grad():`` inside the compiled function)."""
    return any(n.target is torch._C._set_grad_enabled and n.args == (True,) for n in gm.graph.nodes)


def _inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> _Compiled:
    from torch._inductor.compile_fx import compile_fx

    # compile_fx returns the graph's own output structure; its declared type is wider than what a backend sees.
    return compile_fx(gm, example_inputs, config_patches=patches)  # type: ignore[return-value]


def _inference(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    asked: Options,
    report: GraphReport,
) -> _Compiled:
    if "cpp_wrapper" in patches or not (asked.lean and _CALLS_IN_CPP):
        return _inductor(gm, example_inputs, patches)
    from torch._dynamo.exc import RestartAnalysis

    # compile_fx owns and mutates the graph it gets.
    spare = _spare(gm)
    try:
        compiled = _inductor(gm, example_inputs, {**patches, "cpp_wrapper": True})
    except RestartAnalysis:  # no failure: Dynamo restarts, with some number as a constant
        raise
    except Exception as error:  # Inductor writes less into C++ than into Python, and g++ may fail
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        report.fusions.clear()
        report.notes.append(
            f"calls between kernels stay in Python, since those in C++ failed: {reason}"
        )
        return _inductor(spare, example_inputs, patches)
    report.notes.append("calls between kernels are in C++")
    return compiled


def _spare(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph of Dynamo with the marks by which AOTAutograd knows it; a deepcopy drops them."""
    spare = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    spare.meta.update(gm.meta)
    pairs: list[tuple[Any, Any]] = [
        (gm, spare),
        *zip(gm.graph.nodes, spare.graph.nodes, strict=True),
    ]
    for given, copied in pairs:
        for mark in ("_param_name_to_source", "_dynamo_source"):
            if mark in vars(given):
                setattr(copied, mark, getattr(given, mark))
    return spare


def _compile_training(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    report: GraphReport,
) -> _Compiled:
    from ipex_core.fusion.aten.passes import compile_around_recurrent, has_recurrent

    if not has_recurrent(gm):
        return _inductor(gm, example_inputs, patches)
    whole, parts = compile_around_recurrent(gm, functools.partial(_inductor, patches=patches))
    report.notes.append(f"recurrent layers run as they are, {parts} parts around them are compiled")
    return whole


def _compile_frozen(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    patches: dict[str, Any],
    asked: Options,
    report: GraphReport,
    written: list[Tensor],
) -> CompiledGraph:
    lifted = lift_parameters(gm, example_inputs)
    kept = [i for i in range(len(example_inputs)) if i not in lifted]
    weights = [*gm.parameters(), *gm.buffers()]
    report.frozen = True
    # compile_fx owns and mutates the graph it gets; this copy is what runs when the weights have changed.
    unfrozen = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    inputs = [example_inputs[i] for i in kept]
    compiled = None
    if asked.program:
        compiled = _compile_program(gm, inputs, asked, report, written)
    if compiled is None:
        compiled = _inference(gm, inputs, patches, asked, report)
    # What the graph writes to itself (the keys and values of a cache) it also reads again in each call.
    alive = {id(tensor) for tensor in written}
    weights = [weight for weight in weights if id(weight) not in alive]
    if patches.get("freezing_discard_parameters"):
        weights = []  # their values are gone, so there is nothing to compare
    return FrozenGraph(compiled, report, kept, len(example_inputs), weights, unfrozen)


def _compile_program(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    asked: Options,
    report: GraphReport,
    written: list[Tensor],
) -> _Compiled | None:
    """Return a graph as a program, or None where it is left to Inductor."""
    from ipex_core.precompiled.backend import NoProgramError, compile_program

    whatever = asked.program is True
    try:
        return compile_program(_spare(gm), inputs, report, asked.disable, written, whatever)
    except NoProgramError as error:
        report.fusions.clear()
        report.notes.append(f"not run as a program: {error}")
        return None


def _custom_passes(
    asked: Options, patches: Mapping[str, Any], report: GraphReport, inputs: list[Tensor]
) -> dict[str, Any]:
    """Return our passes as three of Inductor's, each followed by what the user has set.

    When they run they put into ``inputs`` the parameters and buffers that freezing leaves alone.
    """
    names = ("joint_custom_pre_pass", _FROZEN, _AFTER)
    before, frozen, after = (patches.get(name) for name in names)
    freezing = bool(patches["freezing"])
    return {
        names[0]: functools.partial(_run, asked, before, freezing, report, inputs),
        _FROZEN: functools.partial(_pack, asked, frozen, freezing, report),
        _AFTER: functools.partial(_look, after, report),
    }


def _pack(asked: Options, also: Any, freezing: bool, report: GraphReport, graph: fx.Graph) -> None:
    from ipex_core.fusion.aten.conv import pack_convolutions

    if freezing and report.frozen:
        pack_convolutions(graph, report, asked.disable, asked.always)
    _run_others(also, graph)


def _look(also: Any, report: GraphReport, graph: fx.Graph) -> None:
    from ipex_core.fusion.aten.conv import report_convolutions

    report_convolutions(report, graph)
    _run_others(also, graph)


def _run_others(passes: Any, graph: fx.Graph) -> None:
    for other in passes if isinstance(passes, (list, tuple)) else (passes,):
        if other is not None:
            other(graph)


def _run(
    asked: Options,
    also: Any,
    freezing: bool,
    report: GraphReport,
    inputs: list[Tensor],
    graph: fx.Graph,
) -> None:
    from torch._inductor.fx_passes.post_grad import remove_noop_ops

    from ipex_core.fusion.aten import Context
    from ipex_core.fusion.aten.attention import guard_attention
    from ipex_core.fusion.aten.passes import run_passes, split_parameters

    # What is left of dropout is a copy between any two ops.
    remove_noop_ops(graph)
    constants: list[fx.Node] = []
    if freezing and report.frozen:
        positions, inputs[:] = split_parameters()
        placeholders = graph.find_nodes(op="placeholder")
        constants = [node for i, node in enumerate(placeholders) if i in positions]
    run_passes(graph, report, constants, asked.disable, asked.always)
    guard_attention(Context(graph, set(), report))
    _run_others(also, graph)


# --------------------------------------------------------------------------------------------------------------------
# Reports


def _origin(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> tuple[str, Origin]:
    """Return a name for a graph and whose it is."""
    tensors = [t for t in example_inputs if isinstance(t, Tensor)]
    static = [t for t in tensors if getattr(t, "_dynamo_static_input_type", None) is not None]
    name, code = _start()
    return name, Origin(code, tensor_refs((*static, *gm.parameters(), *gm.buffers())))


def _start() -> tuple[str, tuple[str, int] | None]:
    """Return where the function begins that Dynamo is compiling; torch has no other way to ask for it."""
    frame: Any = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "_compile" and code.co_filename.endswith("convert_frame.py"):
            compiled = frame.f_locals.get("code")
            if isinstance(compiled, types.CodeType):
                place = (compiled.co_filename, compiled.co_firstlineno)
                return f"{compiled.co_name} ({place[0]}:{place[1]})", place
        frame = frame.f_back
    return "graph module", None

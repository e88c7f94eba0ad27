# SPDX-License-Identifier: Apache-2.0
"""What the backend of ``torch.compile`` does with a graph.

``mode`` and ``options``: Inductor's own, and ours, whose names begin with ``ipex.``. Freezing: weights of a graph that
needs no gradient become constants. Graphs of the device xpu without a Triton for it: our patterns, and then op by op.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import torch
from torch import Tensor, fx

from ipex_core.errors import FallbackError
from ipex_core.fusion import GraphReport, Weights


@dataclasses.dataclass(frozen=True)
class Options:
    """What a compilation was asked for.

    Attributes:
        disable: ``"ipex.disable"``: names of patterns to leave out, or True for all of them.
        always: ``"ipex.always"``: let patterns fire also where Inductor's own code was measured to be as fast.
        program: ``"ipex.program"``: run graphs for inference as programs of the kernel package; ``"auto"``: if few of
            their ops lack an instruction. Without the option: ``"auto"``, and False with a mode, an option of
            Inductor or ``"ipex.always"``.
        inductor: Patches of Inductor's configuration.
        lean: The mode asks for little cost per call: CUDA graphs on a GPU, calls between kernels in C++ on a CPU.
    """

    disable: frozenset[str] = frozenset()
    always: bool = False
    program: bool | str = False
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    lean: bool = False


def read_options(mode: str | None, options: Mapping[str, Any] | None) -> Options:
    """Check mode and options.

    Raises:
        ValueError: An unknown mode or option, or a value of the wrong type; the text names it.
    """
    import torch._inductor as inductor
    from torch._inductor import config

    patches: dict[str, Any] = {}
    lean = False
    if mode is not None:
        modes = inductor.list_mode_options()
        if not isinstance(mode, str) or mode not in modes:
            raise ValueError(f"compile: mode must be one of {sorted(modes)}, got {mode!r}")
        patches.update((k, v) for k, v in modes[mode].items() if not k.startswith("triton."))
        lean = modes[mode].get("triton.cudagraphs") is True
    if options is not None and not isinstance(options, Mapping):
        raise ValueError(f"compile: options must be a mapping of names to values, got {options!r}")
    known: dict[str, Any] = config.get_config_copy()
    own: dict[str, Any] = {}
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise ValueError(f"compile: names of options must be strings, got {key!r}")
        if key.startswith("ipex."):
            own[key] = value
            continue
        name = key.replace("-", "_")
        if name not in known:
            raise _unknown(key, [*known, *_OWN])
        if isinstance(known[name], bool) and not isinstance(value, bool):
            raise ValueError(f"compile: option {key!r} must be a bool, got {value!r}")
        kinds = _kinds(config.get_type(name))  # type: ignore[attr-defined]
        if kinds and not isinstance(value, kinds):
            names = " or ".join("None" if k is type(None) else k.__name__ for k in kinds)
            raise ValueError(f"compile: option {key!r} must be of type {names}, got {value!r}")
        patches[name] = value
    ours = {name: read(own[key]) for key, (name, read) in _own(own)}
    # A mode and options that only Inductor knows ask for Inductor.
    inductors = mode is not None or bool(patches) or ours.get("always", False)
    ours.setdefault("program", False if inductors else "auto")
    return Options(**ours, inductor=patches, lean=lean)


def _kinds(annotation: Any) -> tuple[type, ...]:
    """Return the classes of an option of Inductor, or nothing if its annotation has more than plain classes."""
    union = get_origin(annotation) in (Union, types.UnionType)
    kinds = get_args(annotation) if union else (annotation,)
    plain = all(isinstance(k, type) and get_origin(k) is None for k in kinds)
    if not plain:
        return ()
    return (*kinds, int) if float in kinds and int not in kinds else kinds


def _own(given: Mapping[str, Any]) -> list[tuple[str, tuple[str, Any]]]:
    for key in given:
        if key not in _OWN:
            raise _unknown(key, list(_OWN))
    return [(key, _OWN[key]) for key in given]


def _unknown(key: str, known: list[str]) -> ValueError:
    close = difflib.get_close_matches(key, known, n=3)
    hint = f", did you mean {' or '.join(close)}?" if close else ""
    return ValueError(
        f"compile: unknown option {key!r}{hint} (torch._inductor.list_options() lists all of Inductor's,"
        f" ours are {', '.join(_OWN)})"
    )


def _disable(value: Any) -> frozenset[str]:
    from ipex_core.fusion.aten.passes import PATTERNS

    if isinstance(value, bool):
        return frozenset(PATTERNS if value else ())
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or any(
        name not in PATTERNS for name in names
    ):
        raise ValueError(
            f"compile: option 'ipex.disable' must be a bool or some of {', '.join(PATTERNS)}, got {value!r}"
        )
    return frozenset(names)


def _flag(name: str) -> Callable[[Any], bool]:
    def read(value: Any) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"compile: option '{name}' must be a bool, got {value!r}")
        return value

    return read


def _program(value: Any) -> bool | str:
    if not isinstance(value, bool) and value != "auto":
        raise ValueError(
            f"compile: option 'ipex.program' must be True, False or 'auto', got {value!r}"
        )
    return value  # type: ignore[no-any-return]


_OWN: dict[str, tuple[str, Any]] = {
    "ipex.disable": ("disable", _disable),
    "ipex.always": ("always", _flag("ipex.always")),
    "ipex.program": ("program", _program),
}


# --- freezing -------------------------------------------------------------------------------------------------------

log = logging.getLogger("ipex")

Compiled = Callable[..., Any]


def compiled_often() -> bool:
    """Whether Dynamo is about to give up on this code object because it has been compiled too often.

    That happens when the layers of a model are compiled one by one: they share one ``forward`` and each frozen graph
    serves one layer only. A graph that is not frozen serves all the remaining ones.
    """
    from torch._dynamo import config
    from torch._guards import CompileContext

    compile_id = CompileContext.current_compile_id()
    times = getattr(compile_id, "frame_compile_id", None)
    # Two are kept back: for the unfrozen graph and for its variant with dynamic shapes.
    return times is not None and times >= config.recompile_limit - 2


def lift_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Tensor]:
    """Turn the parameter and buffer inputs of a Dynamo graph into attributes of it; return them by input position.

    Graphs that Dynamo did not make are left as they are: their parameters are attributes already.
    """
    sources: dict[str, Any] | None = getattr(gm, "_param_name_to_source", None)
    if sources is None:
        return {}
    from torch._dynamo.guards import GuardBuilder, install_guard

    gm._param_name_to_source = sources = dict(sources)  # type: ignore[assignment]
    lifted: dict[int, Tensor] = {}
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, (node, value) in enumerate(zip(placeholders, example_inputs, strict=True)):
        source = getattr(node, "_dynamo_source", None)
        if (
            source is None
            or not isinstance(value, Tensor)
            or getattr(value, "_dynamo_static_input_type", None) is None
        ):
            continue
        name = f"ipex_frozen_{position}"
        # A buffer, whatever it was: no gradient is wanted and a Parameter would have to be a leaf of float type.
        gm.register_buffer(name, value)
        sources[name] = source
        with gm.graph.inserting_before(node):
            constant = gm.graph.get_attr(name)
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)
        gm.graph.erase_node(node)
        # Without this, another module of the same class would run with the weights of this one.
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        lifted[position] = value
    gm.recompile()
    return lifted


def _below_autograd(compiled: Compiled) -> Compiled:
    def call(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return compiled(*args)

    return call


class CompiledGraph:
    """What Dynamo gets: a compiled graph with the report on its passes.

    A graph for inference runs below autograd: nothing in it records a gradient, and each call of an op of ours would
    otherwise go through autograd's kernel, which is written in Python. In-place changes and views are tracked as ever:
    that is the business of another dispatch key.
    """

    def __init__(self, compiled: Compiled, report: GraphReport) -> None:
        self._compiled = _below_autograd(compiled) if report.inference else compiled
        self.report = report

    def __call__(self, *args: Any) -> Any:
        return self._compiled(*args)


class FrozenGraph(CompiledGraph):
    """A frozen compiled graph that notices when its weights have changed since."""

    def __init__(
        self,
        compiled: Compiled,
        report: GraphReport,
        kept: list[int],
        n_inputs: int,
        weights: list[Tensor],
        unfrozen: fx.GraphModule,
    ) -> None:
        super().__init__(compiled, report)
        self._kept = kept
        self._n_inputs = n_inputs
        self._weights = Weights(weights)
        self._unfrozen = unfrozen
        self._stale = False

    def __call__(self, *args: Any) -> Any:
        # Dynamo reads the inputs to pass from the graph that was edited, and so leaves the lifted ones out. A wrapper
        # between Dynamo and us may still pass them all.
        if len(args) == self._n_inputs != len(self._kept):
            args = tuple(args[i] for i in self._kept)
        if self._stale or not self._weights.same():
            return self._run_unfrozen(args)
        return self._compiled(*args)

    def _run_unfrozen(self, args: tuple[Any, ...]) -> Any:
        if not self._stale:
            message = (
                "torch.compile(backend='ipex'): the weights changed after compilation, so the frozen graph is no longer"
                " valid and the graph runs uncompiled; call torch.compiler.reset() to compile it again"
            )
            from ipex_core import config

            if config.get("strict"):
                raise FallbackError(message)
            log.warning(message)
            self._stale = True
        return self._unfrozen(*args)


# --- the device xpu without Triton ----------------------------------------------------------------------------------

#: Further passes over graphs of aten ops, of the package that has the device: each returns notes on what it did.
xpu_passes: list[Callable[[fx.GraphModule], list[str]]] = []
#: Patterns whose ops read weights in the order of the CPU, or that gain by Inductor's code around them.
_CPU_ONLY = frozenset({"attention", "linear", "post_op"})


def compile_eager(
    gm: fx.GraphModule, example_inputs: Sequence[Any], asked: Options, report: GraphReport
) -> Callable[..., Any]:
    """Return the graph as a sequence of ops; inference graphs are fused where our patterns match.

    Args:
        gm: The graph of Dynamo.
        example_inputs: One value for each input.
        asked: Options of the user; options of Inductor have no meaning here.
        report: Collects the decisions.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func  # type: ignore[attr-defined]

    report.notes.append("xpu without Triton: ops of ipex and torch, one by one")

    def inference(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        from ipex_core.fusion.aten.passes import run_passes

        disabled = _CPU_ONLY | frozenset(asked.disable)
        run_passes(graph.graph, report, (), disabled, always=True, kernels=lambda op: True)
        return finish(graph, inputs)

    def finish(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if "elementwise" not in asked.disable:
            for change in xpu_passes:
                report.notes.extend(change(graph))
        graph.recompile()
        return make_boxed_func(graph.forward)

    compiler: Any = aot_autograd(
        fw_compiler=finish,
        bw_compiler=finish,
        inference_compiler=inference if report.inference else finish,
    )
    if report.inference:
        # As in Inductor's way: nothing here requires a gradient, though its calculation may be on.
        with torch.no_grad():
            compiled: Callable[..., Any] = compiler(gm, example_inputs)
        return compiled
    result: Callable[..., Any] = compiler(gm, example_inputs)
    return result

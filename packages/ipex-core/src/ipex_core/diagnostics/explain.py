# SPDX-License-Identifier: Apache-2.0
"""What is active and why: `op_info` and `show_config` for the process, `explain` for a model."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ipex_core import ops as _ops  # noqa: F401  (registers all ops)
from ipex_core.errors import IpexError, UnknownOpError
from ipex_core.fusion import GraphReport, reports_of
from ipex_core.kernels import providers
from ipex_core.library.kernels import specs
from ipex_core.library.spec import dtype_name
from ipex_core.module_swap.state_dict import state_of
from ipex_core.optimization import PASSES
from ipex_core.optimization.records import (
    Quantization,
    Record,
    class_name,
    log_of,
    quantization_of,
)
from ipex_core.precompiled.call import Precompiled


def op_info(name: str) -> dict[str, Any]:
    """Tell which kernels stand behind an op.

    Args:
        name: Name of the op, for instance ``"rms_norm"``.

    Returns:
        A dictionary with ``op``, ``schema``, ``summary``, ``dtypes``, ``autocast``, ``backward``, ``provider`` (the
        package whose kernel runs on the CPU, or ``"reference"``), ``kernels`` (symbol -> ``current`` level and
        ``available`` levels) and ``stock_when`` (conditions under which the stock op is used instead, or None).

    Raises:
        UnknownOpError: No op has this name.

    Example:
        >>> op_info("rms_norm")["op"]
        'rms_norm'
    """
    spec = specs().get(name)
    if spec is None:
        near = difflib.get_close_matches(name, specs(), n=3)
        hint = (
            f"; did you mean {', '.join(near)}?"
            if near
            else f"; known ops: {', '.join(sorted(specs()))}"
        )
        raise UnknownOpError(f"no op is named {name!r}{hint}")
    provider = providers.provider_for("cpu")
    implements = provider is not None and name in provider.ops
    kernels = provider.kernels(name) if provider is not None and implements else ()
    return {
        "op": name,
        "schema": spec.name + spec.schema,
        "summary": spec.summary,
        "dtypes": [dtype_name(d) for d in spec.dtypes],
        "autocast": spec.autocast,
        "backward": "function" if callable(spec.backward) else spec.backward,
        "provider": provider.name if provider is not None and implements else "reference",
        "kernels": {
            k.symbol: {"current": k.current, "available": list(k.available)} for k in kernels
        },
        "stock_when": provider.stock_when.get(name) if provider is not None else None,
    }


def show_config() -> str:
    """Return the configuration and the state of all packages as text, for bug reports.

    What is wrong with either is part of the text: a value that is not allowed, a package that cannot be loaded, a
    demand (``IPEX_CPU_ISA``) that cannot be met.

    Returns:
        Some lines: versions, each variable with its value and where that comes from, kernel packages, components.

    Example:
        >>> print(show_config())  # doctest: +ELLIPSIS
        ipex-core ..., torch ...
        <BLANKLINE>
        configuration:
          IPEX_CPU_ISA = ...
    """
    import torch

    from ipex_core import _version, config

    lines = [f"ipex-core {_version.__version__}, torch {torch.__version__}", "", "configuration:"]
    for setting in config.settings():
        shown = setting.error or setting.source
        lines.append(f"  {setting.variable.name} = {_shown(setting.value)} ({shown})")
    lines += ["", "kernel packages:"]
    try:
        statuses = providers.load_providers()
    except IpexError as error:
        statuses = ()
        lines.append(f"  cannot be loaded: {error}")
    for status in statuses:
        text = f"  {status.name}: {status.state}"
        if status.info is not None:
            text += f", {status.distribution} {status.info.version}, ISA level {status.info.isa}"
        if status.cause is not None:
            text += f", {status.distribution}: {status.cause}"
        lines.append(text)
    lines += ["", "components:"]
    for component in providers.components():
        version = f" {component.version}" if component.version else ""
        lines.append(f"  {component.name}: {component.state}, {component.distribution}{version}")
    return "\n".join(lines)


def _shown(value: object) -> str:
    # As it is written in the environment.
    if isinstance(value, bool):
        return str(int(value))
    return str(getattr(value, "name", value)) or "(empty)"


# --- explain ----------------------------------------------------------------------------------------------------------


#: Classes that `optimize` has something to offer for.
_CANDIDATES = (
    nn.Linear,
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._BatchNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.LSTM,
    nn.modules.dropout._DropoutNd,
    nn.GELU,
    nn.Softmax,
    nn.EmbeddingBag,
)

#: Layers of some weight for which passes may have nothing; what fuses with a neighbor is not among them.
_OFTEN_LEFT = (
    nn.modules.conv._ConvNd,
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.PReLU,
    nn.Bilinear,
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `explain`; ``str()`` gives a table.

    Attributes:
        optimized: Whether the model was optimized.
        model: Class of the model.
        dtype: The dtype asked for, or None.
        level: The level, or None.
        isa: ISA level of the CPU kernel package, or None without one.
        capability: The ISA that torch's own kernels use.
        rows: One `Record` per decision, in module order.
        notes: Remarks on the whole.
        extra_bytes: Memory kept to give the exact originals back.
        graphs: One `GraphReport` per graph that ``torch.compile(backend="ipex")`` has compiled, with the patterns that
            fired and those that did not.
        program: Of a precompiled model: instructions, calls of torch and memory of a run.
    """

    optimized: bool
    model: str
    dtype: str | None
    level: str | None
    isa: str | None
    capability: str
    rows: tuple[Record, ...]
    notes: tuple[str, ...]
    extra_bytes: int = 0
    graphs: tuple[GraphReport, ...] = ()
    program: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, ready for JSON."""
        return dataclasses.asdict(self)

    def for_module(self, path: str) -> tuple[Record, ...]:
        """Return the records of one module."""
        return tuple(row for row in self.rows if row.module == path)

    def __str__(self) -> str:
        quantized = any(row.done for row in self.rows)
        state = "optimized" if self.optimized else "quantized" if quantized else "not optimized"
        if self.program:
            state = "precompiled"
        state += ", compiled" if self.graphs and not self.program else ""
        head = f"{self.model}: {state}"
        if self.optimized:
            head += f", level {self.level}, dtype {self.dtype or 'unchanged'}"
        kernels = f"kernel package at ISA level {self.isa}" if self.isa else "no kernel package"
        lines = [head, f"{kernels}; torch kernels at {self.capability}"]
        if self.extra_bytes:
            lines.append(f"{self.extra_bytes / 2**20:.1f} MiB keep the exact originals")
        lines += [self.program] if self.program else []
        lines += [f"note: {note}" for note in self.notes]
        lines += ["", *_table(self.rows)] if self.rows else []
        for graph in self.graphs:
            lines += ["", *_graph_lines(graph)]
        return "\n".join(lines)


def _table(rows: tuple[Record, ...]) -> list[str]:
    header = ("module", "class", "step", "", "what", "kernel")
    body = [
        (r.module or "(model)", r.kind, r.step, "done" if r.done else "skipped", r.text, r.kernel)
        for r in rows
    ]
    widths = [min(44, max(len(row[i]) for row in [header, *body])) for i in range(4)]
    lines = []
    for row in [header, *body]:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        tail = row[4] + (f"  [{row[5]}]" if row[5] and row[5] != "kernel" else "")
        lines.append("  ".join([*cells, tail]).rstrip())
    return lines


def _graph_lines(graph: GraphReport) -> list[str]:
    """Return the decisions on one compiled graph, equal ones counted."""
    kind = "inference" if graph.inference else "training"
    frozen = ", weights frozen" if graph.frozen else ""
    lines = [f"graph {graph.name}: {kind}{frozen}, {graph.count()} fusions"]
    lines += [f"note: {note}" for note in graph.notes]
    counted = Counter(
        (f.pattern, "fused" if f.fired else "kept", f.op, f.text) for f in graph.fusions
    )
    rows = [(f"{count}x", *key) for key, count in counted.items()]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    return lines + [
        "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]])
        for row in rows
    ]


def explain(model: nn.Module | Precompiled | Callable[..., Any]) -> Explanation:
    """Tell what `ipex.optimize`, `ipex.quantization.convert` and ``torch.compile`` did to a model, or could do.

    Args:
        model: Any module, a `Precompiled`, or what ``torch.compile`` or `ipex.compile` returned for a module or a
            function. A compiled one has to have been called: that is when it is compiled.

    Returns:
        An `Explanation`; printing it shows a table.

    Raises:
        TypeError: ``model`` is neither a module nor a compiled function.

    Example:
        >>> import torch
        >>> explain(torch.nn.Sequential(torch.nn.Linear(256, 256))).optimized
        False
    """
    if isinstance(model, Precompiled):
        return _precompiled(model)
    graphs = tuple(reports_of(model))
    compiled = hasattr(model, "_torchdynamo_orig_callable") or bool(graphs)
    if not isinstance(model, nn.Module) and not compiled:
        raise TypeError(f"explain: model must be a torch.nn.Module, got {type(model).__name__}")
    from ipex_core.kernels import providers

    if not isinstance(model, nn.Module):
        model = _Function()
        name = "function"
    else:
        model = getattr(model, "_orig_mod", model)
        name = type(model).__name__
    log = log_of(model)
    common: dict[str, Any] = {
        "model": name,
        "graphs": graphs,
        "isa": providers.cpu_level(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }
    more = quantization_of(model) or Quantization()
    if log is None:
        advice = () if isinstance(model, _Function) else _advice(model)
        rows, notes = tuple(more.records), (*more.notes, *advice)
        return Explanation(False, rows=rows, notes=notes, dtype=None, level=None, **common)
    dtype = log.options.dtype
    rows = _ordered(model, [*more.records, *log.records])
    return Explanation(
        True,
        rows=rows,
        notes=(*more.notes, *log.notes, *_left_alone(model, rows, graphs)),
        dtype=None if dtype is None else dtype_name(dtype),
        level=log.options.level,
        extra_bytes=_extra_bytes(model),
        **common,
    )


def _precompiled(model: Precompiled) -> Explanation:
    from ipex_core.kernels import providers

    mib = [f"{size / 2**20:.1f} MiB" for size in (model.peak_bytes, model.eager_bytes)]
    calls = ", ".join(f"{count}x {name}" for name, count in model.calls.most_common())
    linears = f" linear layers of torch, as measured: {model.linears};" if model.linears else ""
    return Explanation(
        False,
        model=model.name,
        dtype=None,
        level=None,
        isa=providers.cpu_level(),
        capability=torch.backends.cpu.get_cpu_capability(),
        rows=(),
        notes=(),
        graphs=() if model.report is None else (model.report,),
        program=(
            f"{model.instructions} instructions; without an instruction, called through torch: {calls or 'none'};"
            f"{linears} intermediate results take {mib[0]} at most, op by op {mib[1]}"
        ),
    )


class _Function(nn.Module):
    """Stands for a compiled function, which has no modules."""


def _ordered(model: nn.Module, records: list[Record]) -> tuple[Record, ...]:
    place = {path: i for i, (path, _) in enumerate(model.named_modules())}
    steps = {name: i for i, name in enumerate((*(step.name for step in PASSES), "concat_linear"))}
    return tuple(sorted(records, key=lambda r: (place.get(r.module, -1), steps.get(r.step, -1))))


def _extra_bytes(model: nn.Module) -> int:
    seen: dict[int, int] = {}
    for module in model.modules():
        state = state_of(module)
        for saved in state.saved.values() if state is not None else ():
            seen[id(saved)] = saved.nbytes
    return sum(seen.values())


def _left_alone(
    model: nn.Module, rows: tuple[Record, ...], graphs: tuple[GraphReport, ...]
) -> tuple[str, ...]:
    """Return a note on layers that no pass is for: without a row they would look forgotten."""
    if graphs or any(row.step in ("graph_mode", "llm") for row in rows):
        return ()  # a program runs them
    told = {row.module for row in rows if row.step != "cast"}
    kinds = Counter(
        class_name(module)
        for path, module in model.named_modules()
        if isinstance(module, _OFTEN_LEFT) and path not in told
    )
    if not kinds:
        return ()
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return (f"stock PyTorch computes what no pass is for: {listed}",)


def _advice(model: nn.Module) -> tuple[str, ...]:
    inner = [path for path, module in model.named_modules() if log_of(module) is not None]
    if inner:
        return (f"parts of it are optimized: {', '.join(inner)}; explain those",)
    kinds = Counter(type(m).__name__ for m in model.modules() if isinstance(m, _CANDIDATES))
    if not kinds:
        return ("ipex.optimize has nothing to offer for this model",)
    listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    if model.training:
        return (f"call model.eval(), then ipex.optimize(model) can work on: {listed}",)
    return (f"ipex.optimize(model) can work on: {listed}",)

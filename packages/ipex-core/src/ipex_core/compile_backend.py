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
  afterwards are noticed at the next call: the graph then runs unfrozen, with a warning.
* **No need for ``no_grad``.** A graph with no input that requires grad is compiled for inference even when grad mode
  is on.
* **Attention.** ``scaled_dot_product_attention`` becomes ``torch.ops.ipex.attention`` where that is faster.

A graph that needs gradients goes through AOTAutograd and plain Inductor.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from ipex_core._choice import prefer_ipex_attention
from ipex_core.errors import FallbackError

__all__ = ["compile", "ipex_backend", "prefer_ipex_attention"]

log = logging.getLogger("ipex")

#: What we set beyond Inductor's own defaults when no gradient is needed. ``options`` wins over it.
INFERENCE_DEFAULTS: Mapping[str, Any] = {"freezing": True}

_COMPILER_BACKENDS = ("inductor",)
_compiler_backend = "inductor"

_Compiled = Callable[..., Any]


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
            ``"max-autotune-no-cudagraphs"``). CUDA graphs, part of two of them, are left out on the CPU.
        options: Inductor options (``torch._inductor.list_options()``), e.g. ``{"freezing": False}``.

    Returns:
        A callable that takes the graph inputs.

    Raises:
        ValueError: for an unknown mode or option, or an option value of the wrong type. Inside ``torch.compile`` it
            arrives as the cause of ``BackendCompilerFailed``.
    """
    patches = _config_patches(mode, options)
    if _needs_grad(gm, example_inputs):
        return _inductor(gm, example_inputs, patches)

    patches = {**INFERENCE_DEFAULTS, **patches}
    replace_attention(gm)
    # Inductor freezes only when grad mode is off. Nothing here requires grad, and Dynamo guards both the mode and the
    # inputs' requires_grad, so turning it off for the compilation changes no result.
    with torch.no_grad():
        if not patches["freezing"] or _compiled_often():
            return _inductor(gm, example_inputs, patches)
        return _compile_frozen(gm, example_inputs, patches)


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
        options: Options of Inductor, as ``torch.compile`` takes them.

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


def _set_compiler_backend(backend: str = "inductor") -> None:
    """Choose the compiler behind `compile`; only ``"inductor"`` exists.

    Raises:
        ValueError: at once, for any other name.
    """
    global _compiler_backend
    if backend not in _COMPILER_BACKENDS:
        hint = ' ("torchscript" is gone: use torch.jit.trace)' if backend == "torchscript" else ""
        raise ValueError(
            f"_set_compiler_backend: backend must be one of {list(_COMPILER_BACKENDS)}, got {backend!r}{hint}"
        )
    _compiler_backend = backend


def _get_compiler_backend() -> str:
    """Return the name of the compiler behind `compile`."""
    return _compiler_backend


# --------------------------------------------------------------------------------------------------------------------
# Options


def _config_patches(mode: str | None, options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Turn mode and options into Inductor config patches, or raise ValueError naming the culprit."""
    import torch._inductor as inductor
    from torch._inductor import config

    patches: dict[str, Any] = {}
    if mode is not None:
        modes = inductor.list_mode_options()
        if mode not in modes:
            raise ValueError(f"compile: mode must be one of {sorted(modes)}, got {mode!r}")
        patches.update((k, v) for k, v in modes[mode].items() if not k.startswith("triton."))
    known: dict[str, Any] = config.get_config_copy()
    for key, value in (options or {}).items():
        name = key.replace("-", "_")
        if name not in known:
            import difflib

            close = difflib.get_close_matches(name, known, n=3)
            hint = f", did you mean {' or '.join(close)}?" if close else ""
            raise ValueError(
                f"compile: unknown option {key!r}{hint} (torch._inductor.list_options() lists all)"
            )
        current = known[name]
        if isinstance(current, bool) and not isinstance(value, bool):
            raise ValueError(f"compile: option {key!r} must be a bool, got {value!r}")
        patches[name] = value
    return patches


def _needs_grad(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
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


# --------------------------------------------------------------------------------------------------------------------
# Freezing


def _compile_frozen(
    gm: fx.GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]
) -> _Compiled:
    lifted = _lift_parameters(gm, example_inputs)
    kept = [i for i in range(len(example_inputs)) if i not in lifted]
    weights = [*gm.parameters(), *gm.buffers()]
    # compile_fx owns and mutates the graph it gets; this copy is what runs when the weights have changed.
    unfrozen = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    compiled = _inductor(gm, [example_inputs[i] for i in kept], patches)
    if patches.get("freezing_discard_parameters"):
        weights = []  # their values are gone, so there is nothing to compare
    return _FrozenGraph(compiled, kept, len(example_inputs), weights, unfrozen)


def _compiled_often() -> bool:
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


def _lift_parameters(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> dict[int, Tensor]:
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
        name = f"_ipex_frozen_{position}"
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


class _FrozenGraph:
    """A frozen compiled graph that notices when its weights have changed since."""

    def __init__(
        self,
        compiled: _Compiled,
        kept: list[int],
        n_inputs: int,
        weights: list[Tensor],
        unfrozen: fx.GraphModule,
    ) -> None:
        self._compiled = compiled
        self._kept = kept
        self._n_inputs = n_inputs
        self._weights = weights
        self._state = self._weight_state()
        self._unfrozen = unfrozen
        self._stale = False

    def _weight_state(self) -> list[tuple[int, int]]:
        # Versions catch in-place updates (load_state_dict), pointers catch `p.data = ...`. Inference tensors have no
        # version counter, packed oneDNN weights have no pointer. About 0.1 us per weight.
        return [
            (0 if w.is_inference() else w._version, id(w) if w.is_mkldnn else w.data_ptr())
            for w in self._weights
        ]

    def __call__(self, *args: Any) -> Any:
        # Dynamo reads the inputs to pass from the graph that was edited, and so leaves the lifted ones out. A wrapper
        # between Dynamo and us may still pass them all.
        if len(args) == self._n_inputs != len(self._kept):
            args = tuple(args[i] for i in self._kept)
        if self._stale or self._weight_state() != self._state:
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


# --------------------------------------------------------------------------------------------------------------------
# Attention


def replace_attention(gm: fx.GraphModule) -> int:
    """Replace eligible ``scaled_dot_product_attention`` nodes by ``ipex::attention``; return how many."""
    target = F.scaled_dot_product_attention
    nodes = [n for n in gm.graph.nodes if n.op == "call_function" and n.target is target]
    if not nodes or not _attention_available():
        return 0
    autocast = torch.is_autocast_enabled("cpu") or any(
        n.target is torch.amp.autocast_mode._enter_autocast for n in gm.graph.nodes
    )
    replaced = 0
    for node in nodes:
        arguments = _attention_arguments(node, autocast)
        if arguments is not None:
            node.target = torch.ops.ipex.attention.default
            node.args, node.kwargs = arguments
            replaced += 1
    if replaced:
        gm.recompile()
    return replaced


def _attention_available() -> bool:
    """Whether a CPU kernel provider is active; without one the op would run its reference."""
    try:
        from ipex_core._plugins import load_providers

        return any(
            status.state == "active" and status.info is not None and "attention" in status.info.ops
            for status in load_providers()
        )
    except ImportError:
        return False


def _attention_arguments(
    node: fx.Node, autocast: bool
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if given.get("dropout_p", 0.0) != 0.0 or not isinstance(given.get("is_causal", False), bool):
        return None
    values = [_example(given.get(name)) for name in ("query", "key", "value")]
    query, key, value = values
    if query is None or key is None or value is None:
        return None
    if any(
        v.dim() != 4 or v.device.type != "cpu" or v.dtype != query.dtype
        for v in (query, key, value)
    ):
        return None
    if query.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return None
    if autocast and query.dtype is torch.float32:
        return None  # autocast would lower the stock op to 16 bit
    if not _same(key.shape, value.shape) or not _same(query.shape[::3], key.shape[::3]):
        return None  # the stock op broadcasts batches and allows another head size for the values
    if not given.get("enable_gqa", False) and not _same(query.shape[1:2], key.shape[1:2]):
        return None
    mask = given.get("attn_mask")
    if mask is not None and given.get("is_causal", False):
        return None  # an error of the stock op
    if mask is not None:
        example = _example(mask)
        if example is None or example.requires_grad or not 2 <= example.dim() <= 4:
            return None
        if example.dtype not in (torch.bool, query.dtype):
            return None
    scale = given.get("scale")
    if scale is not None and not isinstance(scale, float):
        return None
    if not prefer_ipex_attention(_hints(query), _hints(key), query.dtype):
        return None
    return (
        (
            given["query"],
            given["key"],
            given["value"],
            mask,
            scale or 0.0,
            given.get("is_causal", False),
        ),
        {},
    )


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    """Whether the sizes are known to be equal, without adding a guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return len(left) == len(right) and all(
        statically_known_true(a == b) for a, b in zip(left, right, strict=True)
    )


def _example(node: Any) -> Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def _hints(tensor: Tensor) -> list[int]:
    """Return the sizes as plain ints without specialising the graph on symbolic ones."""
    return [s if isinstance(s, int) else int(s.node.hint or 1) for s in tensor.shape]

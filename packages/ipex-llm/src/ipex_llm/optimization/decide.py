# SPDX-License-Identifier: Apache-2.0
"""The second step of `ipex.llm.optimize`: look at a model and decide what to do with it, without changing it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.ao.quantization import QConfigMapping

from ipex_core.errors import OpArgumentError
from ipex_core.library.spec import FLOATS, dtype_name
from ipex_core.optimization.records import Record, class_name
from ipex_llm.arch import AttentionPlan, DecoderPlan, ExpertsPlan
from ipex_llm.arch.detect import Found, layer_plans
from ipex_llm.arch.detect.encoder_decoder import is_pair
from ipex_llm.arch.encoder_decoder import PairPlan
from ipex_llm.distributed import TensorParallel, divisible, is_sharded, uncovered
from ipex_llm.distributed.cut import GRAINS
from ipex_llm.distributed.shard import head_sizes, inner_size, shard_numbers
from ipex_llm.model_runner.encoder_decoder import unsupported_pair
from ipex_llm.model_runner.forms import unsupported_reason
from ipex_llm.model_runner.woq_model import Choice, choose
from ipex_llm.optimization.proof import prove_layers, prove_pair, prove_stack
from ipex_llm.optimization.request import Request
from ipex_llm.patch import find_plan, layer_alone, row_dtype
from ipex_llm.patch.encoder_decoder import find_pair
from ipex_llm.records import record_of
from ipex_quant.kv_cache import KVCacheScales
from ipex_quant.qconfig.static import qconfig_of
from ipex_quant.qconfig.weight_only import QConfigWoq
from ipex_quant.weight_only.linear import WoqLinearModule


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedShard:
    """What this rank has of one decoder layer, or of the head.

    Attributes:
        module: Name of the layer, or of the head.
        heads: Query heads, 0 for the head.
        kv_heads: Key/value heads, 0 for the head.
        features: Inner features of the mlp, or logits of the head.
        of: How many heads, key/value heads and features (or logits) the whole layer has; None if it is not known.
    """

    module: str
    heads: int
    kv_heads: int
    features: int
    of: tuple[int, int, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizePlan:
    """What `ipex.llm.optimize` does with a model: the answer of `ipex.llm.plan`; ``str()`` gives a table.

    It names modules and holds no tensors, so it can be kept, compared and saved.

    Attributes:
        model: Class of the model.
        device: ``"cpu"`` or ``"xpu"``.
        dtype: dtype that parameters are cast to, or None.
        depth: What becomes one call: 3 the decoder stack, 2 some of the decoder layers, 1 neither.
        reason: Why it is less than 3, or None.
        layers: One `Record` per decoder layer: whether a program runs it, and why not. Empty if none is looked for.
        linears: One `Record` per linear layer where weights are quantized: its scheme, or why it stays.
        experts: One `Record` per mixture of experts.
        kv_cache: dtype and scales of cached keys and values.
        ranks: Ranks that divide the model, 1 for a whole one.
        rank: The own one.
        shards: What this rank has, layer by layer, where the model is divided.
        rest: Classes of the modules that ``ipex.optimize`` sees, since no program runs them, and their number.
        bytes_before: Bytes of all parameters and buffers.
        bytes_after: About how many they will be, without what keeps exact originals of cast parameters (see
            `ipex.explain`); None if it is not known.
        notes: Further remarks.
    """

    model: str
    device: str
    dtype: str | None
    depth: int
    reason: str | None
    layers: tuple[Record, ...] = ()
    linears: tuple[Record, ...] = ()
    experts: tuple[Record, ...] = ()
    kv_cache: str = "dtype of the model"
    ranks: int = 1
    rank: int = 0
    shards: tuple[PlannedShard, ...] = ()
    rest: tuple[tuple[str, int], ...] = ()
    bytes_before: int = 0
    bytes_after: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """One line about the whole model, as `ipex.explain` has it."""
        if self.depth == 3:
            cache = "" if self.kv_cache == "dtype of the model" else f"; cache in {self.kv_cache}"
            return f"the whole decoder stack runs as one program per step{cache}"
        done = sum(layer.done for layer in self.layers)
        if done:
            count = len(self.layers)
            return f"{done} of {count} decoder layers run as one program each: {self.reason}"
        return f"layer by layer: {self.reason}"

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, ready for JSON."""
        return _plain(dataclasses.asdict(self)) | {"summary": self.summary}  # type: ignore[no-any-return]

    def __str__(self) -> str:
        cast = "unchanged" if self.dtype is None else self.dtype
        after = "" if self.bytes_after is None else f", about {_size(self.bytes_after)} after"
        rows = [
            (f"{self.model} on {self.device}", self.summary.partition("; cache in ")[0]),
            ("dtype", cast),
            ("weights", f"{_size(self.bytes_before)} before{after}"),
            *_grouped("linear", self.linears),
            *_grouped("experts", self.experts),
            *_grouped("layer", self.layers if self.depth < 3 else ()),
        ]
        if self.depth == 3:
            rows.append(("cache", self.kv_cache))
        if self.ranks > 1:
            rows.append(("ranks", f"this is rank {self.rank} of {self.ranks}"))
            rows += [(shard.module, _shard(shard)) for shard in self.shards]
        rest = ", ".join(f"{count} {kind}" for kind, count in self.rest)
        rows.append(("ipex.optimize", f"gets {rest}" if rest else "gets nothing"))
        rows += [("note", note) for note in self.notes]
        first, *others = rows
        width = max(len(name) for name, _ in others)
        return "\n".join([": ".join(first), *(f"  {n.ljust(width)}  {text}" for n, text in others)])


def _plain(value: Any) -> Any:
    """Return a value with lists instead of tuples, as JSON gives it back."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (tuple, list)) else value


def _grouped(title: str, records: Sequence[Record]) -> list[tuple[str, str]]:
    """Return a line for each thing that is said of modules, with how many these are and the first of them."""
    groups: dict[tuple[bool, str], list[str]] = {}
    for record in records:
        groups.setdefault((record.done, record.text), []).append(record.module or "(model)")
    lines = []
    for (_, text), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append((title, f"{names[0]}{more}: {text}"))
    return lines


def _shard(shard: PlannedShard) -> str:
    own = (shard.heads, shard.kv_heads, shard.features)
    whole = shard.of or ("?", "?", "?")
    if not shard.heads:
        return f"{own[2]} of {whole[2]} logits"
    names = ("heads", "key/value heads", "features")
    return ", ".join(f"{a} of {b} {n}" for a, b, n in zip(own, whole, names, strict=True))


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20)):
        if count >= 1 << power:
            return f"{count / (1 << power):.2f} {unit}"
    return f"{count / 1024:.1f} KiB"


# -- Deciding ---------------------------------------------------------------------------------------------------------


#: Returns how the weight of a linear layer will be quantized, None for floats.
Form = Callable[[nn.Module], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done: the plan that is shown, and the modules of the model that it is about.

    Attributes:
        plan: What is told.
        request: What was asked for.
        whole: Structure of the model that is to be divided, None if it is not.
        stack: Structure of the decoder, None if it does not run as one program.
        layers: The decoder layers, if the stack does not.
        choice: The weights that are to be quantized, or None.
        kv_scales: Scales of the cache of the stack, or None.
        grains: Inner features of the mlp that stay together where the model is divided.
        pair: Structure of the decoder of an encoder-decoder, None if it does not run as one program.
    """

    plan: OptimizePlan
    request: Request
    whole: DecoderPlan | None
    stack: DecoderPlan | None
    layers: tuple[Found, ...]
    choice: Choice | None
    kv_scales: KVCacheScales | None
    grains: tuple[int, ...]
    pair: PairPlan | None = None


def decide(model: nn.Module, request: Request, form: Form | None = None) -> Decision:
    """Return what is to be done with a model.

    Args:
        model: The model, whole or as the ranks of a group have divided it. It is run on a few tokens.
        request: What was asked for.
        form: Returns how the weight of a linear layer will be quantized, None for floats. Without it this follows from
            the configuration and from what is quantized already.

    Raises:
        ValueError: The model cannot be divided among so many ranks, or a configuration does not fit it.
    """
    sharded, config = is_sharded(model), request.weight_config
    grains = grains_of(config)
    parallel = None if request.checkpoint is not None else request.parallel
    found: DecoderPlan | None = None
    reason: str | None = request.shallow or None
    if parallel is not None:
        found = divisible(model, parallel, grains)
    elif request.static:
        reason = reason or "the model is static INT8"
    elif not reason:
        pair = is_pair(model)
        if pair and request.device.type == "cpu":
            return _pair(model, request, form, grains)
        if pair:
            reason = "on xpu, encoder-decoders have no program"
        else:
            found, reason = find_plan(model)
        if found is not None and request.device.type != "cpu":
            reason = _reason_on_device(found)
    divided = sharded or (parallel is not None and parallel.ranks > 1)
    whole = found if parallel is not None else None
    dtype = request.dtype or _first_dtype(model)
    stack = None if reason else found
    if stack is not None:
        stack, reason = prove_stack(model, stack, dtype, limited=not divided)
    choice = None
    if config is not None:
        with uncovered(model):
            choice = choose(model, stack, config)
    form = form or _form(choice)
    scales = None
    if stack is not None:
        scales = _fitting(stack, request)
        reason = unsupported_reason(stack, _cast(row_dtype(stack, form), request), form)
        stack = stack if reason is None else None
    layers: list[Found] = []
    if stack is None and request.depth > 1 and not divided and request.device.type == "cpu":
        layers = _layers(model, request, dtype, form)
    plan = _described(model, request, stack, reason, layers, choice, scales, whole, grains)
    return Decision(plan, request, whole, stack, tuple(layers), choice, scales, grains)


def _reason_on_device(plan: DecoderPlan) -> str | None:
    """Return why a plan has no programs on a device, None if it has some."""
    known = (
        (any(a.shared for a in plan.attentions), "attention with one row for all heads has"),
        (plan.pictures, "layers that read pictures have"),
        (plan.parallel, "a divided model has"),
    )
    return next((f"on xpu, {what} no program" for found, what in known if found), None)


def _pair(
    model: nn.Module, request: Request, form: Form | None, grains: tuple[int, ...]
) -> Decision:
    """Return what is to be done with an encoder-decoder."""
    pair, reason = find_pair(model)
    if pair is not None:
        pair, reason = prove_pair(model, pair, request.dtype or _first_dtype(model))
    choice = None
    if request.weight_config is not None:
        choice = choose(model, None, request.weight_config)
    if pair is not None:
        reason = unsupported_pair(pair, form or _form(choice))
        pair = pair if reason is None else None
    plan = _described(model, request, pair, reason, [], choice, None, None, grains)
    return Decision(plan, request, None, None, (), choice, None, grains, pair)


def refused(decision: Decision, model: nn.Module, reason: str) -> Decision:
    """Return a decision without the program of the whole stack, which could not be packed."""
    request = decision.request
    layers: list[Found] = []
    if not is_sharded(model) and request.depth > 1:
        layers = _layers(model, request, request.dtype or _first_dtype(model), _form(None))
    plan = dataclasses.replace(
        decision.plan, depth=_depth(None, layers), reason=reason, layers=_records(None, layers, {})
    )
    return dataclasses.replace(decision, plan=plan, stack=None, layers=tuple(layers), pair=None)


def grains_of(config: Any) -> tuple[int, ...]:
    """Return how many features of an mlp should stay together: whole groups, so that their scales are the same."""
    if config is None:
        return GRAINS
    from ipex_quant.weight_only.convert import woq_qconfigs

    qconfigs = woq_qconfigs("optimize", config, "quantization_config")
    group = math.lcm(*(max(one.group_size, 1) for one in qconfigs))
    return GRAINS if group <= 1 else (math.lcm(GRAINS[0], group), group, *GRAINS)


def _first_dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _cast(dtype: torch.dtype, request: Request) -> torch.dtype:
    """Return the dtype that `ipex_core.optimize` makes of one."""
    reduced = request.dtype in (torch.bfloat16, torch.float16) and dtype in FLOATS
    return request.dtype if reduced and request.dtype is not None else dtype


def _form(choice: Choice | None) -> Form:
    """Return what gives the form of the weight of a linear layer, or of stacked experts, as it will be."""
    qconfigs: dict[int, QConfigWoq] = {}
    if choice is not None:
        qconfigs = {id(layer.module): layer.qconfig for layer in choice.linears}
        qconfigs |= {id(mixture.module): qconfig for _, mixture, qconfig in choice.stacked}

    def form(module: nn.Module) -> object:
        if isinstance(module, WoqLinearModule):
            return (*module.modes, module.group_size, module.dtype)
        own = qconfigs.get(id(module))
        if own is None:
            return None
        modes = own.lowp_mode.name.lower(), own.act_quant_mode.name.lower()
        return (*modes, own.group_size, own.weight_dtype)

    return form


def _fitting(plan: DecoderPlan, request: Request) -> KVCacheScales | None:
    """Return the scales if the plan has as many layers; if not, raise if they were given, or return None."""
    scales = request.kv_scales
    if request.kv is not None and any(a.windows for a in plan.attentions):
        what = "None for a model that caches rows of windows of tokens"
        raise OpArgumentError(f"optimize: kv_cache_dtype must be {what}, got {request.kv}")
    if scales is None:
        return None
    reason = None
    if any(a.latent is not None or a.shared is not None for a in plan.attentions):
        reason = "be None for a model that caches latents"
    elif plan.has_states:
        reason = "be None for a model with layers that keep a state"
    elif len(scales.keys) != len(plan.layers):
        reason = f"have scales of {len(plan.layers)} layers"
    if reason is not None and request.kv_scales_given:
        raise OpArgumentError(f"optimize: kv_cache_scales must {reason}, got {len(scales.keys)}")
    return scales if reason is None else None


def _layers(model: nn.Module, request: Request, dtype: torch.dtype, form: Form) -> list[Found]:
    """Return the decoder layers; those that no program can run have the reason in the place of their plan."""
    layers = layer_plans(model)
    if request.static:
        layers = [layer.without(_static(layer, request)) for layer in layers]
    plans = [(i, layer.plan) for i, layer in enumerate(layers) if layer.plan is not None]
    unproven = prove_layers(model, plans, dtype)
    layers = [layer.without(unproven.get(index)) for index, layer in enumerate(layers)]
    rows = _cast(_first_dtype(model), request)
    return [
        layer
        if layer.plan is None
        else layer.without(unsupported_reason(layer_alone(layer), rows, form))
        for layer in layers
    ]


def _static(layer: Found, request: Request) -> str | None:
    """Return a reason if activations and weights of a linear layer in a decoder layer become INT8."""
    config = request.quantization_config
    for name, module in layer.module.named_modules():
        if isinstance(module, nn.Linear):
            path = f"{layer.name}.{name}"
            own = qconfig_of(config, path, module) if isinstance(config, QConfigMapping) else config
            if own is not None:
                return "its linear layers become static INT8"
    return None


def without_layers(decision: Decision, problems: Mapping[str, str]) -> Decision:
    """Return a decision in which layers, by name, have a reason instead of a program."""
    layers = tuple(layer.without(problems.get(layer.name)) for layer in decision.layers)
    plan = decision.plan
    plan = dataclasses.replace(plan, depth=_depth(None, layers), layers=_records(None, layers, {}))
    return dataclasses.replace(decision, plan=plan, layers=layers)


# ------------------------------------------------------------------------------------------------------------- the plan


_NO_KV = "kv_cache_dtype has no effect: the cache of an encoder-decoder has the dtype of the model"


def _depth(stack: DecoderPlan | PairPlan | None, layers: Sequence[Found]) -> int:
    return 3 if stack is not None else 2 if any(layer.plan is not None for layer in layers) else 1


def _described(
    model: nn.Module,
    request: Request,
    stack: DecoderPlan | PairPlan | None,
    reason: str | None,
    layers: Sequence[Found],
    choice: Choice | None,
    scales: KVCacheScales | None,
    whole: DecoderPlan | None,
    grains: Sequence[int],
) -> OptimizePlan:
    names = {id(module): name for name, module in model.named_modules()}
    parallel = request.parallel or record_of(model).parallel
    pair = isinstance(stack, PairPlan)
    shards: tuple[PlannedShard, ...] = ()
    if parallel is not None and parallel.ranks > 1:
        found = whole or (None if isinstance(stack, PairPlan) else stack)
        shards = tuple(_shards(found, not is_sharded(model), parallel, grains, names))
    before, after = _bytes(model, request, choice)
    calibrating = request.static and request.summary is None
    leaves_rest = calibrating or request.device.type == "xpu"
    return OptimizePlan(
        model=class_name(model),
        device=request.device.type,
        dtype=None if request.dtype in (None, torch.float32) else dtype_name(request.dtype),
        depth=_depth(stack, layers),
        reason=reason,
        layers=_records(stack, layers, names),
        linears=tuple(_linears(model, request, choice)),
        experts=tuple(_experts(stack, layers, choice, names)),
        kv_cache=_cache_text(None if pair else request.kv, scales),
        ranks=1 if parallel is None else parallel.ranks,
        rank=0 if parallel is None else parallel.rank,
        shards=shards,
        rest=() if leaves_rest else _rest(model, stack, layers),
        bytes_before=before,
        bytes_after=None if shards else after,
        notes=(_NO_KV,) if pair and request.kv is not None else (),
    )


def _records(
    stack: DecoderPlan | PairPlan | None, layers: Sequence[Found], names: dict[int, str]
) -> tuple[Record, ...]:
    op = "ipex::program_run"
    if stack is not None:
        said = "a part of the program of the stack"
        modules = [layer.module for layer in stack.layers]
        return tuple(
            Record(names.get(id(m), ""), class_name(m), "layer", True, said, op) for m in modules
        )
    said = "the whole layer runs as one program"
    return tuple(
        Record(layer.name, class_name(layer.module), "layer", True, said, op)
        if layer.plan is not None
        else Record(layer.name, class_name(layer.module), "layer", False, layer.reason)
        for layer in layers
    )


def _linears(model: nn.Module, request: Request, choice: Choice | None) -> Iterator[Record]:
    """Yield what becomes of each linear layer, where some are or become quantized."""
    modules = dict(model.named_modules(remove_duplicate=False))
    said: dict[str, tuple[bool, str]] = {}
    for name, module in modules.items():
        if isinstance(module, WoqLinearModule) and request.checkpoint is None:
            said[name] = True, f"quantized already: {module.dtype.name.lower()}"
    if choice is not None:
        said |= {name: (False, reason) for name, reason in choice.skipped.items()}
        for layer in choice.linears:
            said |= dict.fromkeys(layer.names, (True, _scheme(layer.qconfig)))
    elif request.checkpoint is not None:
        said |= _from_checkpoint(model, modules, *request.checkpoint)
    elif request.static:
        config = request.quantization_config
        for name, module in modules.items():
            if isinstance(module, nn.Linear):
                mapped = isinstance(config, QConfigMapping)
                own = qconfig_of(config, name, module) if mapped else config
                done = request.summary is not None and own is not None
                text = "static INT8 of activations and weights"
                if not done:
                    text = "to be calibrated" if own else "the configuration has nothing for it"
                said[name] = done, text
    for name, module in modules.items():
        if name in said:
            yield Record(name, class_name(module), "linear", *said[name])


def _from_checkpoint(
    model: nn.Module, modules: dict[str, nn.Module], tensors: Any, scheme: Any
) -> dict[str, tuple[bool, str]]:
    from ipex_quant.formats.schemes import method_of
    from ipex_quant.weight_only.replace import places_of

    method = method_of("optimize", scheme)
    quantized = set(places_of(model, tensors, scheme).values())
    kinds = (nn.Linear, WoqLinearModule)
    return {
        name: (True, f"{method} weights of the checkpoint")
        if name in quantized
        else (False, "the checkpoint has floats for it")
        for name, module in modules.items()
        if name in quantized or isinstance(module, kinds)
    }


def _scheme(qconfig: QConfigWoq) -> str:
    """Return in words how a weight is quantized."""
    group = "a row" if qconfig.group_size == -1 else f"{qconfig.group_size} weights"
    zeros = qconfig.weight_qscheme.name.lower()
    lowp = qconfig.lowp_mode.name.lower()
    computed = "the dtype of the input" if lowp == "none" else lowp
    return (
        f"{qconfig.weight_dtype.name.lower()} {zeros}, a scale for {group}, computed in {computed}"
    )


def _experts(
    stack: DecoderPlan | PairPlan | None,
    layers: Sequence[Found],
    choice: Choice | None,
    names: dict[int, str],
) -> Iterator[Record]:
    """Yield what becomes of each mixture of experts."""
    op = "ipex::fused_experts"
    told = set()
    for name, module, problem in [] if choice is None else choice.notes:
        told.add(id(module))
        said = "quantized" if problem is None else f"experts are not quantized: {problem}"
        kernel = op if problem is None else ""
        yield Record(name, class_name(module), "experts", problem is None, said, kernel)
    plans: Sequence[Any] = [layer.plan for layer in layers]
    for plan in plans if stack is None else stack.layers:
        mlp = None if plan is None else plan.mlp
        if isinstance(mlp, ExpertsPlan) and id(mlp.module) not in told:
            said = f"{mlp.experts} experts, {mlp.top_k} for each token, run as one op"
            name, kind = names.get(id(mlp.module), ""), class_name(mlp.module)
            yield Record(name, kind, "experts", True, said, op)


def _cache_text(kv: torch.dtype | None, scales: KVCacheScales | None) -> str:
    """Return what is said about a cache."""
    if kv is None:
        return "dtype of the model"
    if scales is not None:
        return f"{kv}, a scale for keys and values of each layer"
    return f"{kv}, {'a scale for each row' if kv == torch.int8 else 'no scales'}"


def _shards(
    found: DecoderPlan | None,
    whole: bool,
    parallel: TensorParallel,
    grains: Sequence[int],
    names: dict[int, str],
) -> Iterator[PlannedShard]:
    """Yield what this rank has of each layer and of the head."""
    for layer in () if found is None else found.layers:
        a, size = layer.attention, inner_size(layer)
        assert isinstance(a, AttentionPlan)  # others are not divided
        name = names.get(id(layer.module), "")
        if whole:
            numbers = shard_numbers(layer, parallel, grains)
            yield PlannedShard(name, *numbers, (a.heads, a.kv_heads, size))
        else:
            yield PlannedShard(name, a.heads, a.kv_heads, size)
    if found is None or found.head is None:
        return
    name = names.get(id(found.head.modules[0]), "")
    if whole:
        sizes = head_sizes(found.head, parallel)
        yield PlannedShard(name, 0, 0, sizes[parallel.rank], (0, 0, sum(sizes)))
    elif found.parallel is not None and found.parallel.head is not None:
        sizes = list(found.parallel.head.sizes)
        yield PlannedShard(name, 0, 0, sizes[parallel.rank], (0, 0, sum(sizes)))


def _rest(
    model: nn.Module, stack: DecoderPlan | PairPlan | None, layers: Sequence[Found]
) -> tuple[tuple[str, int], ...]:
    """Return classes and numbers of the modules with parameters that no program runs."""
    programs: list[nn.Module] = [layer.module for layer in layers if layer.plan is not None]
    if stack is not None:
        programs = [stack.decoder, *(() if stack.head is None else stack.head.modules)]
    inside = {id(module) for program in programs for module in program.modules()}
    kinds = Counter(
        class_name(module)
        for module in model.modules()
        if id(module) not in inside and (module._parameters or isinstance(module, WoqLinearModule))
    )
    return tuple(sorted(kinds.items()))


def _bytes(model: nn.Module, request: Request, choice: Choice | None) -> tuple[int, int | None]:
    """Return bytes of parameters and buffers as they are, and about as they will be."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    before = sum(t.numel() * t.itemsize for t in tensors.values())
    if request.checkpoint is not None or request.static:
        return before, None
    after = before
    weights: dict[int, tuple[torch.Tensor, QConfigWoq]] = {}
    if choice is not None:
        for layer in choice.linears:
            weight: Any = layer.module._parameters["weight"]
            weights[id(weight)] = weight, layer.qconfig
        for _, mixture, qconfig in choice.stacked:
            for one in (mixture.gate_up, mixture.down):
                assert isinstance(one, torch.Tensor)
                weights[id(one)] = one, qconfig
    for one, qconfig in weights.values():
        after += _quantized_bytes(one.numel(), one.shape[-1], qconfig) - one.numel() * one.itemsize
    for tensor in model.parameters():
        if id(tensor) not in weights:
            after += tensor.numel() * (_cast(tensor.dtype, request).itemsize - tensor.itemsize)
    return before, after


def _quantized_bytes(count: int, columns: int, qconfig: QConfigWoq) -> int:
    bits = 8 if qconfig.weight_dtype.name in ("INT8", "FP8") else 4
    groups = count // columns if qconfig.group_size == -1 else -(-count // qconfig.group_size)
    scale = 1 if qconfig.weight_dtype.name == "MXFP4" else 4
    zero = int(qconfig.weight_qscheme.name == "ASYMMETRIC")
    return count * bits // 8 + groups * (scale + zero)

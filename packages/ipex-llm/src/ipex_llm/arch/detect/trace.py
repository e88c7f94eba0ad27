# SPDX-License-Identifier: Apache-2.0
"""One observed forward of a model: what each module read and gave. Also parts that others have in common."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ipex_llm.arch import NearPlan
from ipex_llm.arch.formulas import add_convolved

Plan = TypeVar("Plan")

#: Tokens of the observed forward. Seven: unlikely to be the number of heads too.
LENGTH = 7
#: The argument of a forward that gives rows of a picture to layers that read one, ``[B, S, hidden]``.
PICTURE = "cross_attention_states"


class MatchError(ValueError):
    """A structure is not understood.

    Attributes:
        module: Name of the module in the model that was given (empty: the model itself).
        reason: Why it has no plan.
    """

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"match: {module or 'model'}: {reason}")
        self.module = module
        self.reason = reason


class Config:
    """The configuration of a decoder: values by the first of several names that it has."""

    def __init__(self, config: Any) -> None:
        text = getattr(config, "get_text_config", None)
        self.raw = text() if callable(text) else config

    def get(self, *names: str, default: Any = None) -> Any:
        for name in names:
            value = (
                self.raw.get(name)
                if isinstance(self.raw, Mapping)
                else getattr(self.raw, name, None)
            )
            if value is not None:
                return value
        return default


def _first(values: Any) -> Tensor | None:
    """Return the first floating point or integer tensor among arguments or results."""
    if isinstance(values, Tensor):
        return values
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return None
    for value in values:
        if isinstance(value, Tensor):
            return value
    return None


def _read(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the first tensor argument of a module, or the one that is called `hidden_states`."""
    value = _first(args)
    if value is None:
        value = kwargs.get("hidden_states")
    return _first(kwargs) if value is None else value


class Trace:
    """Inputs and outputs (of the first call) of all modules of a model for a few tokens.

    Attributes:
        ids: The tokens, int64 ``[T]``.
        inputs: Module -> its first tensor argument.
        outputs: Module -> its first tensor result.
        counts: Module -> how many results it gave in a tuple; 0 for one that is not in a tuple.
        names: Module -> its name.
        factors: Module -> its first named argument that has one number for each token, float32 ``[T]``.
        calls: What ran of lists of modules, in order: the module, what it read and what it gave.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.inputs: dict[nn.Module, Tensor] = {}
        self.outputs: dict[nn.Module, Tensor] = {}
        self.counts: dict[nn.Module, int] = {}
        self.factors: dict[nn.Module, Tensor] = {}
        self.calls: list[tuple[nn.Module, Tensor, Tensor]] = []
        self._cache: Any = None
        config = getattr(model, "config", None)
        if model.training:
            raise MatchError("", "is in training mode; call model.eval() first")
        self._check(config)
        tensors = list(model.parameters())
        if any(t.is_meta for t in tensors):
            raise MatchError(
                "", "has weights on the meta device; its structure is found by running it"
            )
        device = tensors[0].device if tensors else torch.device("cpu")
        self.ids = _tokens(config).to(device)
        self._run()

    def _check(self, config: Any) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise MatchError("", "is an encoder and a decoder, not a decoder alone")

    def _call(self) -> Any:
        return self.model(input_ids=self.ids.unsqueeze(0), use_cache=False, **self._picture())

    def _picture(self) -> dict[str, Tensor]:
        """Return rows of a picture for a model that takes them: some of its layers do not run without."""
        if PICTURE not in inspect.signature(type(self.model).forward).parameters:
            return {}
        config = Config(getattr(self.model, "config", None))
        rows = torch.randn(
            1,
            LENGTH + 4,
            int(config.get("hidden_size")),
            generator=torch.Generator().manual_seed(0),
        )
        like = next(self.model.parameters())
        return {PICTURE: rows.to(like)}

    def _run(self) -> None:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            value = _read(args, kwargs)
            if value is not None and module not in self.inputs:
                self.inputs[module] = value.detach().clone()
            for one in kwargs.values():
                if isinstance(one, Tensor) and one.is_floating_point() and one.numel() == LENGTH:
                    self.factors.setdefault(module, one.detach().float().flatten())

        def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            value = _first(result)
            read = _read(args, kwargs)
            of_list = self.names[module].rpartition(".")[2].isdecimal()
            if of_list and read is not None and value is not None and read.ndim and value.ndim:
                read, given = (rows(one.detach().clone()) for one in (read, value))
                self.calls.append((module, read, given))
            if value is not None and module not in self.outputs:
                self.outputs[module] = value.detach().clone()
                self.counts[module] = len(result) if isinstance(result, tuple) else 0

        with contextlib.ExitStack() as hooks, torch.no_grad():
            for module in self.names:
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            try:
                self._call()
            except Exception as error:  # anything can go wrong in a model that is not a decoder
                text = str(error).strip().partition("\n")[0]
                raise MatchError(
                    "", f"fails on {LENGTH} tokens: {type(error).__name__}: {text}"
                ) from error

    def ran(self, module: nn.Module) -> bool:
        """Return whether a module took and gave a tensor."""
        return module in self.inputs and module in self.outputs

    def runs(self, modules: Iterable[nn.Module]) -> list[tuple[nn.Module, Tensor, Tensor]]:
        """Return the calls of some modules of a list, in order."""
        own = set(modules)
        return [call for call in self.calls if call[0] in own]

    def input(self, module: nn.Module) -> Tensor:
        """Return what a module read, ``[T, width]``."""
        return rows(self.inputs[module])

    def output(self, module: nn.Module) -> Tensor:
        """Return what a module gave, ``[T, width]``."""
        return rows(self.outputs[module])

    def cached(self, index: int) -> Tensor | None:
        """Return the second of what a layer caches for the tokens, ``[T, width]``; None if that is not known.

        The model is run once more for it.
        """
        if self._cache is None:
            with torch.no_grad():
                result = self.model(input_ids=self.ids.unsqueeze(0), use_cache=True)
            self._cache = getattr(result, "cache", None) or getattr(result, "past_key_values", ())
        layers = getattr(self._cache, "layers", ())
        found = getattr(layers[index], "values", None) if index < len(layers) else None
        return rows(found) if isinstance(found, Tensor) else None

    def error(self, module: nn.Module, reason: str) -> MatchError:
        """Return the error that names a module."""
        return MatchError(self.names.get(module, type(module).__name__), reason)

    @contextlib.contextmanager
    def reading(self, module: nn.Module) -> Iterator[None]:
        """Make a value of the configuration that is of the wrong kind a `MatchError`: the model may never read it."""
        try:
            yield
        except MatchError:
            raise
        except (
            *(OverflowError, TypeError, ValueError, ZeroDivisionError),
            RuntimeError,  # of values that differ among layers, asked of the whole configuration
        ) as error:
            got = f"{type(error).__name__}: {error}"
            raise self.error(module, f"has a configuration that does not fit it, {got}") from error


def special_tokens(config: Any) -> set[int]:
    """Return the tokens that a configuration gives a meaning of their own."""
    return {
        value
        for name in dir(config)
        if re.search(r"_token_(id|index)$", name)
        for value in [getattr(config, name, None)]
        if isinstance(value, int)
    }


def _tokens(config: Any) -> Tensor:
    config = Config(config)
    vocab = int(config.get("vocab_size", default=64))
    special = special_tokens(config.raw)
    ids: list[int] = []
    candidate = 5 % vocab
    while len(ids) < LENGTH:
        if candidate not in special or vocab <= len(special) + LENGTH:
            ids.append(candidate)
        candidate = (candidate + 11) % vocab
    return torch.tensor(ids)


def rows(x: Tensor) -> Tensor:
    """Return ``[T, width]`` of a tensor of one sequence."""
    return x.reshape(-1, x.shape[-1])


def learned_factors(module: nn.Module, pattern: str, width: int) -> Tensor | None:
    """Return a parameter ``[width]`` of a module times the number beside it whose name begins alike, or None."""
    own = module.named_parameters(recurse=False)
    found = [(n, p) for n, p in own if re.search(pattern, n) and list(p.shape) == [width]]
    if len(found) != 1:
        return None
    name, value = found[0]
    stem = name.split("_")[0]
    numbers = [
        v for k, v in vars(module).items() if isinstance(v, float) and k.split("_")[0] == stem
    ]
    return value.detach().float() * numbers[0] if len(numbers) == 1 else None


def same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors of one sequence have the same values, both rounded to the shorter dtype."""
    if a.is_floating_point() and b.is_floating_point() and a.itemsize != b.itemsize:
        dtype = min(a.dtype, b.dtype, key=lambda one: one.itemsize)
        a, b = a.to(dtype), b.to(dtype)
    return a.numel() == b.numel() and torch.equal(a.reshape(-1).float(), b.reshape(-1).float())


def distance(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value of `b`."""
    if a.numel() != b.numel():
        return float("inf")
    a, b = a.reshape(-1).float(), b.reshape(-1).float()
    error = (a - b).abs().max() / b.abs().max().clamp_min(1e-30)
    return float(error.nan_to_num(nan=float("inf")))


def tolerance(x: Tensor) -> float:
    """Return how far a value computed in another order may be off, by dtype."""
    return 5e-4 if x.dtype in (torch.float32, torch.float64) else 4e-2


def settle(
    candidates: Iterable[Plan], error: Callable[[Plan], float], like: Tensor, sure: int = 0
) -> tuple[Plan | None, float]:
    """Return the candidate that fits, or None, and the smallest error.

    In float32 the first that fits is taken: nothing else comes as close. With 16 bits several may be near, and the
    nearest is taken, except that the first `sure` ones are trusted when they fit.
    """
    best, nearest = None, float("inf")
    limit = tolerance(like)
    for number, candidate in enumerate(candidates):
        off = error(candidate)
        if off < nearest:
            best, nearest = candidate, off
        if off <= limit and (number < sure or like.dtype in (torch.float32, torch.float64)):
            return candidate, off
    return (best if nearest <= limit else None), nearest


def settled(
    trace: Trace,
    module: nn.Module,
    candidates: Iterable[Plan],
    error: Callable[[Plan], float],
    like: Tensor,
    sure: int = 0,
) -> Plan:
    """Return the candidate for a module that `settle` finds.

    Raises:
        MatchError: None fits.
    """
    result = settle(candidates, error, like, sure)
    found, off = result
    if found is None:
        name = type(module).__name__
        raise trace.error(module, f"{name} computes something else (off by {off:.1e})")
    return found


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is called a norm, and has no linear layers; which one is found by numbers.

    Two linear layers beside a norm may be a gate.
    """
    if "norm" not in type(module).__name__.lower():
        return False
    count = sum(map(is_linear, module.modules()))
    return count == 0 or (count == 2 and sum(map(is_norm, module.children())) == 1)


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, of whatever weight format."""
    if hasattr(module, "in_features") and hasattr(module, "out_features"):
        return True
    return hasattr(module, "nf") and getattr(module, "weight", None) is not None


def linears(module: nn.Module, trace: Trace, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and linear layers under a module that ran; not those inside another one (adapters)."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_linear(child):
            if trace.ran(child):
                yield path, child
        else:
            yield from linears(child, trace, f"{path}.")


# --- short convolutions, numbers for the last keys, experts that all tokens go to (Inkling) ---------------------------


def convolution(module: nn.Module) -> nn.Conv1d | None:
    """Return the only convolution of a module if it is depthwise."""
    found = [m for m in module.children() if isinstance(m, nn.Conv1d)]
    plain = len(found) == 1 and found[0].groups == found[0].in_channels == found[0].out_channels
    return found[0] if plain and found[0].stride == found[0].dilation == (1,) else None


def convolved(trace: Trace, owner: nn.Module, x: Tensor) -> tuple[tuple[nn.Module, ...], Tensor]:
    """Return the convolution among the parts of a module that is added to `x`, and the sum; without one, `x`.

    Raises:
        MatchError: What reads `x` gives something else.
    """
    for child in owner.children():
        conv = convolution(child)
        if conv is None or not trace.ran(child) or not same(trace.input(child), x):
            continue
        given = trace.output(child)
        if conv.bias is not None or distance(add_convolved((conv,), x), given) > tolerance(given):
            raise trace.error(child, "is a short convolution that is not understood")
        return (conv,), given
    return (), x


def match_near(trace: Trace, attention: nn.Module, rows: Tensor) -> NearPlan | None:
    """Return the numbers for the last keys of queries that a part of an attention makes of `rows`, or None."""
    for child in attention.children():
        own = [name for name, value in child.named_parameters() if value.ndim == 2]
        if len(own) == 1 and trace.ran(child) and same(trace.inputs[child], rows):
            return NearPlan(child, own[0])
    return None


def gain_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    """Return the only parameter with one number of a block or a router, a factor on all that it gives, or None."""
    own = module.named_parameters(recurse=False)
    found = [name for name, value in own if value.ndim == 1 and len(value) == 1]
    return (module, found[0]) if len(found) == 1 else None


def experts_of_all(block: nn.Module) -> tuple[nn.Module | None, int]:
    """Return the part of a block with stacked experts that all tokens go to and their number, or None and 0."""
    for name, child in block.named_children():
        parts = [child._parameters.get(f"{part}_proj") for part in ("gate", "up", "down")]
        if name.startswith("shared") and all(p is not None and p.ndim == 3 for p in parts):
            return child, len(child.get_parameter("down_proj"))
    return None, 0


def table_of(router: nn.Module, top_k: int) -> Tensor | None:
    """Return the experts of each token if a router has a table of them, ``[vocab, top_k]`` (DeepSeek V4), or None."""
    integers = (t for t in router.buffers(recurse=False) if not t.is_floating_point())
    return next((t for t in integers if t.ndim == 2 and t.shape[1] == top_k), None)


def stacked_weights(block: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Return the weights of all experts in the two parts of a block that have them (Granite MoE), or None."""
    parts = (getattr(block, name, None) for name in ("input_linear", "output_linear"))
    first, last = (getattr(part, "weight", None) for part in parts)
    return first, last


def added_by(block: nn.Module, hidden: int) -> tuple[nn.Module, str] | None:
    """Return module and name of a parameter that a block with experts adds to what they give (JetMoE), or None."""
    bias = block._parameters.get("bias")
    return (block, "bias") if bias is not None and list(bias.shape) == [hidden] else None

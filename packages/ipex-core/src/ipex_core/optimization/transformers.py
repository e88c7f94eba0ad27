# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face models, through the public attention interface of transformers.

transformers looks its attention function up by a name in the configuration of the model. A function under the name
``"ipex"`` is registered the first time a model needs it; the pass writes that name into the configuration. Nothing of
transformers is replaced, and nothing is registered before a model is optimized or a user asks for the name.

A few modelling modules (Falcon, GPT-J, SAM ...) index a dictionary such as `FALCON_ATTENTION_CLASSES` by the name of
the attention and know only the names in it: transformers accepts a registered name, and making the model fails with a
`KeyError`. Such a table gets one entry more, which makes the class of ``"sdpa"``, or else of ``"eager"``, and tells the
caller that offered it. transformers has no registry for these tables. They are found by what is in a module, not by a
list of models: in modules that are imported already at once, in others when they are imported. No entry is replaced.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.kernels.policy import find_kernels, has_kernel
from ipex_core.library.spec import FLOATS
from ipex_core.module_swap.base import call
from ipex_core.nn.functional import attention_supported
from ipex_core.optimization.passes import Context, Pass
from ipex_core.optimization.records import Log
from ipex_core.util.import_hooks import constant_when_traced, when_matching

NAME = "ipex"
#: Arguments of the interface that change what is computed and that our op does not have.
_FOREIGN = ("position_bias", "cache", "sliding_window_mask")
#: Arguments of attention classes that the stock function ``"sdpa"`` leaves out, since the mask has what they say.
_IN_THE_MASK = frozenset(
    {
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "position_ids"),
        *("sliding_window", "output_attentions", "deterministic", "cache_position", "use_cache"),
    }
)
#: Class of a configuration -> whether its models have attention of their own.
_own: dict[type, bool] = {}


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention as transformers asks for it.

    Heads that share keys are not repeated, softcaps and sinks are part of the op. To the function behind ``"sdpa"``
    goes what the op does not cover (training, dropout, other devices and element types, values of another head size
    than keys, position biases, caches of continuous batching) and shapes at which it is not faster; softcaps and sinks,
    which that function does not have, are computed step by step then.

    Args:
        module: The attention module; its ``is_causal`` counts where the argument is None.
        query: ``[B, Hq, Sq, D]``, float32, bfloat16 or float16.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, D]``.
        attention_mask: ``[B, 1 or Hq, Sq, at least Sk]``, boolean (True takes part) or additive; or None.
        dropout: Probability of dropout.
        scaling: Factor on the scores; None: ``1 / sqrt(D)``.
        is_causal: Whether a query sees only keys before it, if there is no mask.
        softcap: Scores become ``softcap * tanh(scores / softcap)``.
        s_aux: ``[Hq]``: a further score for each head, without a value.
        **kwargs: What else a model of transformers hands to its attention function. ``indices`` ``[B, Sq, k]``, the
            keys that a query sees of those in the mask, are merged into the mask.

    Returns:
        ``[B, Sq, Hq, D]``, and None for the weights.

    Raises:
        NotImplementedError: Sinks with position biases or a cache of continuous batching; an argument that changes
            what is computed in a way that is not known here.
    """
    if kwargs:
        _check_arguments(module, kwargs)
        indices = kwargs.pop("indices", None)
        if indices is not None:
            whole = is_causal if is_causal is not None else getattr(module, "is_causal", True)
            attention_mask = _merge(indices, attention_mask, query, key, bool(whole))
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    rows = query.shape[2]
    causal = bool(rows > 1 and attention_mask is None and causal)
    keys, values, mask = key, value, attention_mask
    if causal and key.shape[2] > rows:
        # A prompt in an empty cache of fixed size: what is behind it is not there yet.
        keys, values = key[:, :, :rows], value[:, :, :rows]
    if mask is not None:
        mask = mask[..., : key.shape[2]]
        if mask.dtype not in {torch.bool, torch.float32}:
            mask = mask.to(query.dtype)
    known = not any(kwargs.get(name) is not None for name in _FOREIGN)
    # The stock function has neither: the op, also where the stock one would be faster.
    special = known and (softcap is not None or s_aux is not None)
    if special:
        usable = _covered(query, keys, values, dropout)
    else:
        usable = known and attention_supported(query, keys, values, mask, dropout, causal)
    if usable:
        out = call(
            torch.ops.ipex.attention.default,
            *(query, keys, values, mask, float(scaling or 0.0), causal, None, -1, -1),
            float(softcap or 0.0),
            None if s_aux is None else s_aux.detach().to(query.dtype),
        )
        return out.transpose(1, 2).contiguous(), None
    if special:
        if causal:
            mask = torch.ones(rows, keys.shape[2], dtype=torch.bool, device=query.device).tril()
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return _step_by_step(query * scale, keys, values, mask, dropout, softcap, s_aux), None
    if s_aux is not None:
        given = ", ".join(name for name in _FOREIGN if kwargs.get(name) is not None)
        raise NotImplementedError(
            "attn_implementation='ipex': attention sinks must come without position bias and paged cache,"
            f" got {given}: use attn_implementation='eager'"
        )
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if softcap is not None:
        kwargs["softcap"] = softcap
    result: tuple[Tensor, None] = sdpa_attention_forward(
        *(module, query, key, value, attention_mask),
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )
    return result


def _check_arguments(module: nn.Module, given: dict[str, Any]) -> None:
    """Raise for an argument that an attention class passes on purpose and that is not known here."""
    for name, value in given.items():
        if value is None or value is False or name in _IN_THE_MASK or name in _FOREIGN:
            continue
        # What a user gives to the model goes through all forwards; the stock function leaves it out as well.
        if name != "indices" and _has_constant(type(module), name):
            raise NotImplementedError(
                f"attn_implementation={NAME!r}: {type(module).__name__} passes {name!r}, which it does not"
                " know: use attn_implementation='sdpa' or 'eager'"
            )


def _merge(
    indices: Tensor, mask: Tensor | None, query: Tensor, key: Tensor, causal: bool
) -> Tensor:
    """Return the mask of the keys that are selected and visible; negative indices select nothing."""
    rows, length = query.shape[2], key.shape[2]
    places = indices.long()
    # One column more, for what selects nothing.
    seen = torch.zeros(*places.shape[:-1], length + 1, dtype=torch.bool, device=query.device)
    seen = seen.scatter(-1, places.masked_fill(places < 0, length), True)[..., :length]
    if seen.dim() == 3:
        seen = seen.unsqueeze(1)
    if mask is None and causal and rows > 1:
        mask = torch.ones(rows, length, dtype=torch.bool, device=query.device).tril(length - rows)
    if mask is None:
        return seen
    mask = mask[..., :length]
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, torch.finfo(mask.dtype).min)


def _codes(kind: type) -> Iterator[types.CodeType]:
    """Yield the code of the methods of a class, without what ``nn.Module`` and transformers have for all."""
    for owner in kind.__mro__:
        if owner is nn.Module or owner is object or owner.__name__ == "PreTrainedModel":
            continue
        for value in vars(owner).values():
            if inspect.isfunction(value):
                code = getattr(inspect.unwrap(value), "__code__", None)
                if code is not None:
                    yield code


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (tuple, frozenset)):
        for part in value:
            yield from _strings(part)


@functools.cache
def _constants(kind: type) -> frozenset[str]:
    """Return the strings in the methods of a class, names of keyword arguments among them."""
    return frozenset(text for code in _codes(kind) for text in _strings(code.co_consts))


# Dynamo warns of a call to a cached function, also where its result is a constant: hence a function around it.
@constant_when_traced
def _has_constant(kind: type, text: str) -> bool:
    return text in _constants(kind)


@functools.cache
def _asks_for_sdpa(kind: type) -> bool:
    """Return whether a method of a class compares the name of the attention with ``"sdpa"``.

    Under another name such a class computes something else: DeepSeek-V3.2 leaves its selection of keys out of the mask.
    """
    return any(
        "_attn_implementation" in code.co_names and "sdpa" in set(_strings(code.co_consts))
        for code in _codes(kind)
    )


def _step_by_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention with stock ops, for gradients and dropout; the query is scaled already."""
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None and mask.dtype == torch.bool:
        # Not infinite: rows without any key are padding, and have to stay finite.
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], -1)
    wide = torch.promote_types(query.dtype, torch.float32)
    shares = torch.softmax(scores, -1, dtype=wide)[..., : key.shape[2]].to(query.dtype)
    shares = nn.functional.dropout(shares, dropout)
    return (shares @ value.repeat_interleave(groups, 1)).transpose(1, 2).contiguous()


def _covered(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Return whether the op can compute this at all."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value)):
        return False
    return (
        dropout == 0.0
        and query.device.type == "cpu"
        and query.dtype in FLOATS
        and query.dtype == key.dtype == value.dtype
        and key.shape[-1] == value.shape[-1]
    )


@constant_when_traced
def _own_attention(config: type) -> bool:
    """Return whether the models of a configuration do not look their attention function up; warn once if so."""
    if config not in _own:
        from transformers import MODEL_MAPPING

        model = MODEL_MAPPING.get(config, None)
        check = getattr(model, "_can_set_attn_implementation", None)
        _own[config] = False
        if check is not None and not check():
            _has_own(config, getattr(model, "__name__", str(model)))
    return _own[config]


@constant_when_traced
def _needs_masks(config: type) -> bool:
    return _masks_by_name(config)


@functools.cache
def _masks_by_name(config: type) -> bool:
    """Return whether models of a configuration keep their mask only where the attention is ``"sdpa"`` by name."""
    from transformers import MODEL_MAPPING

    model = MODEL_MAPPING.get(config, None)
    module = sys.modules.get(getattr(model, "__module__", ""), None)
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind)] if module else []
    return any(issubclass(kind, nn.Module) and _asks_for_sdpa(kind) for kind in kinds)  # type: ignore[arg-type]


def _has_own(config: type, name: str) -> None:
    """Remember that models of a configuration have attention of their own, and warn once."""
    if not _own.get(config):
        _own[config] = True
        text = f"attn_implementation={NAME!r}: {name} has attention of its own, which runs"
        warnings.warn(text, stacklevel=3)


def register_interface() -> None:
    """Register the function and its mask under the name ``"ipex"`` with transformers.

    Models that choose their attention from a table of classes can be made under the name, too; they keep their own.
    """
    from transformers import AttentionInterface

    find_kernels()  # which Dynamo cannot follow: the first call may be one that is compiled
    AttentionInterface.register(NAME, attention_forward)
    _watch(NAME, _has_own)
    try:
        from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask
    except ImportError:  # before 4.53 models make their masks themselves
        return

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Models with attention of their own can be made under the name, too, and add the mask to their scores.
        config = kwargs.get("config")
        own = config is not None and _own_attention(type(config))
        if config is not None and _needs_masks(type(config)):
            kwargs["allow_is_causal_skip"] = False
        made: Tensor | None = (eager_mask if own else sdpa_mask)(*args, **kwargs)
        return made

    AttentionMaskInterface.register(NAME, mask)


def _configs(model: nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        config = module.__dict__.get("config")
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


class HuggingFaceAttention(Pass):
    """Run the attention of Hugging Face models in our op."""

    name = "attention"

    def applies(self, context: Context) -> bool:
        """Return whether the model comes from transformers and the level asks for kernels."""
        return context.options.level == "O1" and "transformers" in sys.modules

    def apply(self, context: Context) -> None:
        """Set the attention implementation in the configuration."""
        configs = [c for c in _configs(context.model) if c._attn_implementation_internal != NAME]
        if not configs:
            return
        reason = self._reason(context.model, configs)
        if reason is not None:
            context.log.add("", context.model, self.name, False, reason)
            return
        register_interface()
        for config in configs:
            config._attn_implementation_internal = NAME
        text = "attention interface 'ipex', which was 'sdpa'"
        context.log.undo[self.name] = "sdpa"
        context.log.add("", context.model, self.name, True, text, "ipex::attention")

    def _reason(self, model: nn.Module, configs: list[Any]) -> str | None:
        if not has_kernel("attention"):
            return "no kernel package implements attention"
        import transformers

        if not hasattr(transformers, "AttentionMaskInterface"):
            return "transformers before 4.53 makes masks only for attention that it knows"
        names = sorted({str(c._attn_implementation_internal) for c in configs})
        if names != ["sdpa"]:
            return f"the attention implementation is {', '.join(names)}, not sdpa"
        for module in model.modules():
            check = getattr(type(module), "_can_set_attn_implementation", None)
            if check is not None and not check():
                return f"{type(module).__name__} does not use the attention interface"
            if _asks_for_sdpa(type(module)):  # type: ignore[arg-type]
                return f"{type(module).__name__} asks for the attention 'sdpa' by name"
        return None

    def undo(self, model: nn.Module, log: Log) -> None:
        """Write the former name back."""
        former = log.undo.get(self.name)
        if former is not None:
            for config in _configs(model):
                if config._attn_implementation_internal == NAME:
                    config._attn_implementation_internal = former


# --- tables of classes in modules -----------------------------------------------------------------------------------

_PACKAGE = "transformers.models."

_Made = Callable[[type, str], None]


def _offer(module: types.ModuleType, name: str, made: _Made) -> None:
    """Add an entry to the tables of attention classes in a module.

    Args:
        module: A modelling module.
        name: The new key.
        made: Called with the class of the configuration and the name of the stock class when a model is made so.
    """
    for key, table in list(vars(module).items()):
        if not key.endswith("ATTENTION_CLASSES") or not isinstance(table, dict):
            continue
        stock = table.get("sdpa", table.get("eager"))
        if isinstance(stock, type):
            table.setdefault(name, _entry(stock, made))


def _entry(stock: type, made: _Made) -> Callable[..., Any]:
    def make(config: Any, *args: Any, **kwargs: Any) -> Any:
        made(type(config), stock.__name__)
        return stock(config, *args, **kwargs)

    return make


@functools.cache
def _watch(name: str, made: _Made) -> None:
    """Call `_offer` for the modelling modules that are imported, and for each one that will be; once for a name."""
    when_matching(_is_modeling, lambda module: _offer(module, name, made))


def _is_modeling(name: str) -> bool:
    return name.startswith(_PACKAGE) and name.rpartition(".")[2].startswith("modeling_")

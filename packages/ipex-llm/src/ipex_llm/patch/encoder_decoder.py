# SPDX-License-Identifier: Apache-2.0
"""The forward of an encoder-decoder whose decoder runs as programs.

The class of the model is exchanged for a subclass. A call with ``encoder_outputs``, as ``generate`` makes for each
step, is one program from the embedding to the logits; what a program cannot do goes to the forward of the original
class, and is told once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.module_swap.base import as_original, original_class, swap
from ipex_core.module_swap.state_dict import update as update_core
from ipex_llm.arch.detect import MatchError, check_hooks, parameter_names
from ipex_llm.arch.encoder_decoder import PairPlan
from ipex_llm.kv_cache.encoder_decoder import adopt, give_back, state_of
from ipex_llm.model_runner.dense import UnsupportedPlan
from ipex_llm.model_runner.encoder_decoder import PairRunner
from ipex_llm.patch.decoder import Patch, Reason, given_cache, patch_of, tell, usable_runner
from ipex_llm.records import record_of, update, without

#: Arguments that say nothing about what is computed here, or are looked at.
_KNOWN = frozenset(
    {
        *("decoder_input_ids", "encoder_outputs", "attention_mask", "decoder_attention_mask"),
        *("decoder_position_ids", "past_key_values", "cache", "use_cache", "return_dict"),
        *("cache_position", "input_ids", "input_features"),
    }
)
_FLAGS = ("output_attentions", "output_hidden_states")


def find_pair(model: nn.Module) -> tuple[PairPlan | None, str | None]:
    """Return the plan of an encoder-decoder, or the reason why there is no plan."""
    from ipex_llm.arch.detect.encoder_decoder import match_pair

    try:
        plan = match_pair(model)
        check_hooks(plan.decoder)
        return plan, None
    except MatchError as error:
        return None, str(error)


class PairMixin(nn.Module):
    """Forward through programs; put in front of a model's class by `swap`."""

    def __getstate__(self) -> dict[str, Any]:
        return without(self.__dict__, "runner")  # a copy is run by its own forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        patch = patch_of(self)
        assert patch is not None
        kwargs.update(zip(patch.names, args, strict=False))
        try:
            given = kwargs.get("encoder_outputs")
            rows = None if given is None else given[0]
            return _run(self, usable_runner(self, rows), kwargs)
        except Reason as reason:
            tell(f"{type(self).__name__}: runs its own forward: {reason}")
        give_back(given_cache(kwargs))
        return super().forward(**kwargs)


def _run(model: Any, runner: PairRunner, kwargs: dict[str, Any]) -> Any:
    from transformers.modeling_outputs import Seq2SeqLMOutput

    tokens, rows, mask = _checked(model, runner, kwargs)
    cache = given_cache(kwargs)
    use = kwargs.get("use_cache")
    use = getattr(model.config, "use_cache", True) if use is None else use
    kept, problem = adopt(cache if use else None, runner, rows, mask)
    if problem is not None:
        raise Reason(problem)
    state = state_of(kept)
    assert state is not None
    batch, count = tokens.shape
    if batch != state.sequences:
        raise ValueError(
            f"{type(model).__name__}: decoder_input_ids must have {state.sequences} rows, the number of sequences in"
            f" the cache, got {batch}"
        )
    if mask is not None and state.given is not None and not torch.equal(mask, state.given):
        raise Reason("the attention mask of the encoder's rows has changed")
    if (mask is None) != (state.given is None):
        raise Reason("the attention mask of the encoder's rows is missing, or new")
    places = kwargs.get("decoder_position_ids")
    past = state.length
    if places is not None and not bool((places == torch.arange(past, past + count)).all()):
        raise Reason("decoder_position_ids that do not follow those in the cache")
    most = runner.plan.max_positions
    if most is not None and past + count > most:
        raise Reason(f"there are more than {most} tokens")
    state.make_room(count)
    logits = runner.run(tokens, past, state.cache, state.cross, state.mask)
    state.length += count
    given = kwargs["encoder_outputs"]
    result = Seq2SeqLMOutput(
        logits=logits,
        encoder_last_hidden_state=rows,
        encoder_hidden_states=getattr(given, "hidden_states", None),
        encoder_attentions=getattr(given, "attentions", None),
    )
    if use:
        names = {field.name for field in dataclasses.fields(Seq2SeqLMOutput)}
        result["cache" if "cache" in names else "past_key_values"] = kept
    return result


def _checked(
    model: Any, runner: PairRunner, kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return tokens, rows of the encoder and their mask; raise `Reason` for what programs do not do."""
    given, tokens = kwargs.get("encoder_outputs"), kwargs.get("decoder_input_ids")
    if given is None or tokens is None:
        raise Reason("there are no encoder_outputs or decoder_input_ids")
    for name, value in kwargs.items():
        if name not in _KNOWN and value is not None and value is not False:
            raise Reason(f"argument {name}")
    for name in _FLAGS:
        if kwargs.get(name) is None and getattr(model.config, name, False):
            raise Reason(f"config.{name}")
    if kwargs.get("return_dict") is False or getattr(model.config, "return_dict", True) is False:
        raise Reason("return_dict is False")
    rows = given[0]
    if tokens.dim() != 2 or tokens.numel() == 0 or tokens.dtype != torch.int64:
        raise Reason("decoder_input_ids are empty or of another shape or dtype")
    if rows.dim() != 3 or rows.shape[0] != tokens.shape[0] or rows.shape[1] == 0:
        raise Reason(f"encoder_outputs have rows of shape {list(rows.shape)}")
    if tokens.device.type != "cpu" or rows.device.type != "cpu":
        raise Reason(f"the input is on {tokens.device} and {rows.device}")
    seen = kwargs.get("decoder_attention_mask")
    if seen is not None and not (seen.dim() == 2 and bool(seen.all())):
        raise Reason("decoder_attention_mask hides tokens, or is not 2-D")
    mask = kwargs.get("attention_mask") if runner.plan.masked else None
    if mask is not None:
        if list(mask.shape) != list(rows.shape[:2]):
            raise Reason(f"the attention mask has shape {list(mask.shape)}")
        if not bool(mask.bool().any(1).all()):
            raise Reason("the attention mask hides all rows of a sequence")
        if "padding" in runner.plan.stock_calls and not bool(mask.all()):
            raise Reason("not proven: padding")
    return tokens, rows, mask


# -- Attaching --------------------------------------------------------------------------------------------------------


def _runner(model: nn.Module, plan: PairPlan) -> PairRunner:
    from ipex_llm.patch import _shared

    weight = plan.layers[0].attention.output.modules[0]._parameters.get("weight")
    if weight is None or not weight.is_floating_point():
        weight = plan.embedding._parameters["weight"]
        assert weight is not None
    return PairRunner(plan, weight.dtype, _shared(model))


def attach_pair(model: nn.Module, plan: PairPlan) -> str | None:
    """Make an encoder-decoder run the plan of its decoder; return why it cannot."""
    from ipex_llm.patch import _undo

    try:
        runner = _runner(model, plan)
    except UnsupportedPlan as reason:
        return str(reason)
    names = parameter_names(original_class(model))
    patch = Patch(model, attach_pair_runner, stock_calls=plan.stock_calls, names=names)
    update_core(model, undo=_undo)
    update(model, runner=runner, patch=patch)
    swap(model, PairMixin)
    return None


def attach_pair_runner(model: nn.Module) -> PairRunner | None:
    """Pack a decoder again whose parameters have changed, or a copy; return None if that is not possible."""
    patch = patch_of(model)
    if patch is None:
        return None
    former = record_of(model).runner
    update(model, runner=None)
    if isinstance(former, PairRunner):
        former.store.undo()
    with as_original(model):
        plan, _ = find_pair(model)
        if plan is None:
            return None
        try:
            runner = _runner(model, dataclasses.replace(plan, stock_calls=patch.stock_calls))
        except UnsupportedPlan:
            return None
    update(model, runner=runner)
    return runner

# SPDX-License-Identifier: Apache-2.0
"""`optimize` and `restore`: the passes in their order, and the way back."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from ipex_core.amp import warn_if_emulated
from ipex_core.errors import IpexError, OpArgumentError
from ipex_core.jit._traced import ATTRIBUTE as TRACED
from ipex_core.jit._traced import TracedForward
from ipex_core.library.spec import FLOATS, dtype_name
from ipex_core.module_swap.state_dict import detach, record_of, update
from ipex_core.optimization.passes import Context, Pass, run_on
from ipex_core.optimization.passes.cast import Buffers, Cast
from ipex_core.optimization.passes.fuse import ConvBatchNorm, Fuse, LinearBatchNorm
from ipex_core.optimization.passes.prepack import (
    ChannelsLast,
    Prepack,
    auto_channels_last,
    disable_auto_channels_last,
    enable_auto_channels_last,
)
from ipex_core.optimization.passes.swap import (
    Dropout,
    Encoder,
    GraphMode,
    Kernels,
    Realize,
    Recurrent,
)
from ipex_core.optimization.records import (
    Log,
    Options,
    log_of,
    name_saved_dtype,
    undo_saved_dtype,
)
from ipex_core.optimization.transformers import HuggingFaceAttention
from ipex_core.packing import onednn

__all__ = [
    "ModeError",
    "ModelTypeError",
    "disable_auto_channels_last",
    "enable_auto_channels_last",
    "optimize",
    "restore",
]

_M = TypeVar("_M", bound=nn.Module)

LEVELS = ("O0", "O1")

#: The pipeline, in the order in which the passes run; each is explained in its file.
PASSES: tuple[Pass, ...] = (
    ConvBatchNorm(),
    LinearBatchNorm(),
    Dropout(),
    Recurrent(),
    Cast(),
    ChannelsLast(),
    Prepack(),
    Kernels(),
    Encoder(),
    Realize(),
    Fuse(),
    HuggingFaceAttention(),
    Buffers(),
    GraphMode(),
)


class ModeError(IpexError, AssertionError, ValueError):
    """A model in training mode was given without an optimizer, or one in inference mode with an optimizer."""


class ModelTypeError(IpexError, TypeError, AttributeError):
    """What was given is not a module."""


def optimize(
    model: Any,
    dtype: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    level: str = "O1",
    inplace: bool = False,
    conv_bn_folding: bool | None = None,
    linear_bn_folding: bool | None = None,
    weights_prepack: bool | None = None,
    replace_dropout_with_identity: bool | None = None,
    optimize_lstm: bool | None = None,
    split_master_weight_for_bf16: bool | None = None,
    fuse_update_step: bool | None = None,
    auto_kernel_selection: bool | None = None,
    sample_input: Any = None,
    graph_mode: bool | None = None,
    concat_linear: bool | None = None,
) -> Any:
    """Make a model faster on this CPU.

    The result is a model of the same class with the same modules under the same names; its ``state_dict`` has the
    original names, shapes, dtypes and values. `ipex.explain` tells what was done and `ipex.restore` undoes it.

    Args:
        model: Module in inference mode (``model.eval()``). With ``optimizer``, module in training mode. A
            ``torch.jit.ScriptModule`` is returned untouched.
        dtype: ``torch.bfloat16`` or ``torch.float16`` to cast the parameters, ``torch.float32`` or None to leave them.
            In training only linear layers, convolutions and embeddings are cast. A layer whose weight a module around
            it holds as a parameter of its own stays float32.
        optimizer: Optimizer of a model in training mode. States and state dicts stay float32.
        level: ``"O1"`` turns on what is marked below, ``"O0"`` nothing. Knobs that are not None win over the level.
        inplace: Change ``model`` itself. Otherwise a deep copy is changed and ``model`` stays as it is.
        conv_bn_folding: Fold batch norms into convolutions. (O1)
        linear_bn_folding: Fold batch norms into linear layers. (O1)
        weights_prepack: Store weights in the layout of the kernel. (O1)
        replace_dropout_with_identity: Make dropout free in inference: a `torch.nn.Identity`, and still a dropout. (O1)
        optimize_lstm: Prepare LSTM layers. (O1)
        split_master_weight_for_bf16: Training in bfloat16 with SGD, Adagrad, Adam, AdamW, Lamb or Lars: the weights of
            the model are the upper halves of float32 numbers, the optimizer has the lower ones. Otherwise the
            optimizer has whole float32 weights. (O1)
        fuse_update_step: Training: update a parameter by one op. (O1)
        auto_kernel_selection: Choose kernels by timing them on this machine instead of by a table.
        sample_input: Tensor or tuple of tensors. The model is run on it once to learn the shapes that kernels are
            chosen for. With a reduced ``dtype``, a model that has float32 buffers beside cast parameters is run on it
            again; if it raises, these buffers are cast, too. Models of transformers with ``input_ids`` need no sample.
        graph_mode: Capture the model as a graph at its first call: by `torch.compile`, else by `torch.jit.trace`,
            else run it eagerly; `ipex.explain` tells which and why. Calls with gradients run eagerly.
        concat_linear: Merge linear layers that are fed by the same input, such as query, key and value.

    Returns:
        The model, or ``(model, optimizer)`` if an optimizer was given.

    Raises:
        TypeError: An argument has the wrong type (for the model it is an AttributeError too).
        ValueError: An unknown ``level`` or ``dtype`` (also a RuntimeError); a model in training mode without optimizer
            or in inference mode with one (also an AssertionError).
        NotImplementedError: Casting a part that is a ScriptModule.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).eval()
        >>> fast = optimize(model, dtype=torch.bfloat16)
        >>> type(fast) is type(model), fast.state_dict()["0.weight"].dtype
        (True, torch.float32)
    """
    if isinstance(model, torch.jit.ScriptModule):
        return model if optimizer is None else (model, optimizer)
    check_model(model, optimizer)
    if not isinstance(inplace, bool):
        raise TypeError(f"optimize: inplace must be True or False, got {inplace!r}")
    options = parse(level, dtype, locals(), auto_channels_last())
    if optimizer is not None:
        return _training(model, optimizer, options, inplace)
    if not inplace:
        model = copy_model(model)
    return _inference(model, options, sample_input)


def restore(model: _M) -> _M:
    """Undo `ipex.optimize`, in place.

    An optimizer for further training has to be made afterwards: packed parameters are other objects than the restored.

    Args:
        model: A model that `optimize` returned.

    Returns:
        The same object with its original classes, configuration and bit-equal parameters.

    Raises:
        ValueError: The model was never optimized.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(256, 256)).eval()
        >>> back = restore(optimize(model, dtype=torch.bfloat16))
        >>> torch.equal(back[0].weight, model[0].weight)
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"restore: model must be a torch.nn.Module, got {type(model).__name__}")
    log = log_of(model)
    if log is None:
        raise OpArgumentError(
            f"restore: model must be a result of ipex.optimize, got a {type(model).__name__} that is not optimized"
        )
    for module in list(model.modules()):
        undo = record_of(module).undo
        if undo is not None:
            undo(module)
    for step in reversed(PASSES):
        step.undo(model, log)
    for module in model.modules():
        inner = log_of(module)
        if inner is not None:  # a part that was optimized on its own before
            for step in reversed(PASSES):
                step.undo(module, inner)
            update(module, log=None)
    for module in model.modules():
        detach(module)
        module.__dict__.pop(TRACED, None)
    undo_saved_dtype(model)
    return model


def parse(level: Any, dtype: Any, given: Mapping[str, Any], channels_last: bool) -> Options:
    """Check the arguments and fill in the defaults of the level; ``given`` has the knobs, and maybe more."""
    if level not in LEVELS:
        raise OpArgumentError(
            f"optimize: level must be one of {', '.join(map(repr, LEVELS))}, got {level!r}"
        )
    if dtype is not None:
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"optimize: dtype must be a torch.dtype or None, got {dtype!r}")
        if dtype not in FLOATS:
            names = ", ".join(map(str, FLOATS))
            raise OpArgumentError(f"optimize: dtype must be one of {names} or None, got {dtype}")
    values = {}
    for knob in dataclasses.fields(Options)[3:]:
        name, value = knob.name, given.get(knob.name)
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"optimize: {name} must be True, False or None, got {value!r}")
        values[name] = (knob.default and level == "O1") if value is None else value
    return Options(dtype=dtype, level=level, channels_last=channels_last, **values)


def check_model(model: Any, optimizer: Any) -> None:
    """Check the model, the optimizer and whether their modes fit together."""
    if not isinstance(model, nn.Module):
        raise ModelTypeError(
            f"optimize: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimize: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if model.training and optimizer is None:
        raise ModeError(
            "optimize: model must be in inference mode if there is no optimizer, got training mode:"
            " call model.eval() first, or pass optimizer="
        )
    if not model.training and optimizer is not None:
        raise ModeError(
            "optimize: model must be in training mode if there is an optimizer, got inference mode:"
            " call model.train() first, or leave optimizer out"
        )


def copy_model(what: Any) -> Any:
    # Weights that a hook computes (weight_norm) are not leaves of autograd, which torch refuses to copy.
    model = what[0] if isinstance(what, tuple) else what
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    for tensor in (*model.parameters(), *model.buffers()):
        mode = getattr(tensor, "fake_mode", None)
        if (
            mode is not None
        ):  # torch would copy the mode, too, and fails with the storage of buffers
            memo[id(mode)] = mode
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            memo[id(tensor)].__dict__.update(tensor.__dict__)
    try:
        copied = copy.deepcopy(what, memo)
    except Exception as error:
        raise TypeError(
            f"optimize: model must support copy.deepcopy, got {type(error).__name__}: {error}."
            " Pass inplace=True to change the model itself."
        ) from error
    if isinstance(what, tuple) and what[1] is not None:
        # torch copies states and groups only. A step that a scheduler has wrapped belongs to the original.
        for name in what[1].__dict__.keys() - copied[1].__dict__.keys() - {"step"}:
            value = what[1].__dict__[name]
            with contextlib.suppress(Exception):  # a process group: shared
                value = copy.deepcopy(value, memo)
            copied[1].__dict__[name] = value
        for name, hooks in what[1].__dict__.items():
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                copied[1].__dict__[name] = hooks.copy()
    return copied


def _training(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: Options, inplace: bool
) -> tuple[nn.Module, torch.optim.Optimizer]:
    if not inplace:
        # Together, so that the copied optimizer holds the copied parameters.
        model, optimizer = copy_model((model, optimizer))
    from ipex_core.optimization.training import train

    if log_of(model) is not None:
        restore(model)
    train(model, optimizer, options)
    return model, optimizer


def _inference(model: nn.Module, options: Options, sample_input: Any) -> nn.Module:
    former = log_of(model)
    if former is not None:
        if former.options == options:
            return model
        restore(model)
    context = Context(model, options, Log(options))
    if isinstance(sample_input, torch.Tensor):
        sample_input = (sample_input,)
    context.sample = sample_input
    context.shapes = _shapes(model, sample_input)
    _notes(context)
    for path, module in model.named_modules():
        if id(module) in context.old:
            context.log.add(path, module, "optimize", False, "already optimized by an earlier call")
    update(model, log=context.log)
    try:
        for step in PASSES:
            if step.applies(context):
                step.apply(context)
    except BaseException:
        restore(model)
        raise
    if options.reduced is not None:
        name_saved_dtype(model)
    model.__dict__[TRACED] = TracedForward(model)
    return model


def _notes(context: Context) -> None:
    dtype = context.options.reduced
    if dtype is None:
        return
    name = dtype_name(dtype)
    reason = warn_if_emulated(dtype, f"optimize(dtype=torch.{name})")
    if reason is None and not onednn.supports(dtype):
        reason = f"this CPU has no {name} support in oneDNN: {name} may be slower than float32"
    if reason is not None:
        context.log.notes.append(reason)


def _shapes(model: nn.Module, sample_input: Any) -> dict[nn.Module, torch.Size]:
    """Run the model once and return the shape of the largest input of each linear layer and convolution."""
    if sample_input is None:
        return {}
    if not isinstance(sample_input, (tuple, list, dict)):
        raise TypeError(
            "optimize: sample_input must be a tensor, a tuple or list of arguments or a dict of keyword"
            f" arguments, got {type(sample_input).__name__}"
        )
    shapes: dict[nn.Module, torch.Size] = {}

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], torch.Tensor) and not args[0].is_nested:
            shape = args[0].shape
            if module not in shapes or shape.numel() > shapes[module].numel():
                shapes[module] = shape

    with contextlib.ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
                hooks.enter_context(module.register_forward_pre_hook(note))
        run_on(model, sample_input)
    return shapes

# SPDX-License-Identifier: Apache-2.0
"""Modules of a model: putting one in the place of another, dtypes of outputs, and modules that are saved as a whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

#: What makes the encoder layers of torch read the weights of their parts instead of calling the parts.
_SHORT_CUTS: tuple[tuple[type[nn.Module], str, Any], ...] = (
    (nn.TransformerEncoderLayer, "activation_relu_or_gelu", 0),
    (nn.TransformerEncoder, "use_nested_tensor", False),
)


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place that has this name."""
    *above, last = name.split(".")
    parents = [model.get_submodule(".".join(above[:i])) for i in range(len(above) + 1)]
    for parent in parents:
        _call_parts(parent)
    setattr(parents[-1], last, module)


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtype of the modules that have a property for it, which reads their first floating parameter."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(type(module), "dtype", None), property):
            for parameter in module.parameters():
                if parameter.is_floating_point():
                    found[name] = parameter.dtype
                    break
    return found


def keep_dtypes(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Give modules that have no floating parameter any more one without elements, for their dtype and device."""
    for name, dtype in sorted(dtypes.items(), key=lambda it: -it[0].count(".")):
        module = model.get_submodule(name)
        if not any(parameter.is_floating_point() for parameter in module.parameters()):
            empty = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
            module.register_parameter("float_dtype", empty)


def call_encoder_layers(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Let torch's encoder layers call their parts in inference too; return module, attribute and value before."""
    return [change for module in model.modules() for change in _call_parts(module)]


def _call_parts(module: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    found = [(name, value) for kind, name, value in _SHORT_CUTS if isinstance(module, kind)]
    before = [(module, name, getattr(module, name, value)) for name, value in found]
    for name, value in found:
        setattr(module, name, value)
    return before


def patterns_of(op: str, modules: Iterable[str], name: str = "modules_to_skip") -> tuple[str, ...]:
    """Return names and patterns of layers to skip as a tuple.

    Raises:
        TypeError: A single text: its letters would be the patterns.
    """
    if isinstance(modules, str):
        raise TypeError(f"{op}: {name} must be a list of texts, got {modules!r}")
    return tuple(modules)


# --- modules that are saved as a whole --------------------------------------------------------------------------------

#: Classes of ``torch.ao.nn.quantized.dynamic``.
RECURRENT = ("GRU", "GRUCell", "LSTM", "LSTMCell", "RNNCell")
_LAYER = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout")
_CELL = ("input_size", "hidden_size", "bias")


class WholeModule:
    """Base class of modules that are saved as a whole, in a form that is made for them."""

    def saved(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the numbers and the tensors that a copy of the module can be made of."""
        raise NotImplementedError


def is_whole(module: nn.Module) -> bool:
    """Return whether `saved_parts` is the form in which a module is saved; `convert` makes such modules for INT8."""
    return isinstance(module, WholeModule) or _is_recurrent(module)


def saved_parts(module: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors of a module that is saved as a whole."""
    if _is_recurrent(module):
        return _recurrent_parts(module)
    assert isinstance(module, WholeModule)
    about, tensors = module.saved()
    return {"kind": type(module).__name__, **about}, tensors


def _is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer of torch with int8 weights."""
    kind = type(module)
    # Importing the classes to compare with costs much more than a name.
    return kind.__name__ in RECURRENT and any(
        it.__module__.startswith("torch.ao.nn.quantized.dynamic") for it in kind.__mro__
    )


def recurrent_options(module: Any) -> dict[str, Any]:
    """Return the arguments of the constructor of a recurrent layer or cell."""
    names = _CELL if type(module).__name__.endswith("Cell") else (*_LAYER, "bidirectional")
    options = {name: getattr(module, name) for name in names}
    if hasattr(module, "nonlinearity"):
        options["nonlinearity"] = module.nonlinearity
    return options


def _recurrent_parts(module: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the numbers and the tensors of a layer; a weight is its codes and, as ``_q``, scale and zero point."""
    about = {"kind": type(module).__name__, **recurrent_options(module)}
    tensors: dict[str, Tensor] = {}
    for name, weight in module.get_weight().items():
        tensors[name] = weight.int_repr()
        step = (weight.q_scale(), weight.q_zero_point())
        tensors[f"{name}_q"] = torch.tensor(step, dtype=torch.float64)
    for name, bias in module.get_bias().items():
        if bias is not None:
            tensors[name] = bias.detach()
    return about, tensors

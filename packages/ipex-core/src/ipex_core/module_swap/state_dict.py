# SPDX-License-Identifier: Apache-2.0
"""What was done to one module, and how to do and undo it.

All that ipex-core and ipex-quant keep on a module of the user is one attribute, which holds a `ModuleRecord`. In it is
the `ModuleState` of a changed module. Its plan says which transformations lie between the
original tensors and the ones in use: fold, cast, memory format, packing, in this order. `realize` carries the plan
out, `revert` gives the originals back; saving, loading and restoring are built from these two. Parameters keep their
identity: only ``.data`` is exchanged, so tied parameters stay tied and an optimizer's references stay valid.

`SavedTensor` is what is remembered of a changed tensor, so that its exact original can be given back.
float32 -> bfloat16 keeps, next to the 16-bit value, the 16-bit difference of the bit patterns: together they are as
large as the original and rebuild it bit by bit. The difference of two neighboring patterns fits 16 bits except at
rounding ties and NaNs, which are listed. Other changes (float16, folding) keep the original itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ipex_core.module_swap.script import FORGOTTEN
from ipex_core.packing.parameter import PackedWeight, in_layout, pack

#: Position of the low half in a 32-bit number.
_LOW = 0 if sys.byteorder == "little" else 1


class SavedTensor:
    """The original of one tensor, in terms of the value that replaced it.

    Attributes:
        dtype: dtype of the original.
        stride: Strides of the original.
        form: ``"same"`` (no values changed), ``"split"`` (16-bit difference) or ``"copy"`` (the original is kept).
    """

    __slots__ = (
        "cast_dtype",
        "dtype",
        "folded",
        "form",
        "index",
        "live",
        "patterns",
        "rest",
        "stride",
    )

    def __init__(self) -> None:
        self.dtype = self.cast_dtype = torch.float32
        self.stride: tuple[int, ...] = ()
        self.form = "same"
        self.rest: Tensor | None = None  # low halves, or the original
        self.index: Tensor | None = None  # flat positions of the exceptions
        self.patterns: Tensor | None = None  # their bit patterns
        self.folded = False  # the replacement is not a mere conversion of the original
        self.live = False  # the replacement is in place now

    @torch.no_grad()
    def capture(self, original: Tensor, replacement: Tensor, folded: bool = False) -> None:
        """Remember ``original``, which ``replacement`` takes the place of."""
        self.dtype, self.cast_dtype = original.dtype, replacement.dtype
        self.stride = tuple(original.stride())
        self.form, self.rest, self.index, self.patterns = "same", None, None, None
        self.folded = folded
        if folded:
            self.form, self.rest = "copy", original
        elif original.dtype == replacement.dtype or isinstance(replacement, FakeTensor):
            return  # without numbers there is no difference to keep
        elif original.dtype == torch.float32 and replacement.dtype == torch.bfloat16:
            self._split(original, replacement)
        elif not _same_bits(replacement.to(original.dtype), original):
            self.form, self.rest = "copy", original

    def _split(self, original: Tensor, replacement: Tensor) -> None:
        halves = original.contiguous().view(-1).view(torch.int16)
        low, high = halves[_LOW::2].contiguous(), halves[1 - _LOW :: 2]
        if not bool(low.any()):
            return
        # As a signed number the low half is the distance to the neighbor that rounding to nearest picks: a negative
        # one means that the high half was rounded up.
        wrong = (high + (low < 0)) != replacement.contiguous().view(-1).view(torch.int16)
        self.form, self.rest = "split", low
        if bool(wrong.any()):
            self.index = wrong.nonzero().flatten()
            self.patterns = original.contiguous().view(-1).view(torch.int32)[self.index]

    @torch.no_grad()
    def original(self, current: Tensor) -> Tensor:
        """Return the original, given the present value; a value changed since then is converted instead."""
        if current.dtype != self.cast_dtype or current.device.type == "meta":
            value = current.to(self.dtype)
        elif self.form == "copy" and self.rest is not None:
            kept = self.rest.to(current.device)
            unchanged = self.folded or _same_bits(kept.to(current.dtype), current)
            value = kept if unchanged else current.to(self.dtype)
        elif self.form == "split" and self.rest is not None:
            bits = current.contiguous().view(-1).view(torch.int16).to(torch.int32) << 16
            bits += self.rest.to(current.device)
            if self.index is not None and self.patterns is not None:
                bits[self.index.to(current.device)] = self.patterns.to(current.device)
            value = _written(bits.view(torch.float32).view(current.shape), current)
        else:
            value = current.to(self.dtype)
        if tuple(value.stride()) != self.stride and len(self.stride) == value.dim():
            plain = torch.empty_strided(
                value.shape, self.stride, dtype=value.dtype, device=value.device
            )
            value = plain.copy_(value)
        # Never an alias: what is handed out may be written to.
        return value.clone() if value is self.rest or value is current else value

    @property
    def nbytes(self) -> int:
        """Memory kept beside the replacement, in bytes."""
        kept = (self.rest, self.index, self.patterns)
        return sum(t.numel() * t.element_size() for t in kept if t is not None)


def _written(value: Tensor, current: Tensor) -> Tensor:
    """Return ``value``, but what is there now where that is not its rounding, which somebody has written then."""
    now = current.contiguous()
    same = value.to(now.dtype).view(torch.int16) == now.view(torch.int16)
    if bool(same.all()):
        return value
    # A written zero or infinity may be the rounding of what it makes with a low half, too.
    return torch.where(same & (now != 0) & now.isfinite(), value, now.float())


def _same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))


#: Name of the attribute that holds a `ModuleRecord`.
KEY = "_ipex_core"


@dataclasses.dataclass(eq=False)
class ModuleRecord:
    """What is known of one module; None: nothing.

    Attributes:
        state: Of a module with changed tensors or another class: its `ModuleState`.
        log: Of a model: the `Log` of `ipex.optimize`.
        quantization: Of a model: its `Quantization`.
        undo: Called with the module by `ipex.restore`, before the passes are undone.
        packed_later: Whether a package on top of this one packs the weight, once `optimize` has returned.
        fused: Of a result of `ipex_core.jit.fuse`: what it rewrote.
    """

    state: Any = None
    log: Any = None
    quantization: Any = None
    undo: Any = None
    packed_later: Any = None
    fused: Any = None


_EMPTY = ModuleRecord()
#: Prefix of attributes in pickles of 0.1, which are fields of records or have another name now. Goes in 0.3.
FORMER = "_ipex_"
_FORMER = {f"{FORMER}{field}": field for field in vars(_EMPTY)}


def record_of(module: nn.Module) -> ModuleRecord:
    """Return the record of a module, an empty one if it has none. It must not be changed: see `update`."""
    record: ModuleRecord | None = module.__dict__.get(KEY)
    return _former_record(module) if record is None else record


def _former_record(module: nn.Module) -> ModuleRecord:
    """Return the record of a module without one: what a pickle of 0.1 has instead."""
    content = module.__dict__
    names = [name for name in _FORMER if name in content]
    if not names:
        return _EMPTY
    record = content[KEY] = ModuleRecord(**{_FORMER[name]: content.pop(name) for name in names})
    return record


def update(module: nn.Module, **fields: Any) -> None:
    """Change the record of a module. Shallow copies of the module keep theirs. An empty record is removed."""
    keep(module, KEY, dataclasses.replace(record_of(module), **fields))


def keep(value: Any, key: str, record: Any) -> None:
    """Put a record, a dataclass whose fields are None for nothing, on an object; take an empty one away."""
    if all(getattr(record, field.name) is None for field in dataclasses.fields(record)):
        value.__dict__.pop(key, None)
    else:
        value.__dict__[key] = record


class ModuleState:
    """Plan and memory of one changed module.

    Attributes:
        original_class: Class to go back to, or None if the class was not exchanged.
        dtype: Target of the cast, or None.
        buffers: Names of buffers that are cast to a dtype of their own, with the dtype.
        fold: Per-channel ``(scale, shift)`` of a folded batch norm, float32, or None.
        memory_format: Name of the memory format of ``weight`` (the object cannot be pickled everywhere), or None.
        packing: ``"mkldnn"`` or ``"ipex"``, or None for a plain weight.
        conv: Arguments that packing a convolution weight needs.
        input_size: Size of the input a packed convolution weight is laid out for, or None.
        saved: Originals by the names of parameters and buffers.
        added: Names of parameters that the original module does not have.
        plain: The plain parameter whose place a packed one has taken.
        kernel_op: The ``torch.ops.ipex`` op the module calls, or None.
        former: The parameters before a state dict is loaded, while it is loaded.
    """

    def __init__(self) -> None:
        self.original_class: type[nn.Module] | None = None
        self.dtype: torch.dtype | None = None
        self.buffers: dict[str, torch.dtype] = {}
        self.fold: tuple[torch.Tensor, torch.Tensor] | None = None
        self.memory_format: str | None = None
        self.packing: str | None = None
        self.conv: tuple[Any, ...] | None = None
        self.input_size: list[int] | None = None
        self.saved: dict[str, SavedTensor] = {}
        self.added: set[str] = set()
        self.plain: nn.Parameter | None = None
        self.kernel_op: str | None = None
        self.former: dict[str, nn.Parameter | None] = {}


def state_of(module: nn.Module) -> ModuleState | None:
    """Return the state of a changed module, or None."""
    state: ModuleState | None = record_of(module).state
    return state


def class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was optimized."""
    state = state_of(module)
    return (state.original_class if state is not None else None) or type(module)


def attach(module: nn.Module) -> ModuleState:
    """Give a module a state and the hooks that keep its state dict original."""
    state = state_of(module)
    if state is None:
        state = ModuleState()
        update(module, state=state)
        module.register_state_dict_post_hook(_on_save)
        module.register_load_state_dict_pre_hook(_before_load)
        module.register_load_state_dict_post_hook(_after_load)
    return state


def swap_class(module: nn.Module, new: type[nn.Module]) -> None:
    """Exchange the class of a module for a subclass of it, once."""
    state = attach(module)
    if state.original_class is None:
        state.original_class = type(module)
        module.__class__ = new


def detach(module: nn.Module) -> None:
    """Undo everything: originals, class, hooks."""
    state = state_of(module)
    if state is None:
        return
    revert(module)
    hook_tables: tuple[Any, ...] = (
        module._state_dict_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    )
    for table in hook_tables:
        for key, hook in list(table.items()):
            if getattr(hook, "hook", hook) in _HOOKS:
                del table[key]
    if state.original_class is not None:
        module.__class__ = state.original_class
    update(module, state=None)
    for key in _RUNTIME_KEYS:
        module.__dict__.pop(key, None)


#: Attributes of an optimized module that are not part of the original.
_RUNTIME_KEYS = (
    *("_packed", "_dtype", "_lowered", "_kernel", "_folded_into", "_merged"),
    *FORGOTTEN,
)


# --------------------------------------------------------------------------------------------------------------------
# Doing and undoing


@torch.no_grad()
def realize(module: nn.Module, registry: dict[int, SavedTensor] | None = None) -> None:
    """Carry out the plan of a module whose tensors are the originals.

    Args:
        module: Module with a state.
        registry: Parameter id -> original, so that owners of a shared parameter share its memory of the original.
    """
    state = state_of(module)
    if state is None:
        return
    if state.fold is not None and module._parameters.get("bias") is None:
        scale = state.fold[0]
        weight = module._parameters["weight"]
        assert weight is not None
        module._parameters["bias"] = nn.Parameter(
            torch.zeros(scale.numel(), dtype=weight.dtype, device=weight.device),
            requires_grad=weight.requires_grad,
        )
        state.added.add("bias")
    set_runtime(module, state)
    for name, parameter in module._parameters.items():
        if parameter is None or not parameter.is_floating_point():
            continue
        saved = state.saved.get(name)
        if saved is None and registry is not None:
            saved = registry.setdefault(id(parameter), SavedTensor())
        if saved is None:
            saved = SavedTensor()
        state.saved[name] = saved
        if not saved.live:
            _replace(state, name, parameter, saved)
    for name, dtype in state.buffers.items():
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.is_floating_point():
            saved = state.saved.setdefault(name, SavedTensor())
            if not saved.live:
                value = buffer.to(dtype)
                saved.capture(buffer, value)
                module._buffers[name] = value
                saved.live = True
    if state.packing is not None:
        pack_weight(module, state)


def _replace(state: ModuleState, name: str, parameter: torch.Tensor, saved: SavedTensor) -> None:
    original = value = parameter.detach()
    folded = state.fold is not None and name in ("weight", "bias")
    if folded:
        assert state.fold is not None
        scale, shift = state.fold
        wide = value.to(torch.float32)
        if name == "weight":
            wide = wide * scale.view(-1, *[1] * (value.dim() - 1))
        else:
            wide = wide * scale + shift
        value = wide.to(value.dtype)
    if state.dtype is not None:
        value = value.to(state.dtype)
    if name == "weight" and state.memory_format is not None:
        value = in_layout(value, state.memory_format)
    saved.capture(original, value, folded)
    parameter.data = value
    saved.live = True


@torch.no_grad()
def revert(module: nn.Module) -> None:
    """Put the originals of a module back in place; the plan is kept."""
    state = state_of(module)
    if state is None:
        return
    unpack_weight(module, state)
    for name in state.added:
        module._parameters[name] = None
        state.saved.pop(name, None)
    state.added.clear()
    for name, saved in state.saved.items():
        parameter = module._parameters.get(name)
        if parameter is not None and saved.live:
            parameter.data = saved.original(parameter.detach())
            saved.live = False
        buffer = module._buffers.get(name)
        if buffer is not None and saved.live:
            module._buffers[name] = saved.original(buffer)
            saved.live = False


def set_runtime(module: nn.Module, state: ModuleState) -> None:
    """Set the attributes that the forward of an optimized layer reads, for the machine at hand."""
    from ipex_core.kernels.policy import has_kernel

    if state.kernel_op is not None:
        module.__dict__["_kernel"] = has_kernel(state.kernel_op)
        if state.packing == "ipex" and not module.__dict__["_kernel"]:
            state.packing = "mkldnn"
    if state.dtype is not None and state.original_class is not None:
        module.__dict__["_dtype"] = state.dtype


def pack_weight(module: nn.Module, state: ModuleState) -> None:
    """Replace the plain weight by a packed one, if this machine has the kernels."""
    from ipex_core.packing import onednn
    from ipex_core.packing.dense import FORMATS

    weight = module._parameters.get("weight")
    form = state.packing
    if weight is None or form is None or isinstance(weight, PackedWeight):
        return
    if weight.device.type != "cpu" or weight.numel() == 0:
        return
    # oneDNN's ops know no tensors without values.
    if form == "mkldnn" and (isinstance(weight, FakeTensor) or not onednn.supports(weight.dtype)):
        return
    if form == "ipex" and weight.dtype not in FORMATS:
        return
    assert isinstance(weight, nn.Parameter)
    packed = pack(weight.detach(), form, state.conv, state.input_size)
    module.__dict__["_packed"] = packed
    module.__dict__["_dtype"] = weight.dtype
    wrapper: Any = PackedWeight(packed, form, weight.shape, weight.dtype, weight.requires_grad)
    module._parameters["weight"] = wrapper
    state.plain = weight
    weight.data = torch.empty(0, dtype=weight.dtype)


def unpack_weight(module: nn.Module, state: ModuleState) -> None:
    """Replace packed weights by the plain parameters they were made from."""
    for name, parameter in list(module._parameters.items()):
        if isinstance(parameter, PackedWeight) and parameter.former is not None:
            put_back(module, name, parameter)
    weight = module._parameters.get("weight")
    if isinstance(weight, PackedWeight):
        plain = weight.plain()
        if state.memory_format is not None:
            plain = in_layout(plain, state.memory_format)
        if state.plain is None:
            state.plain = nn.Parameter(torch.empty(0, dtype=plain.dtype), weight.requires_grad)
        state.plain.data = plain
        state.plain.requires_grad_(weight.requires_grad)
        module._parameters["weight"] = state.plain
        state.plain = None
    module.__dict__["_packed"] = None
    module.__dict__.pop("_lowered", None)


def put_back(module: nn.Module, name: str, packed: PackedWeight) -> None:
    """Replace a packed weight by the parameter whose place it has taken."""
    former = packed.former
    assert former is not None
    # Otherwise another owner of a tied weight has it already, perhaps with new values.
    if former.numel() != packed.numel():
        former.data = packed.plain()
    module._parameters[name] = former


# --------------------------------------------------------------------------------------------------------------------
# Hooks: module-level functions, so that modules that carry them can be pickled


def _on_save(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Mapping[str, Any]
) -> None:
    state = state_of(module)
    if state is None:
        return
    for name in state.added:
        state_dict.pop(prefix + name, None)
    for name, saved in state.saved.items():
        value, parameter = state_dict.get(prefix + name), module._parameters.get(name)
        if value is None:
            continue
        if parameter is None:
            if saved.live:  # a buffer
                state_dict[prefix + name] = saved.original(value.detach())
            continue
        if isinstance(value, PackedWeight) and value.former is not None:
            state_dict[prefix + name] = _tied_original(state_dict, value, saved)
            continue
        if isinstance(value, PackedWeight):  # never shared
            state_dict[prefix + name] = _original(value, value.plain(), saved)
            continue
        current = value.detach()
        unchanged = saved.form == "same" and saved.dtype == current.dtype
        if not saved.live or (unchanged and tuple(current.stride()) == saved.stride):
            continue
        make = functools.partial(_original, value, current, saved)
        state_dict[prefix + name] = one_entry(state_dict, parameter, make)


def _original(value: Tensor, current: Tensor, saved: SavedTensor) -> Tensor:
    """Return what a state dict shows for an entry ``value`` whose numbers are ``current``."""
    original = saved.original(current)
    keeps = isinstance(value, nn.Parameter) and not isinstance(value, PackedWeight)  # keep_vars
    return nn.Parameter(original, value.requires_grad) if value.requires_grad or keeps else original


#: By parameters: the last state dict that one is in, its values there, and its version then.
_entries = WeakTensorKeyDictionary()


def one_entry(state_dict: Any, parameter: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """Return what stands for a parameter in a state dict: one tensor for all its owners."""
    known: Tensor | None
    # Tensors of inference mode count no versions.
    now = -1 if parameter.is_inference() else parameter._version
    last, where, version = _entries.get(parameter, (None, None, 0))
    if where is not None and last() is state_dict and version == now:
        known = where()
        if known is not None:
            return known
    made = make()
    with contextlib.suppress(TypeError):  # a plain dict given by the caller
        _entries[parameter] = weakref.ref(state_dict), weakref.ref(made), now
    return made


def _tied_original(state_dict: dict[str, Any], value: PackedWeight, saved: SavedTensor) -> Tensor:
    def make() -> Tensor:
        original = saved.original(value.plain())
        return nn.Parameter(original) if value.requires_grad else original  # keep_vars

    assert value.former is not None
    return one_entry(state_dict, value.former, make)


def _before_load(module: nn.Module, *_: Any) -> None:
    revert(module)
    state = state_of(module)
    if state is not None:
        state.former = dict(module._parameters)


def _after_load(module: nn.Module, _: Any) -> None:
    state = state_of(module)
    if state is not None:
        for name, parameter in state.former.items():
            # With assign=True there is a new parameter. It is no longer tied to those that shared the old one.
            if module._parameters.get(name) is not parameter:
                state.saved.pop(name, None)
        state.former = {}
    realize(module)
    partner = module.__dict__.get("_folded_into")
    if isinstance(partner, nn.Module):
        module.refold()  # type: ignore[operator]


_HOOKS = (_on_save, _before_load, _after_load)


def plain_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in plain form."""
    return weight.plain() if isinstance(weight, PackedWeight) else weight

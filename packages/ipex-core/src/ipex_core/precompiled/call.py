# SPDX-License-Identifier: Apache-2.0
"""Calling a precompiled model: what is checked, and how the steps run."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ipex_core.errors import StaleWeightsError
from ipex_core.fusion import GraphReport, Weights
from ipex_core.library.spec import dtype_name
from ipex_core.precompiled.expressions import Kept, evaluate, solve
from ipex_core.precompiled.lower import Run
from ipex_core.precompiled.run import Parts, first_values, run_plan, with_packed_linears


class Precompiled:
    """A model as programs; made by `ipex.precompile` or `ipex.load_precompiled`.

    It is called as the model is, with tensors of the dtypes and sizes of the example; sizes that were said to vary may.
    It computes no gradients and ignores autocast: both are as they were when it was made. It may be called by several
    threads at once.

    Attributes:
        name: Class of the model.
        report: What the passes did; None after loading.
    """

    def __init__(
        self, parts: Parts, report: GraphReport | None = None, model: nn.Module | None = None
    ) -> None:
        self.name = parts.name
        self.report = report
        self._parts = parts
        self._plan = plan = with_packed_linears(parts.plan)
        self._inputs = inputs = parts.inputs
        self._in_spec, self._out_spec = parts.in_spec, parts.out_spec
        self._tensors = [i for i, one in enumerate(inputs) if one.dtype is not None]
        self._fixed = [i for i, one in enumerate(inputs) if one.dtype is None]
        self._static = all(isinstance(size, int) for one in inputs for size in one.shape)
        self._shapes: list[Any] = [inputs[i].shape for i in self._tensors]
        self._dtypes: list[Any] = [inputs[i].dtype for i in self._tensors]
        names = self._names()
        flat = tuple(range(len(inputs) - len(names))), dict.fromkeys(names, 0)
        self._keywords = flat[1] if parts.in_spec == pytree.tree_structure(flat) else None
        self._numbers = _Sizes(parts, self._where)
        self._first = first_values(plan)
        self._weights = Weights.of(model) if model is not None else None
        self._model = None if model is None else weakref.ref(model, self._forget)

    def __repr__(self) -> str:
        plan = self._parts.plan
        inputs = ", ".join(
            f"{one.name}: {dtype_name(one.dtype)}{list(one.shape)}"
            for one in self._inputs
            if one.dtype is not None
        )
        calls = sum(plan.calls.values())
        return (
            f"Precompiled({self.name}, {plan.instructions} instructions in"
            f" {sum(isinstance(step, Run) for step in plan.steps)} programs, {calls} calls of torch, inputs: {inputs})"
        )

    @property
    def calls(self) -> Counter[str]:
        """Name of an op of torch that has no instruction -> how often a run calls it."""
        return self._parts.plan.calls

    @property
    def linears(self) -> int:
        """How many linear layers in float32 a run leaves to torch, which was measured to be faster there."""
        return self._parts.plan.linears

    @property
    def instructions(self) -> int:
        """How many instructions a run has."""
        return self._plan.instructions

    @property
    def peak_bytes(self) -> int:
        """The most memory that intermediate results take at a time, for sizes as in the example."""
        return self._parts.memory[0]

    @property
    def eager_bytes(self) -> int:
        """The same for the model op by op."""
        return self._parts.memory[1]

    def _where(self, index: int) -> str:
        return f"{self.name}: input {self._inputs[index].name}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model.

        Args:
            args: As the model takes them.
            kwargs: As the model takes them.

        Returns:
            What the model returns.

        Raises:
            TypeError: The arguments have another form than the example.
            ValueError: An argument has another dtype, shape, device or value than the precompiled model takes.
            StaleWeightsError: A parameter or buffer of the model was replaced or changed since.
            RuntimeError: A step failed.
        """
        names = self._keywords
        if (
            names is not None
            and kwargs.keys() == names.keys()
            and len(args) + len(names) == len(self._inputs)
        ):
            leaves = [*args, *(kwargs[name] for name in names)]
        else:
            leaves = self._flat(args, kwargs)
        weights = self._weights
        if weights is not None and not weights.same():
            raise StaleWeightsError(
                f"{self.name}: the weights must be as they were when ipex.precompile recorded them, got a change of"
                f" {weights.changed()}: call ipex.precompile(model, ...) again"
            )
        tensors = [leaves[i] for i in self._tensors]
        self._check(leaves, tensors)
        numbers = () if self._static else self._numbers.of(tensors, self._tensors)
        if torch.is_grad_enabled():
            with torch.no_grad():
                results = run_plan(self._plan, self._first, tensors, numbers)
        else:
            results = run_plan(self._plan, self._first, tensors, numbers)
        return pytree.tree_unflatten(results, self._out_spec)

    def _forget(self, model: Any) -> None:
        self._weights = None  # nothing can change any more

    def _flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            kwargs = {key: kwargs[key] for key in self._names() if key in kwargs} | kwargs
            leaves, spec = pytree.tree_flatten((args, kwargs))
        if spec != self._in_spec:
            raise TypeError(
                f"{self.name}: the arguments must have the form of the example, {_form(self._in_spec)},"
                f" got {_form(spec)}"
            )
        return leaves

    def _names(self) -> list[str]:
        context = self._in_spec.children()[1].context
        return list(context) if context else []

    def _check(self, leaves: Sequence[Any], tensors: list[Any]) -> None:
        for i in self._fixed:
            value, given = self._inputs[i].value, leaves[i]
            if type(given) is not type(value) or given != value:
                raise ValueError(
                    f"{self._where(i)} must be {value!r} as in the example, got {given!r}"
                )
        for i, tensor in enumerate(tensors):
            if type(tensor) is not Tensor and not isinstance(tensor, nn.Parameter):
                self._refuse(i, "a torch.Tensor", type(tensor).__name__)
            if tensor.dtype is not self._dtypes[i]:
                self._refuse(i, f"of dtype {dtype_name(self._dtypes[i])}", dtype_name(tensor.dtype))
            if self._static and tensor.shape != self._shapes[i]:
                self._refuse(i, f"of shape {list(self._shapes[i])}", list(tensor.shape))
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                self._refuse(i, "a dense tensor on the CPU", f"{tensor.layout} on {tensor.device}")
            if tensor.requires_grad and torch.is_grad_enabled():
                self._refuse(
                    i,
                    "without gradient, which a precompiled model does not compute (call it under torch.no_grad())",
                    "a tensor that requires grad",
                )

    def _refuse(self, index: int, expected: str, got: Any) -> None:
        where = self._where(self._tensors[index])
        kind = TypeError if expected == "a torch.Tensor" else ValueError
        raise kind(f"{where} must be {expected}, got {got}")

    def save(self, path: Any) -> Any:
        """Write the model to a file that `ipex.load_precompiled` reads.

        Args:
            path: Where to write; ends with ``.safetensors``. A file that is there is replaced when the new one is
                complete.

        Returns:
            The path of the file.

        Raises:
            TypeError: ``path`` is no path.
            ValueError: ``path`` has another ending, or the model has an argument that JSON cannot hold.
            OSError: The file cannot be written.
        """
        from ipex_core.precompiled.files import save

        return save(self._parts, path)


def _form(spec: Any) -> str:
    """Return arguments as text, for instance ``(tensor, mask=tensor)``."""
    args, kwargs = spec.children()
    parts = [_leaf(child) for child in args.children()]
    parts += [
        f"{key}={_leaf(child)}"
        for key, child in zip(kwargs.context or (), kwargs.children(), strict=False)
    ]
    return f"({', '.join(parts)})"


def _leaf(spec: Any) -> str:
    return "value" if spec.is_leaf() else str(getattr(spec.type, "__name__", spec.type))


# --- sizes that vary --------------------------------------------------------------------------------------------------


class _Sizes:
    """The numbers that follow from sizes that vary; they are kept for the last kinds of sizes."""

    def __init__(self, parts: Parts, where: Callable[[int], str]) -> None:
        self._inputs = parts.inputs
        self._ranges = parts.ranges
        self._conditions = parts.conditions
        self._expressions = parts.plan.sizes
        self._where = where
        self._known = Kept()

    def of(self, tensors: Sequence[Tensor], places: Sequence[int]) -> tuple[int, ...]:
        """Return the value of each expression for these tensors.

        Raises:
            ValueError: A tensor has a size that the model does not take.
        """
        key = tuple(tensor.shape for tensor in tensors)
        found = self._known.get(key)
        if found is None:
            found = self._known.keep(key, self._computed(tensors, places))
        return found

    def _computed(self, tensors: Sequence[Tensor], places: Sequence[int]) -> tuple[int, ...]:
        symbols: dict[str, int] = {}
        for tensor, place in zip(tensors, places, strict=True):
            shape = self._inputs[place].shape
            if tensor.dim() != len(shape):
                raise ValueError(
                    f"{self._where(place)} must have {len(shape)} dimensions, got shape {list(tensor.shape)}"
                )
            for size, wanted in zip(tensor.shape, shape, strict=True):
                if isinstance(wanted, str) and wanted.isidentifier():
                    symbols.setdefault(wanted, size)
        for tensor, place in zip(tensors, places, strict=True):
            for size, wanted in zip(tensor.shape, self._inputs[place].shape, strict=True):
                if isinstance(wanted, str) and not wanted.isidentifier():
                    symbols.update(solve(wanted, size, symbols))
        for tensor, place in zip(tensors, places, strict=True):
            for dim, wanted in enumerate(self._inputs[place].shape):
                size = tensor.shape[dim]
                try:
                    expected = wanted if isinstance(wanted, int) else evaluate(wanted, symbols)
                except ValueError:  # no size has this value
                    raise ValueError(
                        f"{self._where(place)} must have a size that is {wanted} in dimension {dim}, got shape"
                        f" {list(tensor.shape)}"
                    ) from None
                low, high = self._ranges.get(str(wanted), (0, None))
                if size != expected:
                    text = expected if isinstance(wanted, int) else f"{wanted} = {expected}"
                elif size < low or (high is not None and size > high):
                    text = f"{low} to {high}" if high is not None else f"at least {low}"
                else:
                    continue
                raise ValueError(
                    f"{self._where(place)} must have size {text} in dimension {dim}, got shape {list(tensor.shape)}"
                )
        for condition in self._conditions:
            if not evaluate(condition, symbols):
                values = ", ".join(f"{name} = {size}" for name, size in symbols.items())
                raise ValueError(
                    f"{self._where(places[0])} and the others must have sizes with {condition}, got {values}"
                )
        return tuple(int(evaluate(text, symbols)) for text in self._expressions)

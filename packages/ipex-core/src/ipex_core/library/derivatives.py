# SPDX-License-Identifier: Apache-2.0
"""Derivatives of ops: the vector-Jacobian product of the reference, or the reference itself, followed by torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from ipex_core.library.spec import OpSpec


def has_tangent(args: Iterable[Any]) -> bool:
    """Return whether a tensor has a derivative that is computed forward."""
    for value in args:
        if isinstance(value, (list, tuple)):
            if has_tangent(value):
                return True
        elif (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and forward_ad.unpack_dual(value).tangent is not None
        ):
            return True
    return False


def differentiate_reference(spec: OpSpec, args: Sequence[Any], run: Callable[[], Any]) -> Any:
    """Run the reference where ``torch.func`` or forward differentiation follow each operation.

    An op that has no derivative is ``run`` on its kernel, which must return integers.
    """
    if spec.backward is not None:
        return spec.reference(*args)
    output = None if spec.mutates else run()
    outputs = output if isinstance(output, tuple) else (output,)
    if any(o is None or o.is_floating_point() for o in outputs):
        raise _not_differentiable(spec.name)
    return output


def _not_differentiable(op: str) -> RuntimeError:
    return RuntimeError(f"{op}: is not differentiable; call it on detached tensors")


def flattened(args: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """Return the arguments with the elements of lists of tensors, which autograd would not find, one by one.

    The numbers are the lengths of such lists, -1 for any other argument.
    """
    flat: list[Any] = []
    counts = []
    for value in args:
        if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            flat.extend(value)
            counts.append(len(value))
        else:
            flat.append(value)
            counts.append(-1)
    return flat, counts


def _nested(flat: Sequence[Any], counts: Sequence[int]) -> list[Any]:
    """Undo `flattened`."""
    values = iter(flat)
    return [next(values) if n < 0 else [next(values) for _ in range(n)] for n in counts]


class VjpOfReference(torch.autograd.Function):
    """Forward: the op below autograd. Backward: the vector-Jacobian product of the reference at the saved inputs."""

    @staticmethod
    def forward(
        ctx: Any, spec: OpSpec, redispatch: Any, keyset: Any, counts: Any, *flat: Any
    ) -> Any:
        ctx.spec = spec
        ctx.counts = counts
        ctx.tensors = [isinstance(value, torch.Tensor) for value in flat]
        ctx.constants = [None if t else v for v, t in zip(flat, ctx.tensors, strict=True)]
        if spec.backward is not None:
            ctx.save_for_backward(*(v for v in flat if isinstance(v, torch.Tensor)))
        with torch._C._AutoDispatchBelowAutograd():
            output = redispatch(keyset, *_nested(flat, counts))
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(
            *(o for o in outputs if o is not None and not o.is_floating_point())
        )
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        spec = ctx.spec
        if spec.backward is None:
            raise _not_differentiable(spec.name)
        saved = iter(ctx.saved_tensors)
        inputs: list[Any] = []
        wanted: list[int] = []
        needed = ctx.needs_input_grad[-len(ctx.tensors) :]
        for index, is_tensor in enumerate(ctx.tensors):
            if not is_tensor:
                inputs.append(ctx.constants[index])
                continue
            value = next(saved).detach()
            if needed[index]:
                value.requires_grad_(True)
                wanted.append(index)
            inputs.append(value)
        if callable(spec.backward):
            # One gradient per argument; an argument that is a list has a list of them.
            found = spec.backward(grads, *_nested(inputs, ctx.counts))
            flat = (g if isinstance(g, (list, tuple)) else (g,) for g in found)
            return (None, None, None, None, *(one for part in flat for one in part))
        result: list[Any] = [None] * len(inputs)
        with torch.enable_grad():
            output = spec.reference(*_nested(inputs, ctx.counts))
        outputs = output if isinstance(output, tuple) else (output,)
        pairs = [
            (o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad
        ]
        if pairs and wanted:
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [inputs[i] for i in wanted],
                [g for _, g in pairs],
                allow_unused=True,
            )
            for index, grad in zip(wanted, found, strict=True):
                result[index] = grad
        return (None, None, None, None, *result)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values and in lists among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def check_not_leaf(op: str, written: Iterable[Any]) -> None:
    """Raise for a leaf that requires a gradient among the tensors that an op overwrites, as torch's own ops do."""
    for value in tensors_in(written):
        if value.requires_grad and value.is_leaf:
            raise RuntimeError(
                f"{op}: is not differentiable and would overwrite a leaf that requires a gradient;"
                " call it under torch.no_grad()"
            )


def mark_overwritten(op: str, written: Iterable[Any], inputs: Sequence[Any]) -> None:
    """Let a backward pass that needs the values of overwritten tensors raise, whether old or new.

    Args:
        op: Name of the op, for the message.
        written: The tensors, or lists of them.
        inputs: All tensors that the new values depend on.
    """
    wanted = [v for v in tensors_in(inputs) if v.requires_grad]
    for value in tensors_in(written):
        # A cache is overwritten at each step: one mark is enough, more would be a chain without end.
        if value.is_floating_point() and type(value.grad_fn).__name__ != "_OverwrittenBackward":
            _Overwritten.apply(op, value, *wanted)  # type: ignore[no-untyped-call]
        else:
            torch.autograd.graph.increment_version(value)


class _Overwritten(torch.autograd.Function):
    """The history of a tensor that an op without derivative has written to."""

    @staticmethod
    def forward(ctx: Any, op: str, value: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.op = op
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise _not_differentiable(ctx.op)

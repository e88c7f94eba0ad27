# SPDX-License-Identifier: Apache-2.0
"""The interaction of a recommendation model with its derivative: ``ipex.nn.functional.interaction``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from ipex_core.library.kernels import autocast_arguments, run_op
from ipex_core.module_swap.base import transformed


class InteractionFunc(torch.autograd.Function):
    """The op and its derivative, each one kernel."""

    @staticmethod
    def forward(ctx: Any, *args: Tensor) -> Tensor:
        """Run ``torch.ops.ipex.interaction``."""
        ctx.save_for_backward(*args)
        return torch.ops.ipex.interaction(list(args))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        """Run ``torch.ops.ipex.interaction_backward``."""
        return tuple(torch.ops.ipex.interaction_backward(grad, list(ctx.saved_tensors)).unbind(0))


def interaction(*args: Tensor) -> Tensor:
    """The first feature vector of each sample, followed by the dot products of all pairs of feature vectors.

    Inside ``torch.autocast`` it runs in the dtype of autocast; in a process that imported
    ``intel_extension_for_pytorch`` in the widest dtype of its inputs, as there.

    Args:
        args: N tensors ``[B, D]`` of one dtype: float32, bfloat16, float16, or float64 without a kernel.

    Returns:
        ``[B, D + N * (N - 1) / 2]``: the first tensor, then ``args[i] . args[j]`` for ``i > j``.

    Raises:
        TypeError: Something is no tensor.
        RuntimeError: There is no tensor, or they differ in shape or dtype.

    Example:
        >>> import torch
        >>> from ipex_core.nn.functional import interaction
        >>> interaction(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 3)).shape
        torch.Size([2, 6])
    """
    if has_torch_function(
        args
    ):  # torch.fx records the call as one node, whatever name it has there
        return handle_torch_function(interaction, args, *args)
    for i, value in enumerate(args):
        if not isinstance(value, Tensor):
            if isinstance(value, fx.Proxy):  # a trace of torch.fx
                return value.tracer.create_proxy("call_function", interaction, args, {})
            raise TypeError(
                f"interaction: args[{i}] must be a tensor, got {type(value).__name__}: give each tensor as an argument"
            )
    if args and torch.is_autocast_enabled(args[0].device.type):
        args = tuple(autocast_arguments("interaction", args[0].device.type, (args,))[0])
    if args and all(value.dtype == torch.float64 for value in args):
        return run_op("interaction", torch.float64, args)
    recorded = torch.is_grad_enabled() and not transformed()
    if recorded and any(value.requires_grad for value in args):
        result = InteractionFunc.apply(*args)  # type: ignore[no-untyped-call]
        return result
    result = torch.ops.ipex.interaction(list(args))
    return result

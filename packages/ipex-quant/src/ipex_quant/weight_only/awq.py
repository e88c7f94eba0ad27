# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantization with calibration data: AWQ, scales that protect the weights of large inputs.

A weight column times s, and its input divided by s, give the same output; a column that is large within its group is
rounded more finely. The division is folded into what makes the input: a norm, or the rows of a linear layer in front.
Whether that is possible is not read from the model's class but tried: a block that gives something else afterwards is
put back.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_quant.util.modules import patterns_of
from ipex_quant.weight_only.build import as_qconfig
from ipex_quant.weight_only.calibrate import Block, Inputs, blocks, linears_of, samples_of
from ipex_quant.weight_only.convert import is_conv1d, is_linear, matches
from ipex_quant.weight_only.gptq import (
    Solved,
    change,
    check_arguments,
    matrix_of,
    nearest,
    replace_layer,
)

log = logging.getLogger("ipex")

#: Output features of a layer from which its scales are found.
_ROWS = 512
#: What is left of a change of the consumers when it is undone in front of them.
_TOLERANCE = 1e-2


def awq(
    model: nn.Module,
    dataloader: Iterable[Any],
    group_size: int = 128,
    wbits: int = 4,
    sym: bool = False,
    nsamples: int = 128,
    use_max_length: bool = False,
    pad_max_length: int = 512,
    n_grid: int = 20,
    scale_dtype: torch.dtype = torch.float16,
    *,
    modules_to_skip: Iterable[str] = (),
    qconfig: Any = None,
    progress: bool = True,
) -> nn.Module:
    """Quantize the linear layers of a model's blocks by AWQ, in place.

    For layers that see the same tensor ``n_grid`` powers of the mean magnitude of its features are tried as scales. The
    one with the smallest change of the outputs is folded into what makes the tensor, and weights are rounded to
    nearest. Where nothing can be folded (a norm whose result is added to something too), layers are rounded as they
    are. Blocks are run as by `gptq`. `save` writes the result.

    Args:
        model: The model, on the CPU; its layers become `WeightOnlyQuantizedLinear`, its norms may change.
        dataloader: As for `gptq`.
        group_size: Input features that share a scale, or -1 for all. The last group may be shorter.
        wbits: 2, 3, 4 or 8.
        sym: Without zero points.
        nsamples: Rows of the data to use.
        use_max_length: Use only samples of at least ``pad_max_length`` tokens.
        pad_max_length: Longer samples are cut to so many tokens.
        n_grid: Powers to try, from 0 to 1.
        scale_dtype: float16, bfloat16 or float32.
        modules_to_skip: Names, ends or patterns of layers that are not quantized.
        qconfig: How the layers compute, as for `gptq`.
        progress: Whether to show a progress bar if it takes long.

    Returns:
        ``model``.

    Raises:
        OpArgumentError: An argument is not as described, there are no samples, or activations are not finite.

    Example:
        >>> import torch
        >>> from ipex_quant import awq
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)).eval()
        >>> type(awq(model, [torch.randn(16, 64)], group_size=32)[0]).__name__
        'WeightOnlyQuantizedLinear'
    """
    op = "awq"
    check_arguments(op, model, group_size, wbits, scale_dtype)
    check(n_grid > 0, op, "n_grid", "be positive", n_grid)
    config = None if qconfig is None else as_qconfig(op, qconfig)
    samples = samples_of(op, dataloader, nsamples, pad_max_length, use_max_length)
    skip = patterns_of(op, modules_to_skip)

    def rounded(weight: Tensor, name: str = "") -> tuple[Tensor, Tensor, Tensor, Tensor]:
        k = weight.shape[0]
        group = k if group_size == -1 else min(group_size, k)
        return nearest(weight, wbits, group, sym, scale_dtype, name)

    for block in blocks(model, samples, progress):
        layers = linears_of(block)
        quantized = {n: m for n, m in layers.items() if not matches(n, skip)}
        if quantized:
            _scale(block, layers, set(quantized), rounded, n_grid)
        for name, layer in quantized.items():
            codes, scales, zeros, _ = rounded(matrix_of(layer).float().t().contiguous(), name)
            k = codes.shape[0]
            index = torch.arange(k, dtype=torch.int32) // (k if group_size == -1 else group_size)
            parts = (codes.t().contiguous(), scales.t().to(scale_dtype).contiguous(), zeros.t())
            solved = Solved(parts[0], parts[1], parts[2].to(torch.uint8).contiguous(), index, 0, 0)
            replace_layer(model, name, layer, solved, wbits, group_size, config)
    return model


@torch.no_grad()
def _scale(
    block: Block,
    layers: dict[str, nn.Module],
    quantized: set[str],
    rounded: Callable[..., Any],
    n_grid: int,
) -> None:
    """Find scales for the layers of a block and fold them."""
    inputs = Inputs(layers)
    inputs.collect(block)
    with _wide(block.module):
        _fold(block, layers, quantized, inputs, rounded, n_grid)


@contextlib.contextmanager
def _wide(module: nn.Module) -> Iterator[None]:
    """Turn floats to float32 for a while: what a fold changes must not drown in rounding."""
    values = [v for v in (*module.parameters(), *module.buffers()) if v.is_floating_point()]
    dtypes = [value.dtype for value in values]
    for value in values:
        value.data = value.data.float()
    try:
        yield
    finally:
        for value, dtype in zip(values, dtypes, strict=True):
            value.data = value.data.to(dtype)


def _fold(
    block: Block,
    layers: dict[str, nn.Module],
    quantized: set[str],
    inputs: Inputs,
    rounded: Callable[..., Any],
    n_grid: int,
) -> None:
    trace = _Trace(block, layers)
    for leader, names in inputs.groups().items():
        members = [name for name in names if name in quantized]
        if not members or not inputs.seen(leader) or trace.expected is None:
            continue
        consumers = [layers[name] for name in names]
        size = inputs.magnitude(leader).clamp(min=1e-4)
        trial = torch.linspace(0.5, 2, size.numel())
        target = next(
            (t for t in trace.makers(leader, names) if _fits(block, trace, t, consumers, trial)),
            None,
        )
        if target is None:
            log.info("awq: %s: nothing to fold scales into", leader)
            continue
        moment = inputs.moment(leader, size.numel())
        weights = []
        for name in members:
            matrix = matrix_of(layers[name])
            step = -(-matrix.shape[0] // _ROWS)
            weights.append(matrix[::step].float().t().contiguous())
        losses: list[tuple[float, Tensor]] = []
        for power in range(n_grid):
            s = size ** (power / n_grid)
            s = (s / (s.max() * s.min()).sqrt()).unsqueeze(1)
            loss = sum(change(rounded(w * s)[3] / s - w, moment) for w in weights)
            losses.append((loss, s.squeeze(1)))
        best, s = min(losses, key=lambda pair: pair[0])
        base = losses[0][0]
        log.info(
            "awq: %s: change of outputs %.4g of that without scales",
            leader,
            best / max(base, 1e-30),
        )
        if best < base:
            _divide(target, s)
            _scale_columns(consumers, s)


# -- folding --------------------------------------------------------------------------------------------------

#: A module and how its weight acts on its output: ``w``, or ``1 + w`` as in Gemma's norms.
Maker = tuple[nn.Module, bool]


class _Trace:
    """One run of a block: which module made what each layer sees, and what came out."""

    def __init__(self, block: Block, layers: dict[str, nn.Module]) -> None:
        self.layers = layers
        self.order: list[str] = []
        self._made: list[tuple[nn.Module, Tensor]] = []
        self._seen: dict[str, Tensor] = {}
        names = {module: name for name, module in layers.items()}
        with contextlib.ExitStack() as hooks:
            for module in block.module.modules():
                hooks.enter_context(module.register_forward_hook(self._after))
                if module in names:
                    hook = self._before(names[module])
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
            self.expected = output_of(block)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            self._made.append((module, output))

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.order.append(name)
            self._seen[name] = args[0] if args else next(iter(kwargs.values()))

        return hook

    def makers(self, leader: str, names: list[str]) -> Iterator[Maker]:
        """Yield what may make the input of these layers, the likeliest first."""
        x = self._seen.get(leader)
        if x is None:
            return
        k = x.shape[-1]
        for module, output in self._made:
            weight = getattr(module, "weight", None)
            if output is x and isinstance(weight, Tensor) and list(weight.shape) == [k]:
                yield module, False
                yield module, True
        for name in reversed(self.order[: self.order.index(leader)]):
            if name not in names and matrix_of(self.layers[name]).shape[0] == k:
                yield self.layers[name], False


def output_of(block: Block) -> Tensor | None:
    """Return what a block gives for the first sample, or None if it gives no tensor."""
    for _, result in block.run(torch.float32):
        value = result[0] if isinstance(result, (tuple, list)) and result else result
        return value if isinstance(value, Tensor) else None
    return None


def _fits(
    block: Block, trace: _Trace, maker: Maker, consumers: list[nn.Module], scales: Tensor
) -> bool:
    """Return whether folding changes nothing; everything is as before then.

    The measure is what happens if only the consumers are scaled: the output of a block is mostly its input.
    """
    expected = trace.expected
    assert expected is not None
    kept = [(p, p.detach().clone()) for m in (maker[0], *consumers) for p in m.parameters(False)]
    _scale_columns(consumers, scales)
    half = output_of(block)
    _divide(maker, scales)
    found = output_of(block)
    for parameter, value in kept:
        parameter.data.copy_(value)
    assert found is not None and half is not None
    return bool((found - expected).norm() < _TOLERANCE * (half - expected).norm())


def _divide(maker: Maker, scales: Tensor) -> None:
    module, shifted = maker
    weight: Any = module.weight
    if is_linear(module):
        shape = (1, -1) if is_conv1d(module) else (-1, 1)
        weight.data.div_(scales.view(shape))
    elif shifted:
        weight.data.copy_((1 + weight.data) / scales - 1)
    else:
        weight.data.div_(scales)
    bias: Any = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        bias.data.div_(scales)


def _scale_columns(layers: list[nn.Module], scales: Tensor) -> None:
    for layer in layers:
        weight: Any = layer.weight
        weight.data.mul_(scales.view((-1, 1) if is_conv1d(layer) else (1, -1)))

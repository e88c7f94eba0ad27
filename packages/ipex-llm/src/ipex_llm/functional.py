# SPDX-License-Identifier: Apache-2.0
"""Fused functions for those who write their own model code: rotary embeddings, norms, activations, attention, LoRA.

The names, the order of the arguments and what is written in place are as in IPEX, for all devices alike. Tensors on
devices without kernels are computed by the reference of the op. Functions that write to their arguments have no
derivative: call them under ``torch.no_grad()`` or with tensors that require no gradient.

Wrong arguments raise `OpArgumentError` (both a ``ValueError`` and a ``RuntimeError``) where Python checks them and
``RuntimeError`` with the same text where a kernel does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from ipex_core.library.checks import check_like, dtype_name
from ipex_core.library.spec import check
from ipex_core.module_swap.base import call
from ipex_core.nn.ipex_api.kv_cache import indirect_access_kv_cache_attention
from ipex_core.nn.ipex_api.lora import (
    bgmv_expand,
    bgmv_expand_slice,
    bgmv_shrink,
    sgmv_expand,
    sgmv_expand_slice,
    sgmv_shrink,
)
from ipex_core.ops.rms_norm import of_rows, times
from ipex_core.util import also_named

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "bgmv_expand",
    "bgmv_expand_slice",
    "bgmv_shrink",
    "fast_layer_norm",
    "gelu_and_mul",
    "gelu_mul",
    "gelu_quick",
    "indirect_access_kv_cache_attention",
    "rms_norm",
    "rotary_embedding",
    "rotary_embedding_batched",
    "sgmv_expand",
    "sgmv_expand_slice",
    "sgmv_shrink",
    "silu_and_mul",
    "silu_mul",
    "varlen_attention",
    "varlen_fwd",
]

_OPS = torch.ops.ipex
_P = ParamSpec("_P")
_T = TypeVar("_T")


def _alibi_may_be_missing(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a function whose seventh argument is ``alibi_slopes`` accept calls without it.

    That was the signature for CPUs, by which clients of IPEX call when its version says so.
    """

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        plain: Any = args
        if len(plain) > 6:
            # Where the slopes would be stands a length: a number, or a tensor that is one.
            is_tensor = isinstance(plain[6], torch.Tensor)
            if plain[6].dim() == 0 if is_tensor else plain[6] is not None:
                plain = (*plain[:6], None, *plain[6:])
        else:
            kwargs.setdefault("alibi_slopes", None)
        return function(*plain, **kwargs)

    return call


@_alibi_may_be_missing
def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    return_softmax: bool,
    gen_: torch.Generator | None,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = -1.0,
) -> Tensor:
    """Attend within each of several sequences that lie behind each other.

    Where a sequence has more keys than queries, the queries are the last positions. A query that sees no key gets
    zeros.

    Args:
        query: ``[tokens, heads, head_size]``, float32, bfloat16 or float16.
        key: ``[key_tokens, kv_heads, head_size]``; heads is a multiple of kv_heads.
        value: Like ``key``.
        out: Like ``query``; written.
        seqlen_q: ``[sequences + 1]`` int32 or int64: where the sequences start in ``query``, and where the last ends.
        seqlen_k: The same for ``key``.
        alibi_slopes: ``[heads]`` or ``[sequences, heads]``, or None. It may be left out, as on IPEX for CPUs, where
            ``max_seqlen_q`` came next.
        max_seqlen_q: Length of the longest sequence; not needed.
        max_seqlen_k: The same for the keys; not needed.
        pdropout: 0: there is no dropout.
        softmax_scale: Factor on the scores; 0 means ``1 / sqrt(head_size)``.
        zero_tensors: Fill ``out`` with zeros first: for rows of no sequence.
        is_causal: Let a query see no later keys.
        return_softmax: False: the weights never exist as a whole.
        gen_: None: there is no dropout.
        window_size_left: How many earlier keys a query sees; negative: all.
        window_size_right: How many later keys; negative: all.
        softcap: If positive, scores become ``softcap * tanh(scores / softcap)``.

    Returns:
        ``out``.

    Raises:
        OpArgumentError: There is a generator.
        RuntimeError: For wrong dtypes or shapes, offsets that are out of order or range, dropout, or
            ``return_softmax``.
    """
    check(gen_ is None, "varlen_attention", "gen_", "be None", type(gen_).__name__)
    call(
        _OPS.varlen_attention.default,
        *(query, key, value, out, seqlen_q, seqlen_k, alibi_slopes, max_seqlen_q, max_seqlen_k),
        *(pdropout, softmax_scale, zero_tensors, is_causal, return_softmax),
        *(window_size_left, window_size_right, softcap),
    )
    return out


@also_named(sequesd_k="seqused_k")
def varlen_fwd(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seqlen_q: Tensor,
    seqlen_k: Tensor,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
    alibi_slopes: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    pdropout: float,
    softmax_scale: float,
    zero_tensors: bool,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    return_softmax: bool,
    gen_: torch.Generator | None,
) -> Tensor:
    """Attend within each of several sequences whose keys lie behind each other or in a paged cache.

    Arguments that are not named here are as for `varlen_attention`.

    Args:
        query: ``[tokens, heads, head_size]``, float32, bfloat16 or float16.
        key: ``[key_tokens, kv_heads, head_size]``; with a block table the cache
            ``[num_blocks, kv_heads, block_size, head_size]``.
        value: Like ``key``.
        out: Like ``query``; written.
        seqused_k: ``[sequences]``: how many keys of each sequence count, from its first on; None: all.
        block_table: ``[sequences, blocks]`` int32 or int64: the blocks of each sequence; or None.

    Returns:
        ``out``.

    Raises:
        OpArgumentError: There is a generator, or ``seqused_k`` has not one entry per sequence or one that is out of
            range.
        RuntimeError: As `varlen_attention`; also for a block that is out of range.
    """
    op = "varlen_fwd"
    check(gen_ is None, op, "gen_", "be None", type(gen_).__name__)
    if seqused_k is not None:
        sequences = seqlen_q.shape[0] - 1
        text = f"have shape {[sequences]}"
        check(list(seqused_k.shape) == [sequences], op, "seqused_k", text, list(seqused_k.shape))
    if block_table is None:
        if seqused_k is not None:
            rows, seqlen_k = _used_rows(seqlen_k, seqused_k)
            key, value = key[rows], value[rows]
        return varlen_attention(
            *(query, key, value, out, seqlen_q, seqlen_k, alibi_slopes, max_seqlen_q),
            *(max_seqlen_k, pdropout, softmax_scale, zero_tensors, is_causal, return_softmax),
            *(None, window_size_left, window_size_right),
        )
    check(pdropout == 0, op, "pdropout", "be 0", f"{pdropout:g}")
    check(not return_softmax, op, "return_softmax", "be False", return_softmax)
    if seqused_k is not None:
        least = int(seqused_k.min()) if seqused_k.numel() else 0
        check(least >= 0, op, "seqused_k", "hold no negative numbers", least)
        seqlen_k = _offsets(seqused_k)
    if zero_tensors:
        out.zero_()
    call(
        _OPS.flash_attn_varlen_func.default,
        *(out, query, key, value, seqlen_q, seqlen_k, max_seqlen_q, max_seqlen_k),
        *(softmax_scale, is_causal, block_table, alibi_slopes),
        *(window_size_left, window_size_right),
    )
    return out


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths]).cumsum(0)


def _used_rows(seqlen_k: Tensor, seqused_k: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of the first keys of each sequence, and where the sequences start among these."""
    starts, used = seqlen_k[:-1].tolist(), seqused_k.tolist()
    owned = seqlen_k.diff().tolist()
    for length, most in zip(used, owned, strict=True):
        text = "hold numbers between 0 and the length of the sequence"
        check(0 <= length <= most, "varlen_fwd", "seqused_k", f"{text}, {most}", length)
    rows = [torch.arange(s, s + n) for s, n in zip(starts, used, strict=True)]
    empty = torch.empty(0, dtype=torch.int64)
    return torch.cat([empty, *rows]).to(seqlen_k.device), _offsets(seqused_k)


# -- Rotary position embeddings ---------------------------------------------------------------------------------------


def rotary_embedding(
    query: Tensor,
    key: Tensor,
    sin: Tensor,
    cos: Tensor,
    rotary_dim: int,
    rotary_half: bool,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of ``query`` and ``key`` by the angle of their position, in place.

    Args:
        query: ``[tokens, heads, head_dim]`` or ``[batch, positions, heads, head_dim]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query`` with its own number of heads; overwritten.
        sin: ``[..., rotary_dim / 2]``, one value for each pair, or ``[..., rotary_dim]``, in the dtype of ``query`` or
            float32. The leading dimensions count the rows of the table. Values for both elements of a pair stand as
            ``cat([t, t], -1)``, for GPT-J's pairs also as ``repeat_interleave(t, 2, -1)``, which is what compiled code
            takes them for.
        cos: Like ``sin``.
        rotary_dim: How many of the first elements of a head are rotated.
        rotary_half: True: element ``i`` pairs with ``i + rotary_dim / 2`` (GPT-NeoX, Llama). False: ``2 i`` with
            ``2 i + 1`` (GPT-J).
        position_ids: int32 or int64: the row of the tables of each token, or of each position where all sequences
            agree. None: one row for each token, or for each position.

    Returns:
        ``(query, key)``, the same tensors.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing has been written then. Also where a
            gradient is required: use ``torch.ops.ipex.rotary_embedding_functional``.

    Example:
        >>> q, k = torch.ones(1, 1, 2), torch.ones(1, 1, 2)
        >>> sin, cos = torch.ones(1, 1), torch.zeros(1, 1)  # a quarter turn
        >>> rotary_embedding(q, k, sin, cos, 2, True)[0] is q, q
        (True, tensor([[[-1.,  1.]]]))
    """
    if not rotary_half and not torch.compiler.is_compiling():
        sin, cos = _one_for_each_pair(sin, cos, rotary_dim)
    call(
        _OPS.rotary_embedding.default,
        *(query, key, sin, cos, rotary_dim, rotary_half, position_ids),
    )
    return query, key


def _one_for_each_pair(sin: Tensor, cos: Tensor, rotary_dim: int) -> tuple[Tensor, Tensor]:
    """Halve tables ``cat([t, t], -1)``: IPEX took only these, the op's own form of GPT-J repeats each value."""
    pairs = rotary_dim // 2
    for table in (sin, cos):
        if table.dim() == 0 or table.size(-1) != 2 * pairs or pairs < 2:
            return sin, cos
        if not torch.equal(table[..., :pairs], table[..., pairs:]):
            return sin, cos
    return sin[..., :pairs].contiguous(), cos[..., :pairs].contiguous()


@also_named(is_nexo_style="is_neox_style", head_size="head_dim")
def rotary_embedding_batched(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_dim: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool,
    rotary_dim: int,
    offsets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the heads of ``query`` and ``key`` in place, with cosines and sines in one table.

    Args:
        positions: ``[tokens]`` or ``[batch, positions]``, int32 or int64.
        query: ``positions.shape + [heads * head_dim]`` or ``+ [heads, head_dim]``, float32, bfloat16 or float16;
            overwritten.
        key: Like ``query`` with its own number of heads; overwritten.
        head_dim: Elements of a head.
        cos_sin_cache: ``[rows, rotary_dim]`` in the dtype of ``query`` or float32: the cosines of the pairs, then
            their sines.
        is_neox_style: True: element ``i`` pairs with ``i + rotary_dim / 2``. False: ``2 i`` with ``2 i + 1``.
        rotary_dim: How many of the first elements of a head are rotated.
        offsets: One per token, added to ``positions``: where the token's table starts, if several lie in one.

    Returns:
        ``(query, key)``, the same tensors.

    Raises:
        RuntimeError: An argument does not fit, or a position has no row; nothing has been written then.
    """
    call(
        _OPS.rotary_embedding_batched.default,
        *(positions, query, key, head_dim, cos_sin_cache, is_neox_style, rotary_dim, offsets),
    )
    return query, key


# -- Norms ------------------------------------------------------------------------------------------------------------


def rms_norm(hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Normalize over the last dimension by the root mean square, computed in float32, or in float64 for that.

    Args:
        hidden_states: ``[..., N]``, floating.
        weight: ``[N]``, or another shape that broadcasts to ``hidden_states``; floating. None for ones.
        eps: Added to the mean square.

    Returns:
        A new tensor like ``hidden_states``.

    Raises:
        RuntimeError: For wrong dtypes or shapes.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0)
        tensor([[0.8485, 1.1314]])
    """
    if not of_rows(hidden_states, weight):
        return times("rms_norm", hidden_states, weight, eps)
    y: Tensor = call(_OPS.rms_norm.default, hidden_states, weight, eps)
    return y


def fast_layer_norm(
    hidden_states: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Normalize over the last dimensions by mean and variance, computed in float32.

    Args:
        hidden_states: ``[..., *normalized_shape]``, float32, bfloat16 or float16.
        normalized_shape: The last dimensions.
        weight: ``normalized_shape`` in the dtype of ``hidden_states`` or float32, or None for ones.
        bias: Likewise, or None for zeros.
        eps: Added to the variance.

    Returns:
        A new tensor like ``hidden_states``.

    Raises:
        OpArgumentError: ``normalized_shape`` is not the shape of the last dimensions, of ``weight`` or of ``bias``.
        RuntimeError: For wrong dtypes.
    """
    op = "fast_layer_norm"
    shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
    last = list(hidden_states.shape[-len(shape) :]) if shape else []
    check(bool(shape), op, "normalized_shape", "name at least one dimension", "none")
    text = f"be the shape of the last dimensions of hidden_states = {list(hidden_states.shape)}"
    check(last == shape, op, "normalized_shape", text, shape)
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None:
            fits = list(value.shape) == shape
            check(fits, op, name, f"have shape {shape}", list(value.shape))
    if len(shape) == 1:
        y: Tensor = call(_OPS.layer_norm.default, hidden_states, weight, bias, eps)
        return y
    y = _OPS.layer_norm(
        hidden_states.flatten(-len(shape)),
        None if weight is None else weight.flatten(),
        None if bias is None else bias.flatten(),
        eps,
    )
    return y.view(hidden_states.shape)


def add_rms_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the RMS norm of ``residual + x``.

    Args:
        residual: ``[..., N]`` like ``x``; None for the norm of ``x`` alone.
        x: ``[..., N]``, floating.
        weight: ``[N]``, or another shape that broadcasts to ``x``; floating. None for ones.
        bias: None: an RMS norm has none.
        eps: Added to the mean square.
        add_back: Write the sum to ``residual``.

    Returns:
        A new tensor like ``x``.

    Raises:
        OpArgumentError: There is a bias.
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` to a leaf that requires a gradient.
    """
    check(bias is None, "add_rms_norm", "bias", "be None", "a tensor")
    y: Tensor
    if residual is None:
        return rms_norm(x, weight, eps)
    if not of_rows(x, weight):
        check_like("add_rms_norm", "residual", residual, x)
        y = times("add_rms_norm", x + residual, weight, eps)
        if add_back:
            residual += x
    elif add_back:
        y = call(_OPS.add_rms_norm_.default, x, residual, weight, eps)
    else:
        y = call(_OPS.add_rms_norm.default, x, residual, weight, eps)[0]
    return y


def add_layer_norm(
    residual: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    add_back: bool = False,
) -> Tensor:
    """Return the layer norm of ``residual + x`` over the last dimension.

    Args:
        residual: ``[..., N]`` like ``x``; None for the norm of ``x`` alone.
        x: ``[..., N]``, float32, bfloat16 or float16.
        weight: ``[N]`` in the dtype of ``x`` or float32, or None for ones.
        bias: Likewise, or None for zeros.
        eps: Added to the variance.
        add_back: Write the sum to ``residual``.

    Returns:
        A new tensor like ``x``.

    Raises:
        RuntimeError: For wrong dtypes or shapes; or ``add_back`` to a leaf that requires a gradient.
    """
    y: Tensor
    if residual is None:
        y = call(_OPS.layer_norm.default, x, weight, bias, eps)
    elif add_back:
        y = call(_OPS.add_layer_norm_.default, x, residual, weight, bias, eps)
    else:
        y = call(_OPS.add_layer_norm.default, x, residual, weight, bias, eps)[0]
    return y


# -- Activations, and their products with a second factor -------------------------------------------------------------


def _given(op: str, y: Tensor, out: Tensor | None) -> Tensor:
    """Return the result, in ``out`` if there is one."""
    if out is None:
        return y
    check(out.device == y.device, op, "out", f"be on the device of x = {y.device}", out.device)
    check(
        out.dtype == y.dtype, op, "out", f"have dtype {dtype_name(y.dtype)}", dtype_name(out.dtype)
    )
    text = f"have shape {list(y.shape)}"
    check(out.shape == y.shape, op, "out", text, list(out.shape))
    return out.copy_(y)


def silu_mul(x: Tensor, y: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``silu(x) * y``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        y: Like ``x``; a shape that is broadcast and another dtype work too, with stock ops.
        out: Where to put the result; may be ``x`` or ``y``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: The shapes cannot be broadcast.
    """
    if x.shape == y.shape and x.dtype == y.dtype and x.dim() > 0:
        return _given("silu_mul", call(_OPS.silu_mul.default, x, y), out)
    return _given("silu_mul", functional.silu(x) * y, out)


def gelu_mul(x: Tensor, y: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return ``gelu(x) * y``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        y: Like ``x``; a shape that is broadcast and another dtype work too, with stock ops.
        out: Where to put the result; may be ``x`` or ``y``.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``approximate`` is neither, or ``out`` has not the shape, dtype and device of the result.
        RuntimeError: The shapes cannot be broadcast.
    """
    known = approximate in ("none", "tanh")
    check(known, "gelu_mul", "approximate", "be one of none, tanh", approximate)
    if x.shape == y.shape and x.dtype == y.dtype and x.dim() > 0:
        return _given("gelu_mul", call(_OPS.gelu_mul.default, x, y, approximate), out)
    return _given("gelu_mul", functional.gelu(x, approximate=approximate) * y, out)


def silu_and_mul(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``silu(first half) * second half`` of the last dimension.

    Args:
        x: ``[..., 2 * N]``, float32, bfloat16 or float16.
        out: ``[..., N]``: where to put the result.

    Returns:
        ``out``, or a new tensor ``[..., N]``.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes, or a last dimension of odd size.
    """
    return _given("silu_and_mul", call(_OPS.silu_and_mul.default, x), out)


def gelu_and_mul(x: Tensor, out: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return ``gelu(first half) * second half`` of the last dimension.

    Args:
        x: ``[..., 2 * N]``, float32, bfloat16 or float16.
        out: ``[..., N]``: where to put the result.
        approximate: ``"none"`` (erf) or ``"tanh"``.

    Returns:
        ``out``, or a new tensor ``[..., N]``.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes, an unknown ``approximate``, or a last dimension of odd size.
    """
    return _given("gelu_and_mul", call(_OPS.gelu_and_mul.default, x, approximate), out)


def gelu_quick(x: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``x * sigmoid(1.702 * x)``.

    Args:
        x: Any shape, float32, bfloat16 or float16.
        out: Where to put the result; may be ``x``.

    Returns:
        ``out``, or a new tensor.

    Raises:
        OpArgumentError: ``out`` has not the shape, dtype and device of the result.
        RuntimeError: For wrong dtypes.
    """
    return _given("gelu_quick", call(_OPS.gelu_quick.default, x), out)

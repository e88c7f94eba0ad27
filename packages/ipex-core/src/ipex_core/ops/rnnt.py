# SPDX-License-Identifier: Apache-2.0
"""The steps around the networks in greedy decoding of an RNN transducer, for a whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ipex_core.errors import OpArgumentError
from ipex_core.library.checks import (
    check_device,
    check_kind,
    check_tensor,
    dtype_name,
    randn,
)
from ipex_core.library.kernels import register_op
from ipex_core.library.spec import FLOATS, Arguments, Sample, check
from ipex_core.ops.state_space import check_writable


def _rnnt_embedding(table: Tensor, idx: Tensor, sos: int = -1) -> Tensor:
    """Return the embeddings of the last labels; the start of a sequence has a row of zeros.

    Args:
        table: ``[V, D]``, float32, bfloat16 or float16.
        idx: ``[B]`` int64: rows of ``table``, or ``sos``.
        sos: The label that stands for the start of a sequence.

    Returns:
        ``[B, D]``, contiguous.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, or an index that is neither.
    """
    start = idx == sos
    wrong = ((idx < 0) | (idx >= table.shape[0])) & ~start
    if bool(wrong.any()):
        raise OpArgumentError(
            f"rnnt_embedding: idx must be {sos} or from 0 to {table.shape[0] - 1}, got {int(idx[wrong][0])}"
        )
    out = table.new_zeros(idx.shape[0], table.shape[1])
    out[~start] = table[idx[~start]]
    return out


def _rnnt_update(
    k: Tensor,
    out_lens: Tensor,
    label_col: Tensor,
    symbols_added: Tensor,
    time_idxs: Tensor,
    blankness: Tensor,
    blankvec: Tensor,
    not_blank: Tensor,
    label_to_put: Tensor,
    label_tensor: Tensor,
    label_for_next_loop: Tensor,
    hidden_0: Tensor,
    hidden_1: Tensor,
    hidden_prime_0: Tensor,
    hidden_prime_1: Tensor,
    x: Tensor,
    f: Tensor,
    max_symbols: int,
    blank_id: int,
    sos: int = -1,
    *,
    any_length: bool = False,
) -> Tensor:
    """Take the labels of one step of greedy decoding: store them, and move on in time where that is due.

    A sequence moves to its next frame after a blank, or after ``max_symbols`` labels of one frame, and has ended when
    there is no frame left. Ended sequences take no labels. Where a label is stored, the state of the prediction network
    becomes ``hidden_prime``. When all have ended, nothing more is written than the counters.

    Args:
        k: ``[B]`` int64: the best label of each sequence.
        out_lens: ``[B]`` int32: frames of each sequence, 1 to T.
        label_col: ``[B]`` int32: place of the last label in ``label_tensor``. Written.
        symbols_added: ``[B]`` int32: labels of the present frame. Written.
        time_idxs: ``[B]`` int32: the present frame. Written.
        blankness: ``[B]`` int32: 1 where the sequence moved in time. Written.
        blankvec: ``[B]`` int32: 1 where the sequence has ended. Written.
        not_blank: ``[B]`` int32: 1 where a label was stored. Written.
        label_to_put: ``[B]`` int64: the stored label minus ``sos``, or 0. Written.
        label_tensor: ``[B, L]`` int64: the labels of each sequence after a ``sos``. Written.
        label_for_next_loop: ``[B]`` int64: the last label. Written.
        hidden_0: ``[layers, B, H]``, float32, bfloat16 or float16: state of the prediction network. Written.
        hidden_1: Its second state, ``[layers, B, H]``. Written.
        hidden_prime_0: The new state, like ``hidden_0``.
        hidden_prime_1: The new second state, like ``hidden_1``.
        x: ``[B, T, E]``, float32, bfloat16 or float16: the encoded frames. Any strides.
        f: ``[B, 1, E]`` in the dtype of ``x``: the present frames. Written.
        max_symbols: Most labels of one frame.
        blank_id: The blank label.
        sos: The label that stands for the start of a sequence.
        any_length: Whether ``out_lens`` may have other numbers: 0 for a sequence that has ended, or more than T, the
            last frame standing for those behind it. No argument of the op.

    Returns:
        bool, one element: whether all sequences have ended.

    Raises:
        RuntimeError: For wrong dtypes, shapes or devices, frames outside ``x``, or no room for a label.

    Source: Graves, "Sequence Transduction with Recurrent Neural Networks", 2012.
    """
    batch, frames = x.shape[:2]
    wrong = out_lens[(out_lens < 1) | (out_lens > frames)]
    if wrong.numel() and not any_length:
        raise OpArgumentError(
            f"rnnt_update: out_lens must be from 1 to {frames}, got {int(wrong[0])}"
        )
    width = label_tensor.shape[1]
    wrong = label_col[(label_col < 0) | (label_col >= width)]
    if wrong.numel():
        raise OpArgumentError(
            f"rnnt_update: label_col must be from 0 to {width - 1}, got {int(wrong[0])}"
        )
    last = torch.iinfo(torch.int32).max - 1  # it counts on
    for name, value in (("time_idxs", time_idxs), ("symbols_added", symbols_added)):
        wrong = value[(value < 0) | (value > last)]
        if wrong.numel():
            raise OpArgumentError(
                f"rnnt_update: {name} must be from 0 to {last}, got {int(wrong[0])}"
            )
    blank = k == blank_id
    ended = time_idxs + blank >= out_lens
    stored = ~blank & ~ended
    if bool((stored & (label_col + 1 >= width)).any()):
        raise OpArgumentError(
            f"rnnt_update: label_tensor must have room for a label behind column {width - 1}, got {width} columns"
        )
    rows = torch.arange(batch, device=k.device)
    count = torch.where(blank, 0, symbols_added) + stored
    full = count.long() >= max_symbols  # which may be beyond int32
    label_col += stored
    label_tensor[rows[stored], label_col[stored].long()] = k[stored]
    label_to_put.copy_(torch.where(stored, k - sos, 0))
    symbols_added.copy_(torch.where(full, 0, count))
    time_idxs += (blank | full).int()
    blankness.copy_(blank | full)
    blankvec.copy_(ended)
    not_blank.copy_(stored)
    if bool(ended.all()):
        return torch.ones(1, dtype=torch.bool, device=k.device)
    label_for_next_loop.copy_(label_tensor.gather(1, label_col.long()[:, None]).squeeze(1))
    for state, new in ((hidden_0, hidden_prime_0), (hidden_1, hidden_prime_1)):
        state[:, stored] = new[:, stored]
    moved = blank | full
    place = time_idxs.clamp_max(frames - 1).long()
    f[moved, 0] = x[rows[moved], place[moved]]
    return torch.zeros(1, dtype=torch.bool, device=k.device)


_COUNTERS = (
    "out_lens",
    "label_col",
    "symbols_added",
    "time_idxs",
    "blankness",
    "blankvec",
    "not_blank",
)
_LABELS = ("k", "label_to_put", "label_for_next_loop")


def _check_integers(
    op: str, name: str, value: Tensor, shape: Sequence[int], dtype: torch.dtype, x: Tensor, of: str
) -> None:
    check_device(op, name, value, x, of)
    wanted = f"have dtype {dtype_name(dtype)}"
    check(value.dtype == dtype, op, name, wanted, dtype_name(value.dtype))
    fine = list(value.shape) == list(shape)
    check(fine, op, name, f"have shape {list(shape)}", list(value.shape))


def _embedding_check(a: Arguments) -> None:
    check_tensor(a.op, "table", a.table)
    a.require(a.table.dim() == 2, "table", "be 2-D", f"{a.table.dim()}-D")
    a.require(a.idx.dim() == 1, "idx", "be 1-D", f"{a.idx.dim()}-D")
    _check_integers(a.op, "idx", a.idx, a.idx.shape, torch.int64, a.table, "table")


def _update_check(a: Arguments) -> None:
    given = vars(a)
    check_tensor(a.op, "x", a.x)
    a.require(a.x.dim() == 3, "x", "be 3-D [B, T, E]", f"{a.x.dim()}-D")
    batch = a.x.shape[0]
    for name in _COUNTERS:
        _check_integers(a.op, name, given[name], [batch], torch.int32, a.x, "x")
    for name in _LABELS:
        _check_integers(a.op, name, given[name], [batch], torch.int64, a.x, "x")
    a.require(a.label_tensor.dim() == 2, "label_tensor", "be 2-D", f"{a.label_tensor.dim()}-D")
    shape = [batch, a.label_tensor.shape[1]]
    _check_integers(a.op, "label_tensor", a.label_tensor, shape, torch.int64, a.x, "x")
    _check_values(a.op, "f", a.f, [batch, 1, a.x.shape[2]], a.x, "x")
    for name, new in (("hidden_0", "hidden_prime_0"), ("hidden_1", "hidden_prime_1")):
        state = given[name]
        check_device(a.op, name, state, a.x)
        a.require(state.dtype in FLOATS, name, "be floating", dtype_name(state.dtype))
        fine = state.dim() == 3 and state.shape[1] == batch
        a.require(fine, name, f"have shape [layers, {batch}, H]", list(state.shape))
        _check_values(a.op, new, given[new], state.shape, state, name)
    for name in (*_COUNTERS[1:], *_LABELS[1:], "label_tensor", "f", "hidden_0", "hidden_1"):
        check_writable(a.op, name, given[name])
    a.require(a.max_symbols > 0, "max_symbols", "be positive")


def _check_values(
    op: str, name: str, value: Tensor, shape: Sequence[int], x: Tensor, of: str
) -> None:
    check_kind(op, name, value, x, of)
    fine = list(value.shape) == list(shape)
    check(fine, op, name, f"have shape {list(shape)}", list(value.shape))


def _embedding_samples(dtype: torch.dtype) -> Iterator[Sample]:
    table = randn(7, 33, dtype=dtype, seed=71)
    yield Sample((table, torch.tensor([0, -1, 3, 6, -1])), id="some")
    yield Sample((table, torch.tensor([2]), 5), id="one")
    yield Sample((table, torch.tensor([9, 2]), 9), id="sos_behind")
    yield Sample((table.t(), torch.tensor([20, -1])), id="transposed")
    yield Sample((table[:, ::2], torch.tensor([1, 1, -1])), id="strided")
    yield Sample((table, torch.tensor([], dtype=torch.int64)), id="empty")


def _update_sample(
    dtype: torch.dtype, batch: int, frames: int, seed: int, last: bool = False
) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, kind: torch.dtype = torch.int32) -> Tensor:
        return torch.randint(low, high, (batch,), generator=generator, dtype=kind)

    lengths = draw(1, frames + 1)
    k = torch.where(draw(0, 3) == 0, 28, draw(0, 28, torch.int64))
    zeros = torch.zeros(batch, dtype=torch.int32)
    place = lengths - 1 if last else (draw(0, frames + 2) % (lengths + 1)).int()
    if last:
        k = torch.full_like(k, 28)
    labels = torch.randint(0, 28, (batch, 12), generator=generator)
    states = [randn(2, batch, 9, dtype=dtype, seed=seed + i) for i in range(4)]
    x = randn(frames, batch, 17, dtype=dtype, seed=seed).transpose(0, 1)
    f = x[:, :1].clone()
    counters = (lengths, draw(0, 9), draw(0, 3), place, zeros, zeros.clone(), zeros.clone())
    put = torch.zeros(batch, dtype=torch.int64)
    return (k, *counters, put, labels, put.clone(), *states, x, f, 3, 28)


def _update_samples(dtype: torch.dtype) -> Iterator[Sample]:
    for batch, frames in ((1, 1), (3, 5), (8, 4), (33, 9)):
        yield Sample(_update_sample(dtype, batch, frames, batch), id=f"{batch}x{frames}")
    yield Sample(_update_sample(dtype, 6, 4, 72, True), id="all_end")
    # More symbols than int32, in which they are counted, has numbers.
    *args, _, blank = _update_sample(dtype, 5, 4, 74)
    yield Sample((*args, 2**31, blank), id="no_limit")
    args = list(_update_sample(dtype, 6, 4, 73))
    args[15] = args[15].contiguous()
    args[9] = args[9].t().contiguous().t()
    args[11] = args[11].transpose(0, 1).contiguous().transpose(0, 1)
    yield Sample((*args, -1), id="other_strides")


register_op(
    reference=_rnnt_embedding,
    check=_embedding_check,
    fake=lambda a: a.table.new_empty(a.idx.shape[0], a.table.shape[1]),
    samples=_embedding_samples,
    backward=None,
    lift=False,
    summary="Embeddings of labels, zeros for the start of a sequence",
)

register_op(
    schema=(
        "(Tensor k, Tensor out_lens, Tensor(a!) label_col, Tensor(b!) symbols_added,"
        " Tensor(c!) time_idxs, Tensor(d!) blankness, Tensor(e!) blankvec, Tensor(f!) not_blank,"
        " Tensor(g!) label_to_put, Tensor(h!) label_tensor, Tensor(i!) label_for_next_loop,"
        " Tensor(j!) hidden_0, Tensor(k!) hidden_1, Tensor hidden_prime_0, Tensor hidden_prime_1,"
        " Tensor x, Tensor(l!) f, int max_symbols, int blank_id, int sos=-1) -> Tensor"
    ),
    reference=_rnnt_update,
    check=_update_check,
    fake=lambda a: torch.empty(1, dtype=torch.bool, device=a.k.device),
    samples=_update_samples,
    backward=None,
    lift=False,
    summary="One step of greedy decoding of an RNN transducer",
)

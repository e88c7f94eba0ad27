# SPDX-License-Identifier: Apache-2.0
"""RNN transducer ops: bad input leaves everything as it was."""

from __future__ import annotations

import refusals
import torch

import ipex_core  # noqa: F401
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
NAMES = [a.name for a in ops.rnnt_update.default._schema.arguments]


def update(**changes):
    """Arguments of a call for three sequences; `changes` are functions of a good argument."""
    sample = next(s for s in specs()["rnnt_update"].samples(torch.float32) if s.id == "3x5")
    args = [a.clone() if isinstance(a, torch.Tensor) else a for a in sample.args]
    for name, change in changes.items():
        index = NAMES.index(name)
        args[index] = change(args[index])
    return "rnnt_update", args


def bad_calls():
    table, idx = torch.randn(4, 3), torch.tensor([0, -1, 3])
    emb = "rnnt_embedding"
    yield emb, [table[0], idx], "table must be 2-D, got 1-D"
    yield emb, [table.long(), idx], "table must have dtype"
    yield emb, [table, idx[None]], "idx must be 1-D, got 2-D"
    yield emb, [table, idx.int()], "idx must have dtype int64, got int32"
    yield emb, [table, idx + 1], "idx must be -1 or from 0 to 3, got 4"
    yield emb, [table, idx - 1], "idx must be -1 or from 0 to 3, got -2"
    yield *update(x=lambda t: t.double()), "x must have dtype"
    yield *update(x=lambda t: t[0]), "x must be 3-D \\[B, T, E\\], got 2-D"
    yield *update(k=lambda t: t.int()), "k must have dtype int64, got int32"
    yield *update(out_lens=lambda t: t.long()), "out_lens must have dtype int32, got int64"
    yield *update(blankvec=lambda t: t[:2]), "blankvec must have shape \\[3\\], got \\[2\\]"
    yield *update(label_tensor=lambda t: t[0]), "label_tensor must be 2-D, got 1-D"
    yield *update(label_tensor=lambda t: t[:2]), "label_tensor must have shape \\[3, 12\\]"
    yield *update(f=lambda t: t.half()), "f must have the dtype of x = float32, got float16"
    yield *update(f=lambda t: t[:, 0]), "f must have shape \\[3, 1, 17\\], got \\[3, 17\\]"
    yield *update(hidden_0=lambda t: t[:, :2]), "hidden_0 must have shape \\[layers, 3, H\\]"
    yield *update(hidden_1=lambda t: t.long()), "hidden_1 must be floating, got int64"
    yield *update(hidden_prime_1=lambda t: t[:1]), "hidden_prime_1 must have shape \\[2, 3, 9\\]"
    yield *update(time_idxs=lambda t: t[:1].expand(3)), "time_idxs must have no broadcast"
    yield *update(max_symbols=lambda _: 0), "max_symbols must be positive, got 0"
    yield *update(out_lens=lambda t: t + 5), "out_lens must be from 1 to 5, got"
    yield *update(out_lens=lambda t: t * 0), "out_lens must be from 1 to 5, got 0"
    yield *update(time_idxs=lambda t: t - 9), "time_idxs must be from 0 to 2147483646, got -"
    most = torch.iinfo(torch.int32).max
    yield *update(time_idxs=lambda t: t * 0 + most), f"time_idxs must be .* got {most}"
    yield *update(symbols_added=lambda t: t * 0 + most), f"symbols_added must be .* got {most}"
    yield *update(label_col=lambda t: t + 12), "label_col must be from 0 to 11, got"
    full = {"label_col": lambda t: t * 0 + 11, "time_idxs": lambda t: t * 0, "k": lambda t: t * 0}
    yield *update(**full), "label_tensor must have room for a label behind column 11, got 12"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)

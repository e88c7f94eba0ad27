# SPDX-License-Identifier: Apache-2.0
"""Second names of low-rank adapters for many users (punica)."""

from __future__ import annotations

import torch

from ipex.compat.torch_ops._alias_op import alias_op

Tensor = torch.Tensor

_ROWS = "Tensor(a!) out, Tensor input, Tensor weights, Tensor indicies"
#: Name -> further arguments; for ``sgmv_*`` they start with the lengths of the sequences.
_FURTHER = {
    "shrink": "float scale",
    "expand": "bool add_inputs",
    "expand_slice": "int offset, int size, bool add_inputs",
}


def _register(kind: str, name: str) -> None:
    op = getattr(torch.ops.ipex, f"{kind}_{name}")
    lengths = "Tensor seq_lens, " if kind == "sgmv" else ""

    @alias_op(f"punica_{kind}_{name}({_ROWS}, {lengths}{_FURTHER[name]}) -> Tensor(a!)")
    def alias(out: Tensor, *args: object) -> Tensor:
        op(out, *args)
        return out


for _kind in ("bgmv", "sgmv"):
    for _name in _FURTHER:
        _register(_kind, _name)

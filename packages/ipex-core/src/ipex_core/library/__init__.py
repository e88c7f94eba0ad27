# SPDX-License-Identifier: Apache-2.0
"""What defines an op: its specification, checks and derivatives, as `torch.library` has it for plain torch.

`docs/recipes.md` shows how to add an op.
"""

from __future__ import annotations

from ipex_core.library.checks import (
    acc,
    check_broadcastable,
    check_device,
    check_dtype,
    check_dtype_in,
    check_like,
    check_not_expanded,
    check_one_of,
    check_shape,
    check_tensor,
    check_vector,
    fake_like,
    randn,
    row_bench,
    row_samples,
    strided,
)
from ipex_core.library.kernels import (
    autocast_arguments,
    define,
    register,
    run_op,
    schemas,
    set_autocast_rule,
    specs,
)
from ipex_core.library.spec import Arguments, BenchCase, OpSpec, Sample, check

__all__ = [
    "Arguments",
    "BenchCase",
    "OpSpec",
    "Sample",
    "acc",
    "autocast_arguments",
    "check",
    "check_broadcastable",
    "check_device",
    "check_dtype",
    "check_dtype_in",
    "check_like",
    "check_not_expanded",
    "check_one_of",
    "check_shape",
    "check_tensor",
    "check_vector",
    "define",
    "fake_like",
    "randn",
    "register",
    "row_bench",
    "row_samples",
    "run_op",
    "schemas",
    "set_autocast_rule",
    "specs",
    "strided",
]

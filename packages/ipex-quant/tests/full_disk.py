# SPDX-License-Identifier: Apache-2.0
"""A disk that is full after some tensors."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from ipex_quant.util.safetensors import ShardWriter


def full_after(count: int) -> Callable[[ShardWriter, Any], None]:
    """Return a method for `ShardWriter.write` that writes less than that many tensors."""
    write, calls = ShardWriter.write, []

    def method(self: ShardWriter, data: Any) -> None:
        calls.append(1)
        if len(calls) == count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, data)

    return method

# SPDX-License-Identifier: Apache-2.0
"""How much memory vLLM may plan for: what is free here and now, not a share of the whole machine."""

from __future__ import annotations

__all__ = ["usable_share"]

#: Of what is free, the part that a server may take; the rest is for activations and for other programs.
_SHARE = 0.9


def usable_share(wanted: float, available: int, total: int, ranks: int) -> float:
    """Return the share of the memory that one rank may plan for.

    vLLM gives the cache of keys and values what the share leaves beside the weights, and stops if that is not free.

    Args:
        wanted: vLLM's ``gpu_memory_utilization``, which is of the CPU's memory here.
        available: Bytes that are free: the smaller of the machine's and the control group's.
        total: Bytes that vLLM multiplies the share with.
        ranks: Processes of this server on this machine.

    Returns:
        ``wanted``, or less where it would not fit.
    """
    return min(wanted, _SHARE * available / (total * ranks))

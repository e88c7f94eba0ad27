# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism between processes of one machine: sums through memory that they share."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

from ipex_core import distributed

__all__ = ["IpexCommunicator"]


class IpexCommunicator(CpuCommunicator):
    """vLLM's communicator of the CPU, with another sum; groups over several machines use their backend (gloo)."""

    def all_reduce(self, input_: torch.Tensor) -> Any:
        """Return the sum over the group, in place."""
        distributed.all_reduce(input_, group=self.device_group)
        return input_

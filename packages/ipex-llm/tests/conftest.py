# SPDX-License-Identifier: Apache-2.0
"""What the tests of ipex-llm share: ``from families import FAMILIES`` works in each of them.

So does what writes tiny quantized checkpoints, ``packers`` and ``ggufs``, where the tests of ipex-quant lie beside
these.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent

sys.path.insert(0, str(HERE))
sys.path.append(str(HERE.parents[1] / "ipex-quant" / "tests"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Run the tiny models on one thread: two wait for each other longer than they compute, on a shared machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _time_for_proofs() -> Iterator[None]:
    """Give a proof of a model all the time that it needs: which depth a test sees must not depend on the load."""
    from ipex_llm.optimization.proof import prove

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prove, "BUDGET", 60.0)
        yield

# SPDX-License-Identifier: Apache-2.0
"""How many of N processes that train for one step on xpu, and do nothing else, end with status 0.

    IPEX_XPU_DEVICE=cpu python exit.py --runs 100

Without the shut-down of autograd's threads about half of them abort: "terminate called without an active exception".
"""

from __future__ import annotations

import argparse
import collections
import subprocess
import sys

SCRIPT = (
    "import torch, ipex_xpu_kernels; ipex_xpu_kernels.activate()\n"
    "x = torch.ones(3, device='xpu', requires_grad=True); (x * 2).sum().backward()"
)


def main() -> int:
    """Run the processes and print how they ended; return 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="number of processes")
    runs = parser.parse_args().runs
    ends: collections.Counter[str] = collections.Counter()
    for _ in range(runs):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120
        )
        ends[f"status {done.returncode}" + (", with messages" if done.stderr else "")] += 1
    for end, count in ends.most_common():
        print(f"{end}: {count} of {runs}")
    return 0 if ends["status 0"] == runs else 1


if __name__ == "__main__":
    raise SystemExit(main())

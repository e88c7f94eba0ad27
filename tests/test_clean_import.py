# SPDX-License-Identifier: Apache-2.0
"""`import ipex` leaves the process as it was: no optional library loaded, nothing of torch replaced."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = [
    "matplotlib",
    "transformers",
    "rich",
    "typer",
    "click",
    "scipy",
    "pandas",
    "torch._inductor",  # two seconds
]

PROBE = """
import json, sys, logging
import torch, torch.nn.functional

def state():
    owners = {"torch": torch, "Tensor": torch.Tensor, "functional": torch.nn.functional, "jit": torch.jit,
              "Module": torch.nn.Module, "mkldnn": torch.backends.mkldnn}
    return {f"{name}.{key}": id(value) for name, owner in owners.items() for key, value in vars(owner).items()
            if callable(value)}

before, modules = state(), set(sys.modules)
threads, handlers, logger = torch.get_num_threads(), list(logging.root.handlers), logging.getLoggerClass()
import MODULE
after = state()
print(json.dumps({
    "changed": sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key)),
    "loaded": sorted(set(sys.modules) - modules),
    "threads": threads == torch.get_num_threads(),
    "logging": handlers == logging.root.handlers and logger is logging.getLoggerClass(),
    "kernels": any("libipex_cpu" in line for line in open("/proc/self/maps")) if sys.platform == "linux" else False,
}))
"""


def probe(module: str) -> dict[str, object]:
    pytest.importorskip(module)
    command = [sys.executable, "-W", "error", "-c", PROBE.replace("MODULE", module)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    found: dict[str, object] = json.loads(result.stdout)
    return found


#: What an import replaces: scripts of IPEX rely on it (`ipex.compat.torch_changes`).
REPLACED = {"intel_extension_for_pytorch": ["Tensor.numpy", "jit.trace"]}


#: The last one is what `ipex show-config` and `ipex doctor` import.
@pytest.mark.parametrize(
    "module",
    ["ipex", "intel_extension_for_pytorch", "ipex_core", "ipex_core.diagnostics.explain"],
)
def test_import_has_no_side_effects(module: str) -> None:
    found = probe(module)
    assert found["changed"] == REPLACED.get(module, [])
    assert found["threads"] and found["logging"]
    loaded = found["loaded"]
    assert isinstance(loaded, list)
    assert not [name for name in HEAVY if name in loaded]
    # The native library is loaded by the first op, not by the import.
    assert not found["kernels"]

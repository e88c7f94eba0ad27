# SPDX-License-Identifier: Apache-2.0
"""What the packages must not do: run what a file says, fetch anything, or reach the network while they are imported."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted(
    path
    for folder in ("packages/*/src", "packages/*/benchmarks", "examples", "tools")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
#: Modules that run what they read, or fetch.
FORBIDDEN = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "requests"),
    *("urllib.request", "urllib3", "http.client", "ftplib", "aiohttp", "huggingface_hub"),
}
#: What talks to a server that it has started itself, or asks whether an index is there.
MAY_ASK = {
    "tools/try_images.py": {"urllib.request"},
    "tools/vllm_check.py": {"urllib.request"},
}
#: False, or the value of an argument or flag that is False unless the user says otherwise.
TRUST = ("False", "trust_remote_code", "trusted")
#: What runs the code of a folder when it is allowed to.
AUTO = re.compile(r"(^|[.])Auto\w+[.](from_pretrained|from_config)$")


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            yield ast.unparse(node.func), node


def problems(text: str) -> list[str]:
    """Return the lines of a module that do what is not allowed; ruff's S rules see the rest."""
    tree = ast.parse(text)
    found = []
    for name, call in calls(tree):
        options = {option.arg: ast.unparse(option.value) for option in call.keywords}
        if name == "torch.load" and options.get("weights_only") != "True":
            found.append(f"{call.lineno}: torch.load without weights_only=True")
        if options.get("trust_remote_code", "False") not in TRUST:
            found.append(f"{call.lineno}: trust_remote_code")
        if AUTO.search(name) and "trust_remote_code" not in options:
            # Without a value transformers asks on standard input.
            found.append(f"{call.lineno}: {name} without trust_remote_code")
        if options.get("allow_pickle", "False") != "False":
            found.append(f"{call.lineno}: allow_pickle")
        if name.endswith("extractall") and options.get("filter") != "'data'":
            found.append(f"{call.lineno}: an archive unpacked without a filter")
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found += [f"{node.lineno}: import of {name}" for name in names if name in FORBIDDEN]
    return found


def test_the_check_finds_what_it_looks_for() -> None:
    bad = "import torch, pickle\nfrom urllib import request\ntorch.load('x')\ntar.extractall('.')\n"
    bad += "AutoConfig.from_pretrained('x')\nf(trust_remote_code=True)\n"
    assert [line.partition(":")[0] for line in sorted(problems(bad))] == [
        "1",
        "2",
        "3",
        "4",
        "5",
        "6",
    ]
    assert not problems("import torch\ntorch.load('x', weights_only=True)\n")


def test_no_module_runs_or_fetches_what_it_should_not() -> None:
    assert len(SOURCES) > 300
    found = {
        str(path.relative_to(ROOT)): lines
        for path in SOURCES
        if (lines := problems(path.read_text(encoding="utf-8")))
    }
    for path, modules in MAY_ASK.items():
        lines = found.pop(path)
        assert {line.rpartition(" ")[2] for line in lines} == modules
    assert not found


OFFLINE = """
import importlib, pkgutil, socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("the network is asked while modules are imported")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = refuse
for name in sys.argv[1:]:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, f"{name}."):
        if module.name.rpartition(".")[2] == "__main__":
            continue
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass  # of an optional package
"""


def test_importing_every_module_asks_no_network() -> None:
    packages = ("ipex_core", "ipex_quant", "ipex_llm", "ipex_runtime", "ipex")
    installed = [name for name in packages if importlib.util.find_spec(name) is not None]
    assert installed
    command = [sys.executable, "-W", "ignore", "-c", OFFLINE, *installed]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]

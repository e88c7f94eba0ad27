# SPDX-License-Identifier: Apache-2.0
"""Seeds, the fixtures of all packages, which tests are slow, and a report which ISA levels of the CPU kernels a test
run has exercised, so that a level nobody ran is seen.

A test counts for a level if it is parametrized with one (parameter ``level`` or ``isa``) and lies in the tests of
``ipex-cpu-kernels``.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parent / "packages" / "ipex-cpu-kernels"
TABLE = PACKAGE / "cmake" / "IsaLevels.cmake"
PARAMETERS = ("level", "isa", "isa_level")
PROPERTY = "isa_level"
SLOW = Path(__file__).parent / "tests" / "data" / "slow_tests.txt"


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw the same numbers in each run and in each order of the tests; torch is not imported where a test did not."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_compiled_functions() -> None:
    """Forget what other tests compiled: modules of torch.nn share one frame, and Dynamo stops at its eighth graph."""
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True)
def _stock_torch() -> None:
    """Take back what an import of the old name has changed: all tests of a process share one torch."""
    if changes := sys.modules.get("ipex.compat.torch_changes"):
        changes.undo()


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """Record nothing for a backward pass."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def small_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack all but the tiniest layers, so that small models are treated as real ones are."""
    from ipex_core.kernels import policy

    monkeypatch.setattr(policy, "MIN_WEIGHTS", dict.fromkeys(policy.MIN_WEIGHTS, 64))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let patterns fire without a kernel package too: the ops then run their reference."""
    monkeypatch.setattr("ipex_core.kernels.policy.has_kernel", lambda op: True)


@pytest.fixture
def no_code_generation(monkeypatch: pytest.MonkeyPatch, kernels: None) -> None:
    """Interpret the graphs that the passes make instead of compiling them to C++, which takes most of the time."""
    from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def interpreted(gm: Any, inputs: Any, patches: dict[str, Any]) -> Callable[..., Any]:
        def compiler(graph: Any, example_inputs: Any) -> Any:
            if "joint_custom_pre_pass" in patches:
                patches["joint_custom_pre_pass"](graph.graph)
            graph.graph.lint()
            graph.recompile()
            return make_boxed_func(graph.forward)

        return aot_module_simplified(
            gm,
            inputs,
            fw_compiler=compiler,
            inference_compiler=compiler,
            decompositions=select_decomp_table(),
        )

    monkeypatch.setattr("ipex_core.compile_backend._inductor", interpreted)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking at all tests and imported modules again and again."""
    gc.collect()
    gc.freeze()


def levels() -> list[str]:
    """Return the levels, lowest first, from the one file that lists them."""
    if not TABLE.exists():
        return []
    import generate_isa

    return [*generate_isa.levels()]


def slow_tests() -> dict[str, list[str]]:
    """Return what the list of slow tests says: test or case -> parts of the names of cases that are not slow."""
    lines = SLOW.read_text(encoding="utf-8").splitlines() if SLOW.exists() else []
    return {
        name: kept for name, *kept in (line.split() for line in lines if line and line[0] != "#")
    }


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    known, slow = set(levels()), slow_tests()
    for item in items:
        name, _, case = item.nodeid.partition("[")
        if item.nodeid in slow or (name in slow and not any(part in case for part in slow[name])):
            item.add_marker("slow")
        callspec = getattr(item, "callspec", None)
        if callspec is None or not item.path.is_relative_to(PACKAGE):
            continue
        for name in PARAMETERS:
            level = callspec.params.get(name)
            if isinstance(level, str) and level in known:
                # A property of the item travels in its reports, from the workers of pytest-xdist too.
                item.user_properties.append((PROPERTY, level))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in ("passed", "failed", "error", "skipped", "xfailed"):
        for report in terminalreporter.stats.get(outcome, ()):
            level = dict(getattr(report, "user_properties", ())).get(PROPERTY)
            if level is None:
                continue
            counts[level][outcome] += 1
            if outcome == "skipped" and isinstance(report.longrepr, tuple):
                reasons[level][str(report.longrepr[2]).removeprefix("Skipped: ")] += 1
    if not counts:
        return
    terminalreporter.section("ISA levels of the CPU kernels")
    for level in levels():
        count = counts[level]
        if count["passed"] or count["failed"] or count["error"]:
            numbers = ", ".join(f"{number} {outcome}" for outcome, number in count.items())
            terminalreporter.line(f"{level:14} run      {numbers}")
        else:
            reason = reasons[level].most_common(1)
            text = reason[0][0] if reason else why_not(level)
            terminalreporter.line(f"{level:14} NOT RUN  {text}")


def why_not(level: str) -> str:
    """Return why no test was collected for a level."""
    try:
        from ipex_core.kernels.providers import provider_for

        provider = provider_for("cpu")
    except Exception as error:
        return f"the kernels cannot be loaded: {error}"
    if provider is None:
        return "the kernels are not installed"
    if level not in provider.isa_built:
        return "not in this build"
    return "not selected" if level in provider.isa_available else "this CPU cannot run it"

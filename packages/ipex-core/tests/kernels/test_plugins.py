# SPDX-License-Identifier: Apache-2.0
"""Plug-in discovery with made-up entry points: active, missing, broken; strict; never swallowed demands."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import types
import warnings

import pytest

import ipex_core
from ipex_core import config
from ipex_core.diagnostics import explain
from ipex_core.errors import (
    BrokenComponentError,
    IsaError,
    KernelApiError,
    MissingComponentError,
    UnknownComponentError,
    UnknownOpError,
)
from ipex_core.kernels import providers


def info(**changes):
    values = {
        "name": "cpu",
        "version": "9.9",
        "device": "cpu",
        "kernel_api": providers.KERNEL_API,
        "isa": "default",
        "isa_available": ("default",),
        "isa_built": ("default",),
        "ops": ("gelu",),
        "kernels": lambda op: (providers.KernelInfo("ipex_k_gelu_f32", "default", ("default",)),),
        "stock_when": {"gelu": "never"},
    }
    return providers.ProviderInfo(**{**values, **changes})


@pytest.fixture
def plug(monkeypatch):
    """Install functions as the entry points of a group for one test."""

    def install(group, **functions):
        module = types.ModuleType("fake_plugin")
        for name, function in functions.items():
            setattr(module, name, function)
        monkeypatch.setitem(sys.modules, "fake_plugin", module)
        points = tuple(
            importlib.metadata.EntryPoint(name, f"fake_plugin:{name}", group) for name in functions
        )
        monkeypatch.setattr(providers, "_entry_points", lambda g: points if g == group else ())
        monkeypatch.setattr(providers, "_providers", None)

    return install


def status(name):
    return next(s for s in providers.load_providers() if s.name == name)


def test_active_provider(plug):
    seen = []
    plug(providers.KERNEL_GROUP, cpu=lambda api: seen.append(api) or info())
    assert status("cpu").state == "active"
    assert status("cpu").info.version == "9.9"
    assert providers.provider_for("cpu").name == "cpu"
    assert providers.provider_for("tpu") is None
    assert seen == [providers.KERNEL_API], "register is called once, with the contract version"
    told = explain.op_info("gelu")
    assert told["provider"] == "cpu"
    assert told["kernels"]["ipex_k_gelu_f32"]["current"] == "default"
    assert told["stock_when"] == "never"
    assert explain.op_info("softmax")["provider"] == "reference"


def test_missing_provider_is_silent(plug):
    plug(providers.KERNEL_GROUP)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert status("cpu").state == "missing"
    assert status("cpu").distribution == "ipex-cpu-kernels"


def test_broken_provider_warns_once_and_is_recorded(plug):
    def cpu(api):
        raise OSError("libfoo.so: cannot open")

    plug(providers.KERNEL_GROUP, cpu=cpu)
    with pytest.warns(RuntimeWarning, match="libfoo.so") as seen:
        providers.load_providers()
        providers.load_providers()
    assert len(seen) == 1
    assert status("cpu").state == "broken"
    assert isinstance(status("cpu").cause, OSError)
    assert "broken" in explain.show_config()


def test_broken_provider_raises_in_strict_mode(plug):
    def cpu(api):
        raise OSError("libfoo.so: cannot open")

    plug(providers.KERNEL_GROUP, cpu=cpu)
    with config.override(strict=True):
        with pytest.raises(BrokenComponentError, match=r"libfoo\.so") as caught:
            providers.load_providers()
    assert isinstance(caught.value.__cause__, OSError)


@pytest.mark.filterwarnings("ignore:the kernel package")
def test_other_kernel_api_is_broken_not_fatal(plug):
    def cpu(api):
        raise KernelApiError("built for another core")

    plug(providers.KERNEL_GROUP, cpu=cpu)
    assert status("cpu").state == "broken"
    assert "another core" in str(status("cpu").cause)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "must return a ProviderInfo, got NoneType"),
        ({"name": "other"}, "must return a ProviderInfo, got dict"),
        ("another api", "got 7"),
    ],
)
@pytest.mark.filterwarnings("ignore:the kernel package:RuntimeWarning")
def test_a_provider_that_returns_something_else_is_broken(plug, result, message):
    found = info(name="other", kernel_api=7) if result == "another api" else result
    plug(providers.KERNEL_GROUP, other=lambda api: found)
    assert status("other").state == "broken" and message in str(status("other").cause)


def test_demand_that_cannot_be_met_always_raises(plug):
    def cpu(api):
        raise IsaError("IPEX_CPU_ISA=amx cannot be used: the CPU lacks amx")

    plug(providers.KERNEL_GROUP, cpu=cpu)
    for _ in range(2):  # and not only the first time
        with pytest.raises(IsaError, match="lacks amx"):
            providers.load_providers()


def test_third_party_provider(plug):
    plug(providers.KERNEL_GROUP, other=lambda api: info(name="other", device="privateuseone"))
    assert status("other").state == "active"


def test_three_cases_of_components_are_told_apart(plug):
    plug(providers.COMPONENT_GROUP)
    with pytest.raises(UnknownComponentError, match="no component 'nothing'"):
        providers.load_component("nothing")
    with pytest.raises(MissingComponentError, match=r"pip install 'ipex\[llm\]'"):
        providers.load_component("llm")

    def llm():
        return None

    plug(providers.COMPONENT_GROUP, llm=llm)
    assert providers.load_component("llm") is llm
    del sys.modules["fake_plugin"].llm
    with pytest.raises(BrokenComponentError, match=r"ipex\.llm") as caught:
        providers.load_component("llm")
    assert caught.value.__cause__ is not None


def test_component_states(plug):
    plug(providers.COMPONENT_GROUP, llm=lambda: None, extra=lambda: None)
    states = {c.name: c.state for c in providers.components()}
    assert states["llm"] == "active"
    assert states["extra"] == "active"
    assert states["runtime"] == "missing"


def test_unknown_op():
    with pytest.raises(UnknownOpError, match="did you mean rms_norm"):
        ipex_core.op_info("rmsnorm")


def test_nothing_is_discovered_when_nothing_is_used():
    code = (
        "import sys, ipex_core, ipex_core.kernels.providers as p; assert not p.providers_loaded();"
        "assert p._entry_points.cache_info().currsize == 0; assert 'ipex_cpu_kernels' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_optimize_leaves_dynamo_alone():
    """Importing it takes longer than all the rest, and only `torch.compile` needs it."""
    code = (
        "import sys, torch, ipex_core; ipex_core.optimize(torch.nn.Sequential(torch.nn.Linear(4, 4)).eval());"
        "assert 'torch._dynamo' not in sys.modules;"
        "from ipex_core.optimization.transformers import _needs_masks as f; import torch._dynamo;"
        "assert f._dynamo_marked_constant"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_torch_too_old():
    """An old torch gives an ImportError with both versions, never a dead process or an AttributeError."""
    code = (
        "import torch; torch.__version__ = '2.6.0'\n"
        "try:\n    import ipex_core\n"
        "except ImportError as e:\n    print(type(e).__name__, e)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "TorchVersionError" in result.stdout
    assert "2.6.0" in result.stdout
    assert "torch >= 2.11" in result.stdout

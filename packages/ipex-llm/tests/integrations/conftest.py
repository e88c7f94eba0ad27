# SPDX-License-Identifier: Apache-2.0
"""What the tests of the plug-in of vLLM share."""

from __future__ import annotations

import importlib

import pytest
import vllm_stand_in as stand_in

from ipex_llm.integrations import vllm as plugin
from ipex_llm.integrations.vllm import ranks


@pytest.fixture
def fresh_plugin(monkeypatch):
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(plugin, "gpu", lambda: "")
    plugin.platform.cache_clear()
    yield
    plugin.platform.cache_clear()


@pytest.fixture(params=stand_in.VERSIONS)
def modules(request, monkeypatch):
    """The stand-in of each recorded version, with our platform in use."""
    found = stand_in.install(monkeypatch, request.param)
    stand_in.use_our_platform(found)
    monkeypatch.setenv(ranks.VARIABLE, "nobind")
    monkeypatch.setenv(ranks.BOUND, "")
    return found


@pytest.fixture
def no_fakes_left():
    before = {*importlib.sys.modules}
    yield
    for name in {*importlib.sys.modules} - before:
        if name.startswith("vllm.") or name in stand_in.OURS:
            del importlib.sys.modules[name]

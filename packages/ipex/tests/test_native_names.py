# SPDX-License-Identifier: Apache-2.0
"""Names of IPEX's native module, by which scripts ask for levels and features."""

from __future__ import annotations

import dataclasses
import os
import types

import pytest
import torch

import ipex
import ipex._C
import ipex._isa_help
from ipex_core import config
from ipex_core.kernels import machine, providers


def _provider(monkeypatch, **changes):
    info = providers.ProviderInfo(
        name="cpu",
        version="0.1.0",
        device="cpu",
        kernel_api=1,
        isa="avx512",
        isa_available=config.ISA_LEVELS[:6],
        isa_built=config.ISA_LEVELS,
        ops=(),
        kernels=lambda op: (),
        **changes,
    )
    monkeypatch.setattr(providers, "provider_for", lambda device: info if device == "cpu" else None)


def test_isa_levels_with_kernels(monkeypatch):
    _provider(monkeypatch)
    assert ipex._C._get_current_isa_level() == "AVX512"
    assert ipex._C._get_highest_cpu_support_isa_level() == "AVX512_BF16"
    assert ipex._C._get_highest_binary_support_isa_level() == "AVX512_FP16"
    assert ipex.cpu._get_current_isa_level is ipex._C._get_current_isa_level
    assert ipex._isa_help._check_isa_avx2() is True
    assert ipex._C.isa_has_amx_support() is False
    native = ipex._C
    assert native.isa_has_avx512_bf16_support() is native.isa_has_avx2_support() is True
    assert {f"isa_has_{level}_support" for level in config.ISA_LEVELS[1:]} <= set(native.__all__)
    assert ipex._C._has_cpu() is True
    assert ipex._C._has_xpu() is False
    _provider(monkeypatch, current_isa=lambda: "avx2")
    assert ipex._C._get_current_isa_level() == "AVX2"


def test_features_of_the_cpu_where_the_build_has_few_levels(monkeypatch):
    """The question is what the CPU has, not what the kernels were built for."""
    _provider(monkeypatch)
    info = providers.provider_for("cpu")
    few = dataclasses.replace(
        info, isa_built=("default", "avx512_bf16", "amx"), isa_available=("default", "avx512_bf16")
    )
    monkeypatch.setattr(providers, "provider_for", lambda device: few)
    features = [f for level in config.ISA_LEVELS for f in config.LEVEL_FEATURES[level]]
    cpu = types.SimpleNamespace(features=features)
    monkeypatch.setattr(machine, "cpu_info", lambda: cpu)
    assert ipex._C.isa_has_avx512_vnni_support() and ipex._C.isa_has_avx2_vnni_support()
    assert not ipex._C.isa_has_amx_support()  # its own check knows of permissions, too
    features[:] = [f for f in features if f != "avx512_vnni"]
    assert not ipex._C.isa_has_avx512_vnni_support()


def test_isa_levels_without_kernels(monkeypatch):
    monkeypatch.setattr(providers, "provider_for", lambda device: None)
    assert ipex._C._get_current_isa_level() == "DEFAULT"
    assert ipex._C._get_highest_binary_support_isa_level() == "DEFAULT"
    assert ipex._C._get_highest_cpu_support_isa_level().lower() in config.ISA_LEVELS
    assert isinstance(ipex._isa_help._check_isa_avx512(), bool)
    assert ipex._C._has_cpu() is False


def test_levels_of_onednn(monkeypatch):
    _provider(monkeypatch)
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(name, raising=False)
    level = ipex._C._get_current_onednn_isa_level
    assert level() == "AVX512_BF16"
    assert ipex._C._check_not_sync_onednn_isa_level() is True  # ours are told to be lower
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    assert level() == "AVX512"
    assert ipex._C._check_not_sync_onednn_isa_level() is False
    limits = {
        **{"SSE41": "DEFAULT", "AVX": "DEFAULT", "AVX2": "AVX2", "AVX2_VNNI_2": "AVX2_VNNI"},
        **{"AVX512_CORE_VNNI": "AVX512_VNNI", "AVX512_CORE_AMX": "AVX512_FP16"},
        **{"AVX512_CORE_FP16": "AVX512_BF16", "AVX10_1_512": "AVX512_BF16"},
    }
    with monkeypatch.context() as patch:
        patch.setattr(ipex._C, "_cpu_levels", lambda: config.ISA_LEVELS)
        for limit, within in limits.items():
            patch.setenv("ONEDNN_MAX_CPU_ISA", limit)
            assert level() == within
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "ALL")
    monkeypatch.setenv("DNNL_MAX_CPU_ISA", "AVX2")  # the older name counts less
    assert level() == "AVX512_BF16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    assert level() == "AVX2"


def test_native_names_that_scripts_probe():
    assert ipex._C._is_syngraph_available() is False
    # Scripts for IPEX skip FP8 otherwise, which runs on any CPU.
    assert ipex._C.onednn_has_fp8_support() is True
    assert ipex._C.mkldnn_set_verbose(ipex.VERBOSE_OFF) == 1
    assert ipex._C.is_llga_fp32_bf16_enabled() is False
    ipex._C.set_llga_fp32_bf16_enabled(True)
    try:
        assert torch.jit.onednn_fusion_enabled() is ipex._C.is_llga_fp32_bf16_enabled() is True
    finally:
        ipex._C.set_llga_fp32_bf16_enabled(False)
    for probe in (ipex.xpu.deepspeed.has_deepspeed, ipex.xpu.bitsandbytes.has_bitsandbytes):
        assert probe() is False


def test_embedding_bag_by_its_private_names():
    """Scripts assign either to ``torch.embedding_bag``."""
    module = ipex.nn.functional._embeddingbag
    assert module._embeddingbag is module.torch_embedding_bag is torch.embedding_bag


def test_isa_levels_of_what_is_installed():
    assert ipex._C._get_current_isa_level().lower() in (
        *config.ISA_LEVELS,
        "default",
    )
    assert isinstance(ipex._C.onednn_has_bf16_support(), bool)
    assert ipex._C.get_fp32_math_mode() == ipex.FP32MathMode.FP32


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity on this system")
def test_the_pool_of_the_calling_thread():
    pytest.importorskip("ipex_runtime")
    before = ipex._C.get_current_cpu_pool()
    assert set(before.get_core_list()) == os.sched_getaffinity(0)
    first = ipex.cpu.runtime.CPUPool(before.get_core_list()[:1])
    try:
        ipex._C.set_cpu_pool(first)
        assert os.sched_getaffinity(0) == set(first.get_core_list())
        assert ipex._C.get_current_cpu_pool().get_core_list() == first.get_core_list()
    finally:
        ipex._C.set_cpu_pool(before)
    assert os.sched_getaffinity(0) == set(before.get_core_list())

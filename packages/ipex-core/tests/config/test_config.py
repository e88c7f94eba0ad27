# SPDX-License-Identifier: Apache-2.0
"""The configuration table: parsing, sources, overrides, effects on PyTorch, and the check at import."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator

import pytest
import torch

from ipex_core import config
from ipex_core.errors import ConfigError, MissingComponentError
from ipex_core.kernels import providers


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    config.reload({})
    yield
    config.reload({})


BAD = [
    ("IPEX_CPU_ISA", "avx1024", "avx512_bf16"),
    ("IPEX_STRICT", "maybe", "0, 1"),
    ("IPEX_VERBOSE", "3", "0, 1, 2"),
    ("IPEX_VERBOSE", "on", "0, 1, 2"),
    ("IPEX_FP32_MATH_MODE", "bf32", "FP32, TF32, BF32"),
    ("IPEX_FP32_MATH_MODE", "2", "FP32, TF32, BF32"),
    ("IPEX_NUM_THREADS", "-1", ">= 0"),
    ("IPEX_NUM_THREADS", "four", ">= 0"),
    ("IPEX_HUGE_PAGES", "2", "0, 1"),
]


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_a_bad_value_names_variable_value_and_allowed_values(name, value, allowed):
    with pytest.raises(ConfigError) as caught:
        config.reload({name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)
    assert allowed in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert config.settings()[0].source == "default"  # the old values stay


def test_every_bad_value_is_told_at_once():
    with pytest.raises(ConfigError, match=r"IPEX_STRICT(.|\n)*IPEX_HUGE_PAGES"):
        config.reload({"IPEX_STRICT": "x", "IPEX_HUGE_PAGES": "y"})


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("IPEX_CPU_ISA", "AVX512_BF16", "avx512_bf16"),
        ("IPEX_CPU_ISA", "", ""),
        ("IPEX_STRICT", "ON", True),
        ("IPEX_STRICT", "no", False),
        ("IPEX_VERBOSE", "2", 2),
        ("IPEX_NUM_THREADS", "0", 0),
        ("IPEX_HUGE_PAGES", "false", False),
        ("IPEX_HUGE_PAGES", "  ", True),
    ],
)
def test_values_are_read(name, text, value):
    config.reload({name: text})
    assert config.get(name) == value
    state = next(s for s in config.settings() if s.variable.name == name)
    assert state.source == ("environment" if text.strip() else "default")


def test_rows_are_complete():
    for attribute, row in config.VARIABLES.items():
        assert row.attribute == attribute
        assert row.foreign or row.name.startswith("IPEX_")
        assert row.check(row.default) == row.default
        assert row.meaning.endswith(".")
        assert row.allowed
        assert getattr(config, attribute) == row.default


def test_unknown_names():
    with pytest.raises(ConfigError, match="did you mean strict"):
        config.get("strikt")
    with pytest.raises(AttributeError):
        config.strikt  # noqa: B018
    with pytest.raises(ConfigError):
        with config.override(strikt=True):
            pass


def test_unknown_variables_give_one_warning_with_close_matches():
    env = {
        "IPEX_STRIKT": "1",
        "IPEX_FOO_BAR_BAZ": "1",
        "IPEX_COMPUTE_ENG": "0",
        "IPEX_VERSION": "2",
        "IPEX_INSTALL_PREFIX": "/opt/ipex",
    }
    with pytest.warns(RuntimeWarning) as seen:
        config.reload(env)
    assert len(seen) == 1
    text = str(seen[0].message)
    assert "IPEX_STRIKT (did you mean IPEX_STRICT?)" in text
    assert "IPEX_FOO_BAR_BAZ" in text
    assert "IPEX_COMPUTE_ENG (a variable of Intel Extension for PyTorch" in text
    assert "has no effect here: use ipex.xpu.set_compute_eng, or IPEX_XPU_ONEDNN)" in text
    assert "IPEX_VERSION" not in text and "IPEX_INSTALL_PREFIX" not in text


def test_tolerant_mode_keeps_the_error_until_the_value_is_read():
    config.reload({"IPEX_STRICT": "maybe", "IPEX_VERBOSE": "1"}, tolerant=True)
    assert len(config.environment_errors()) == 1
    assert config.verbosity == 1
    with pytest.raises(ConfigError, match="IPEX_STRICT=maybe"):
        config.get("strict")


def test_isa_request_precedence():
    assert config.isa_request() == config.IsaRequest("auto", "", "")
    config.reload({"ATEN_CPU_CAPABILITY": "avx512_vnni"})
    assert config.isa_request() == config.IsaRequest("cap", "avx512_vnni", "ATEN_CPU_CAPABILITY")
    config.reload({"ATEN_CPU_CAPABILITY": "avx2", "IPEX_CPU_ISA": "amx"})
    assert config.isa_request() == config.IsaRequest("force", "amx", "IPEX_CPU_ISA")


def test_an_unknown_value_of_pytorchs_variable_is_ignored_with_a_warning():
    with pytest.warns(RuntimeWarning, match="ATEN_CPU_CAPABILITY=sve256.*ignored"):
        config.reload({"ATEN_CPU_CAPABILITY": "sve256"})
    assert config.isa_request().kind == "auto"


def test_a_level_of_a_newer_kernel_package_is_accepted(tmp_path, monkeypatch):
    package = tmp_path / "ipex_cpu_kernels"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lib" / "libipex_cpu_avx10.so").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "ipex_cpu_kernels", raising=False)
    config.reload({"IPEX_CPU_ISA": "avx10"})
    assert config.cpu_isa == "avx10"


def test_override_restores_exactly_and_nests():
    before = config.settings()
    with config.override(strict=True, huge_pages="off"):
        assert config.strict is True
        assert config.huge_pages is False
        with config.override(strict=False):
            assert config.strict is False
        assert config.strict is True
    assert config.settings() == before
    with pytest.raises(RuntimeError, match="inside"):
        with config.override(strict=True):
            raise RuntimeError("inside")
    assert config.settings() == before


def test_override_changes_nothing_when_one_value_is_bad():
    with pytest.raises(ConfigError):
        with config.override(strict=True, num_threads=-1):
            pass
    assert config.strict is False


def test_set_value_is_shown_with_its_source():
    config.set_value("IPEX_HUGE_PAGES", False)
    state = next(s for s in config.settings() if s.variable.attribute == "huge_pages")
    assert (state.value, state.source) == (False, "set")


# --- effects on PyTorch -----------------------------------------------------------------------------------------------


def _torch_precision() -> tuple[str, ...]:
    mkldnn = torch.backends.mkldnn
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.fp32_precision,
        torch.backends.cuda.matmul.fp32_precision,
        mkldnn.matmul.fp32_precision,
        mkldnn.conv.fp32_precision,
        mkldnn.rnn.fp32_precision,
    )


def test_math_mode_acts_on_torch_and_is_restored_exactly():
    before = _torch_precision()
    assert config.get_fp32_math_mode() is config.FP32MathMode.FP32
    config.set_fp32_math_mode(config.FP32MathMode.BF32)
    assert _torch_precision() == ("medium", before[1], before[2], "bf16", "bf16", "bf16")
    assert config.get_fp32_math_mode() is config.FP32MathMode.BF32
    config.set_fp32_math_mode("BF32")
    config.set_fp32_math_mode()
    assert _torch_precision() == before
    # Values that were inherited are inherited again.
    torch.backends.fp32_precision = "ieee"
    try:
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
        with config.override(fp32_math_mode="BF32"):
            pass
    finally:
        torch.backends.fp32_precision = "none"
    assert _torch_precision() == before


def test_math_mode_fp32_is_a_demand():
    before = _torch_precision()
    torch.backends.mkldnn.conv.fp32_precision = "bf16"
    try:
        config.set_fp32_math_mode(0)
        assert torch.backends.mkldnn.conv.fp32_precision == "ieee"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = "none"
        for op in ("matmul", "conv", "rnn"):
            getattr(torch.backends.mkldnn, op).fp32_precision = "none"
    assert _torch_precision() == before


def test_math_mode_tf32_warns_and_changes_nothing_on_cpu():
    before = _torch_precision()
    with pytest.warns(UserWarning, match="TF32 is not available on the CPU"):
        config.set_fp32_math_mode(config.FP32MathMode.TF32)
    assert _torch_precision() == before


def test_math_mode_bad_input():
    for mode in (7, "bf32", True, 1.0, None):
        with pytest.raises(ConfigError, match="FP32, TF32, BF32"):
            config.set_fp32_math_mode(mode)
    with pytest.raises(ConfigError, match="device must be"):
        config.set_fp32_math_mode(0, device="cuda")
    with pytest.raises(MissingComponentError, match=r"ipex\[xpu\]"):
        config.get_fp32_math_mode("xpu")


def test_math_mode_of_the_device_is_its_packages(monkeypatch):
    asked = []
    package = types.SimpleNamespace(
        set_fp32_math_mode=asked.append, get_fp32_math_mode=lambda: asked[-1]
    )
    monkeypatch.setattr(providers, "load_component", lambda name: {"xpu": package}[name])
    before = _torch_precision()
    config.set_fp32_math_mode("TF32", device="xpu")
    assert asked == [config.FP32MathMode.TF32]
    assert config.get_fp32_math_mode("xpu") is config.FP32MathMode.TF32
    assert config.get_fp32_math_mode() is config.FP32MathMode.FP32
    assert _torch_precision() == before


def test_num_threads_is_a_limit():
    threads = torch.get_num_threads()
    with config.override(num_threads=1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == threads
    with config.override(num_threads=threads + 7):
        assert torch.get_num_threads() == threads


def test_verbosity_acts_on_our_logger_only():
    root, ours = logging.getLogger(), logging.getLogger("ipex")
    before = (root.level, list(root.handlers), ours.level, list(ours.handlers))
    with config.override(verbosity=1):
        assert ours.level == logging.INFO
        with config.override(verbosity=2):
            assert ours.level == logging.DEBUG
    assert (root.level, list(root.handlers), ours.level, list(ours.handlers)) == before


def test_logging_level():
    ours = logging.getLogger("ipex")
    level = ours.level
    try:
        config.set_logging_level("DEBUG")
        assert ours.level == logging.DEBUG
        config.set_logging_level()
        assert ours.level == logging.WARNING
        with pytest.raises(ConfigError, match="LOUD"):
            config.set_logging_level("LOUD")
    finally:
        ours.setLevel(level)


def test_verbose_prints_onednn_lines_and_nests():
    code = (
        "import torch; from ipex_core import config as c; from torch.nn import functional as F\n"
        "run = lambda: F.conv2d(torch.ones(4, 16, 64, 64), torch.ones(16, 16, 3, 3))\n"
        "with c.verbose(c.VERBOSE_ON):\n"
        "    with c.verbose(c.VERBOSE_ON_CREATION): pass\n"
        "    with c.verbose(c.VERBOSE_OFF): run()\n"
        "run()\n"
    )
    lines = [x for x in _python(code).stdout.splitlines() if "exec" in x and ",convolution," in x]
    assert len(lines) == 1  # of the two runs only the one inside
    with pytest.raises(ConfigError, match="0, 1 or 2"):
        config.verbose(3)


# --- the check at import ----------------------------------------------------------------------------------------------


def _python(code: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("IPEX_", "ATEN_"))}
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env={**clean, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_import_fails_on_a_bad_value():
    done = _python("import ipex_core", IPEX_FP32_MATH_MODE="fp16")
    assert done.returncode == 1
    assert (
        "IPEX_FP32_MATH_MODE=fp16 is not allowed; allowed values: FP32, TF32, BF32" in done.stderr
    )


def test_import_applies_the_environment_and_children_are_not_tolerant():
    code = (
        "import subprocess, sys, torch; from ipex_core import config\n"
        "print(torch.get_num_threads(), config.get_fp32_math_mode().name, len(config.environment_errors()))\n"
        "print(subprocess.run([sys.executable, '-c', 'import ipex_core'], stderr=subprocess.DEVNULL).returncode)\n"
    )
    done = _python(
        code,
        "-X",
        "ipex-tolerant",
        IPEX_NUM_THREADS="1",
        IPEX_FP32_MATH_MODE="BF32",
        IPEX_STRICT="?",
    )
    assert done.stdout.split() == ["1", "BF32", "1", "1"], done.stderr


def test_reading_a_clean_environment_warns_about_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.reload({"PATH": "/bin", "OMP_NUM_THREADS": "4"})

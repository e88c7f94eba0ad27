# SPDX-License-Identifier: Apache-2.0
"""IPEX's paths to the names of this package. The facade may not be installed."""

from __future__ import annotations

import importlib

import pytest

import ipex_quant
from ipex_core.errors import MissingComponentError
from ipex_core.kernels import providers


@pytest.fixture
def _installed() -> None:
    if "quantization" not in {c.name for c in providers.components() if c.state == "active"}:
        pytest.skip("ipex-quant is not installed as a component")


@pytest.mark.usefixtures("_installed")
def test_nn_modules() -> None:
    from ipex_core.nn import modules

    assert modules.WeightOnlyQuantizedLinear is ipex_quant.WeightOnlyQuantizedLinear
    assert {"WeightOnlyQuantizedLinear", "WoqWeightFormat"} <= set(dir(modules))
    assert not hasattr(modules, "Linear")


def test_nn_modules_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from ipex_core.nn import modules

    def missing(name: str) -> None:
        raise MissingComponentError(f"ipex.{name} needs the package ipex-quant")

    monkeypatch.setattr(providers, "load_component", missing)
    with pytest.raises(MissingComponentError, match="needs the package ipex-quant"):
        _ = modules.WeightOnlyQuantizedLinear


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("top", ["ipex", "intel_extension_for_pytorch"])
def test_facade(top: str) -> None:
    facade = pytest.importorskip(top)
    assert facade.quantization is ipex_quant
    assert importlib.import_module(f"{top}.quantization") is ipex_quant
    assert facade.quantization.WoqLowpMode.BF16 == 2
    module = importlib.import_module(f"{top}.nn.modules")
    assert module.WeightOnlyQuantizedLinear is ipex_quant.WeightOnlyQuantizedLinear

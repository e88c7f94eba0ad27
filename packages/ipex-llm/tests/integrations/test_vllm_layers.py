# SPDX-License-Identifier: Apache-2.0
"""Norms and activations of ipex in vLLM, through its registries."""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import types

import pytest
import torch
from torch import Tensor, nn
from torch.library import infer_schema

from ipex_llm.integrations import vllm as plugin
from ipex_llm.integrations.vllm import layers


class FakeIrOp:
    """An op of ``vllm.ir.ops``: what it checks when an implementation is registered."""

    def __init__(self, native):
        self.native = native
        self.impls = {"native": native}

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def decorator(function):
            assert provider not in self.impls
            wanted, got = (infer_schema(f, mutates_args=[]) for f in (self.native, function))
            if got != wanted:
                raise ValueError(f"schema {got}")
            wanted, got = (
                [(p.name, p.default) for p in inspect.signature(f).parameters.values()]
                for f in (self.native, supports_args)
            )
            assert got == wanted
            self.impls[provider] = function
            self.takes = supports_args
            return function

        return decorator


def ir_rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    y = nn.functional.rms_norm(x, x.shape[-1:], None, epsilon)
    return y if weight is None else y * weight


def ir_fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    return ir_rms_norm(x + x_residual, weight, epsilon), x + x_residual


def ir_of_another_signature(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return ir_rms_norm(x, weight, epsilon)


def fake_vllm(monkeypatch, *, cpu=True, table_in_module=False, custom_ops=("all",), ir=None):
    """Put modules with the contract of vLLM's registries of ops in the place of vLLM."""
    table: dict[str, type] = {}

    class CustomOp(nn.Module):
        def __new__(cls, *args, **kwargs):
            return super().__new__(table.get(cls.__name__, cls))

        def __init__(self):
            super().__init__()
            on = "all" in custom_ops or f"+{self.name}" in custom_ops
            self._forward_method = self.forward_cpu if on else self.forward_native

        def forward(self, *args, **kwargs):
            return self._forward_method(*args, **kwargs)

        def forward_cpu(self, *args, **kwargs):
            return self.forward_native(*args, **kwargs)

        @classmethod
        def register_oot(cls, _decorated_op_cls=None, name=None):
            def decorator(op_cls):
                assert name not in table, f"Duplicate op name: {name}"
                op_cls.name = name
                table[name] = op_cls
                return op_cls

            return decorator if _decorated_op_cls is None else decorator(_decorated_op_cls)

    class RMSNorm(CustomOp):
        name = "rms_norm"
        offset = 0.0

        def __init__(self, hidden_size, eps=1e-6, var_hidden_size=None):
            super().__init__()
            self.variance_epsilon = eps
            self.variance_size_override = var_hidden_size
            self.weight = nn.Parameter(torch.rand(hidden_size))

        def forward_native(self, x, residual=None):
            x = x if residual is None else x + residual
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            y = x * scale * (self.weight + self.offset)
            return y if residual is None else (y, x)

    class GemmaRMSNorm(RMSNorm):
        name = "gemma_rms_norm"
        offset = 1.0

    class SiluAndMul(CustomOp):
        name = "silu_and_mul"

        def forward_native(self, x):
            gate, up = x.chunk(2, -1)
            return nn.functional.silu(gate) * up

    class GeluAndMul(CustomOp):
        name = "gelu_and_mul"

        def __init__(self, approximate="none"):
            super().__init__()
            self.approximate = approximate

        def forward_native(self, x):
            gate, up = x.chunk(2, -1)
            return nn.functional.gelu(gate, approximate=self.approximate) * up

    class QuickGELU(CustomOp):
        name = "quick_gelu"

        def forward_native(self, x):
            return x * torch.sigmoid(1.702 * x)

    contents = {
        "vllm": {},
        **({} if ir is None else {"vllm.ir": {"ops": ir}}),
        "vllm.platforms": {"current_platform": types.SimpleNamespace(is_cpu=lambda: cpu)},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.layernorm": {"RMSNorm": RMSNorm, "GemmaRMSNorm": GemmaRMSNorm},
        "vllm.model_executor.layers.activation": {
            "SiluAndMul": SiluAndMul,
            "GeluAndMul": GeluAndMul,
            "QuickGELU": QuickGELU,
        },
    }
    if table_in_module:
        contents["vllm.model_executor.custom_op"]["op_registry_oot"] = table
    else:
        CustomOp.op_registry_oot = table
    for name, values in contents.items():
        module = types.ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ops = {**contents["vllm.model_executor.layers.layernorm"]}
    ops |= contents["vllm.model_executor.layers.activation"]
    return ops, table


@pytest.mark.parametrize("in_module", [False, True])
def test_vllm_runs_our_ops_where_its_registry_accepts_them(in_module, monkeypatch):
    ops, table = fake_vllm(monkeypatch, table_in_module=in_module)
    monkeypatch.setenv("VLLM_PLUGINS", "other, ipex")
    assert plugin.register() == plugin.register() == tuple(layers.OPS)
    assert set(table) == set(layers.OPS)
    x, more = torch.randn(5, 32), torch.randn(5, 32)
    for name, arguments in (
        ("RMSNorm", (32,)),
        ("GemmaRMSNorm", (32,)),
        ("SiluAndMul", ()),
        ("GeluAndMul", ("tanh",)),
        ("QuickGELU", ()),
    ):
        layer = ops[name](*arguments)
        assert type(layer) is table[name] and isinstance(layer, ops[name])
        inputs = [(x,), (x, more)] if "Norm" in name else [(x,)]
        for one in inputs:
            torch.testing.assert_close(
                layer(*one), layer.forward_native(*one), rtol=1e-5, atol=1e-5
            )
    # What the op does not compute stays vLLM's.
    norm = ops["RMSNorm"](32, var_hidden_size=16)
    torch.testing.assert_close(norm(x), norm.forward_native(x), rtol=0, atol=0)


def test_vllm_switches_our_ops_by_its_own_names(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    ops, _ = fake_vllm(monkeypatch, custom_ops=("none", "+rms_norm"))
    plugin.register()
    norm, activation = ops["RMSNorm"](32), ops["SiluAndMul"]()
    assert norm._forward_method.__func__ is layers._rms_norm
    assert activation._forward_method == activation.forward_native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_vllm_gets_implementations_of_its_ir_ops(dtype, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    norm, added = FakeIrOp(ir_rms_norm), FakeIrOp(ir_fused_add_rms_norm)
    names = types.SimpleNamespace(rms_norm=norm, fused_add_rms_norm=added, other=None)
    fake_vllm(monkeypatch, ir=names)
    plugin.register()
    plugin.register()
    x, more, weight = torch.randn(5, 32), torch.randn(5, 32), torch.rand(32)
    x, more, weight = x.to(dtype), more.to(dtype), weight.to(dtype)
    for op, arguments in ((norm, (x, weight)), (norm, (x[None], None)), (added, (x, more, weight))):
        assert op.takes(*arguments, 1e-6)
        got, wanted = op.impls["ipex"](*arguments, 1e-6), op.native(*arguments, 1e-6)
        near = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(got, wanted, rtol=near, atol=near)
    assert not norm.takes(x, weight.double(), 1e-6) and not norm.takes(x, weight, 1e-6, 16)
    assert not added.takes(x, more.double(), weight, 1e-6)


def test_vllm_with_another_signature_is_left_alone(monkeypatch, caplog):
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    op = FakeIrOp(ir_of_another_signature)
    fake_vllm(monkeypatch, ir=types.SimpleNamespace(rms_norm=op))
    with caplog.at_level(logging.INFO, "ipex"):
        assert plugin.register() == tuple(layers.OPS)
    assert list(op.impls) == ["native"] and "vllm.ir.ops.rms_norm stays as it is" in caplog.text


def test_vllm_is_left_alone_unless_asked(monkeypatch, caplog):
    _, table = fake_vllm(monkeypatch)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert plugin.register() == () and not table
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    _, table = fake_vllm(monkeypatch, cpu=False)
    assert plugin.register() == () and not table
    ops, table = fake_vllm(monkeypatch)
    table["SiluAndMul"] = ops["SiluAndMul"]  # of another plug-in
    assert "SiluAndMul" not in plugin.register()
    assert table["SiluAndMul"] is ops["SiluAndMul"]


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_real_vllm_accepts_our_ops(monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "ipex")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("this vllm is not for the CPU")
    assert set(plugin.register()) >= {"RMSNorm", "SiluAndMul"}
    from vllm.model_executor.layers.layernorm import RMSNorm

    assert RMSNorm.name == "rms_norm"
    if importlib.util.find_spec("vllm.ir") is not None:
        from vllm import ir

        assert "ipex" in ir.ops.rms_norm.impls and "ipex" in ir.ops.fused_add_rms_norm.impls

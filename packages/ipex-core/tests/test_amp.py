# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: the rule of each op, the helpers, training with a scaler, CPUs without the instructions."""

import logging
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from ipex_core import amp, explain, optimize
from ipex_core.kernels import machine, providers
from ipex_core.kernels.policy import has_kernel
from ipex_core.library.kernels import specs

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
REDUCED = (torch.bfloat16, torch.float16)
WITH_RULE = [name for name, spec in specs().items() if spec.autocast is not None]
WITHOUT_RULE = [name for name, spec in specs().items() if spec.autocast is None and spec.lift]


def inputs(spec, dtype):
    """Return the arguments of the first call in a dtype that has one."""
    return next(iter(spec.samples(dtype)))


def floats(value):
    return isinstance(value, torch.Tensor) and value.dtype in FLOATS


def cast(values, dtype):
    return tuple(cast_one(v, dtype) for v in values)


def cast_one(value, dtype):
    if isinstance(value, list):
        return [cast_one(v, dtype) for v in value]
    return value.to(dtype) if floats(value) else value


def outputs(result):
    return result if isinstance(result, tuple) else (result,)


def expected(spec, args, kwargs, region):
    """What the rule of an op promises, by casts that are written out."""
    rule = spec.autocast
    if rule == "lower_precision_unless_packed":
        packed = any(isinstance(v, torch.Tensor) and v.dtype == torch.uint8 for v in args)
        rule = None if packed else "lower_precision"
    if rule == "lower_precision":
        args, kwargs = (
            cast(args, region),
            dict(zip(kwargs, cast(kwargs.values(), region), strict=True)),
        )
    elif rule == "widest_type" and len({v.dtype for v in args[:2]}) > 1:
        args = cast(args, torch.float32)
    return outputs(spec.op(*args, **kwargs))


def same(got, wanted):
    for a, b in zip(outputs(got), wanted, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_rules():
    rules = {name: specs()[name].autocast for name in WITH_RULE}
    assert rules == {
        "attention": "lower_precision",
        "interaction": "lower_precision",
        "woq_linear": "lower_precision",
        "causal_conv1d_fn": "lower_precision",
        "int8_matmul": "lower_precision",
        "bmm": "lower_precision_unless_packed",
        "silu_mul": "widest_type",
        "gelu_mul": "widest_type",
        "add_layer_norm": "widest_type",
        "add_rms_norm": "widest_type",
    }


@pytest.mark.parametrize("region", REDUCED, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", WITH_RULE)
def test_rule_of_an_op(name, dtype, region):
    spec = specs()[name]
    sample = inputs(spec, dtype)
    args, kwargs = sample.args, sample.kwargs
    wanted = expected(spec, args, kwargs, region)
    for cache in (True, False):
        with torch.autocast("cpu", dtype=region, cache_enabled=cache):
            same(spec.op(*args, **kwargs), wanted)
            same(spec.op(*args, **kwargs), wanted)  # from the cache, were there one
            with torch.autocast("cpu", enabled=False):
                same(spec.op(*args, **kwargs), outputs_off(spec, args, kwargs))
            other = REDUCED[1 - REDUCED.index(region)]
            with torch.autocast("cpu", dtype=other, cache_enabled=cache):
                same(spec.op(*args, **kwargs), expected(spec, args, kwargs, other))
            same(spec.op(*args, **kwargs), wanted)


def outputs_off(spec, args, kwargs):
    with torch.autocast("cpu", enabled=False):
        return outputs(spec.op(*args, **kwargs))


@pytest.mark.parametrize("name", [n for n in WITH_RULE if specs()[n].autocast == "widest_type"])
def test_widest_type_of_two(name):
    spec = specs()[name]
    args = inputs(spec, torch.bfloat16).args
    mixed = (args[0].float(), *args[1:])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = spec.op(*mixed)
    same(result, outputs(spec.op(*cast(mixed, torch.float32))))
    assert outputs(result)[0].dtype == torch.float32


def test_packed_factors_keep_their_dtype():
    spec = specs()["bmm"]
    sample = next(s for s in spec.samples(torch.float32) if s.id.endswith("-packed"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert spec.op(*sample.args).dtype == torch.float32


@pytest.mark.parametrize("name", WITHOUT_RULE)
def test_no_rule(name):
    """Inside a region nothing about such an op is different."""
    spec = specs()[name]
    sample = next(iter(spec.samples(torch.float32)), None)
    if sample is None:
        pytest.skip("takes no float32")

    def clones():
        return [v.clone() if isinstance(v, torch.Tensor) else v for v in sample.args]

    wanted = spec.op(*clones(), **sample.kwargs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = spec.op(*clones(), **sample.kwargs)
    if wanted is None:
        assert got is None
    else:
        same(got, outputs(wanted))


@pytest.mark.parametrize("name", WITH_RULE)
def test_under_trace_and_compile(name):
    spec = specs()[name]
    sample = inputs(spec, torch.float32)
    values = (v for arg in sample.args for v in (arg if isinstance(arg, list) else [arg]))
    tensors = tuple(v for v in values if isinstance(v, torch.Tensor))
    if name in ("silu_mul", "gelu_mul", "add_layer_norm", "add_rms_norm"):
        tensors = (tensors[0].bfloat16(), *tensors[1:])

    def call(*given):
        left = iter(given)

        def fill(value):
            if isinstance(value, list):
                return [fill(v) for v in value]
            return next(left) if isinstance(value, torch.Tensor) else value

        args = [fill(v) for v in sample.args]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return spec.op(*args, **sample.kwargs)

    with torch.no_grad():
        wanted = outputs(call(*tensors))
        traced = torch.jit.trace(call, tensors, check_trace=False)
        assert f"ipex::{name}" in str(traced.graph)
        same(traced(*tensors), wanted)  # outside a region: the casts are in the program
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same(traced(*tensors), wanted)
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        same(compiled(*tensors), wanted)


@pytest.mark.parametrize("dtype", REDUCED, ids=str)
def test_autocast_helper(dtype):
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    with amp.autocast(dtype=dtype):
        assert layer(x).dtype == dtype
        with amp.autocast(enabled=False):
            assert layer(x).dtype == torch.float32
    assert amp.autocast(cache_enabled=False)._cache_enabled is False

    @amp.autocast(dtype=dtype)
    def decorated(x):
        return layer(x)

    assert decorated(x).dtype == dtype


class Encoder(nn.Module):
    """Layers that optimize exchanges, with gradients through packed weights."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(512, 512), nn.Linear(512, 512)
        self.norm = nn.LayerNorm(512)

    def forward(self, x):
        return self.norm(x + self.down(nn.functional.gelu(self.up(x))))


def test_gradients_of_optimized_layers_in_float16():
    torch.manual_seed(0)
    plain = Encoder().eval()
    fast = optimize(plain)
    scaler = amp.GradScaler(init_scale=128.0)
    x = torch.randn(4, 512)
    grads = []
    for model in (plain, fast):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        grads.append([p.grad / 128 for p in model.parameters()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-2, atol=2e-3)


class Raw(nn.Module):
    """Our ops themselves in a model that is trained."""

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.out = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x):
        y = torch.ops.ipex.silu_mul(self.gate(x), self.up(x))
        y, _ = torch.ops.ipex.add_rms_norm(self.out(y), x, self.scale)
        return y


def train(model, scaler, steps, poison=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, target = torch.randn(32, 16), torch.randn(32, 16)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.mse_loss(model(x), target)
        scaled = scaler.scale(loss)
        (scaled * (float("inf") if step == poison else 1.0)).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        unchanged = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert unchanged == (step == poison)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("make", [amp.GradScaler, lambda **k: torch.amp.GradScaler("cpu", **k)])
def test_float16_training_with_a_scaler(make):
    torch.manual_seed(0)
    scaler = make(init_scale=1024.0, growth_interval=4)
    losses = train(Raw(), scaler, 10, poison=5)
    assert losses[-1] < 0.9 * losses[0]
    # Grown after step 4, halved at the poisoned one, grown again four steps later.
    assert scaler.get_scale() == 1024.0 * 2 * 0.5 * 2
    again = make(init_scale=1.0)
    again.load_state_dict(scaler.state_dict())
    assert again.get_scale() == scaler.get_scale()


def test_scaler_arguments():
    assert not amp.GradScaler(enabled=False).is_enabled()
    with pytest.raises(AssertionError):
        amp.GradScaler(growth_factor=1.0)


@pytest.fixture
def fresh_warning(monkeypatch):
    monkeypatch.setattr(amp, "_warned", set())


def provider(monkeypatch, level):
    class Fake:
        ops = ()

        def level(self):
            return level

    monkeypatch.setattr(providers, "provider_for", lambda device: Fake() if level else None)


def cpu(monkeypatch, *features):
    class Info:
        pass

    Info.features = features
    monkeypatch.setattr(machine, "cpu_info", lambda *args: Info)


def test_native(monkeypatch):
    cpu(monkeypatch, "avx2", "avx512_bf16", "amx_bf16", "avx512_fp16")
    for level, name, native in (
        ("avx512_bf16", "bfloat16", True),
        ("amx", "bfloat16", True),
        ("avx2", "bfloat16", False),
        ("amx", "float16", False),
        ("avx512_fp16", "float16", True),
        (None, "bfloat16", True),
    ):
        provider(monkeypatch, level)
        reason = amp.native_reason(getattr(torch, name))
        assert (reason is None) is native
        assert native or f"level {level}, which has no {name} instructions" in reason
    cpu(monkeypatch, "avx2", "fma")
    assert "this CPU has no bfloat16 instructions" in amp.native_reason(torch.bfloat16)
    assert amp.native_reason(torch.float32) is None


def test_optimize_warns_once(monkeypatch, caplog, fresh_warning):
    cpu(monkeypatch, "avx2", "fma")
    caplog.set_level(logging.WARNING, logger="ipex")
    model = nn.Linear(8, 8).eval()
    optimize(model)
    assert not caplog.records
    for _ in range(2):
        fast = optimize(model, dtype=torch.bfloat16)
        assert any("no bfloat16 instructions" in note for note in explain(fast).notes)
    assert [r.getMessage()[:32] for r in caplog.records] == [
        "optimize(dtype=torch.bfloat16): "[:32]
    ]
    optimize(model, dtype=torch.float16)
    assert len(caplog.records) == 2


def test_a_level_without_the_instructions_warns_once():
    """In a process of its own, with kernels if there are any: the doctor, the warning, and right results."""
    code = (
        "import logging, torch\n"
        "from ipex_core import optimize, explain, doctor, amp\nfrom ipex_core.kernels import providers\n"
        "logging.basicConfig(format='LOG %(message)s')\n"
        "model, x = torch.nn.Linear(512, 512).eval(), torch.randn(2, 512)\n"
        "provider = providers.provider_for('cpu')\n"
        "told = amp.native_reason(torch.bfloat16) is not None\n"
        "assert told or provider is None or provider.level() != 'default'\n"
        "for _ in range(2):\n"
        "    fast = optimize(model, dtype=torch.bfloat16)\n"
        "with torch.no_grad():\n"
        "    torch.testing.assert_close(fast(x).float(), model(x), rtol=5e-2, atol=5e-2)\n"
        "    with torch.autocast('cpu', dtype=torch.bfloat16):\n"
        "        assert model(x).dtype == torch.bfloat16\n"
        "assert ('no bfloat16 instructions' in str(doctor())) is told\n"
        "print('TOLD', told)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "IPEX_CPU_ISA": "default"} if has_kernel("linear") else None,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    warnings = [line for line in result.stderr.splitlines() if "no bfloat16 instructions" in line]
    assert len(warnings) == ("TOLD True" in result.stdout)

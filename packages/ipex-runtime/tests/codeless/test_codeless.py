# SPDX-License-Identifier: Apache-2.0
"""Codeless optimization: scripts run as the interpreter runs them, and their models become faster ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 180

#: Tells how the script was run.
SELF = """
import sys
import neighbor
print(sys.argv, __name__, __file__, sys.path[0], sys.modules["__main__"].__dict__ is globals())
print(neighbor.NAME, "torch" in sys.modules, __package__, __doc__, getattr(__spec__, "name", None))
"""

NET = """
import torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 8))
x = torch.randn(4, 64)
"""


def run(*arguments: str, cwd: Path, codeless: bool = True) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-m", "ipex_runtime.codeless"] if codeless else []), *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def both(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run both ways; everything but errors must be equal. Returns the codeless run."""
    plain = run(*arguments, cwd=folder, codeless=False)
    found = run(*arguments, cwd=folder)
    assert (found.stdout, found.returncode) == (plain.stdout, plain.returncode), found.stderr
    return found


def script(folder: Path, text: str, name: str = "script.py") -> str:
    (folder / name).write_text(text)
    return name


def test_a_script_sees_what_it_sees_without(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "neighbor.py").write_text("NAME = 'next door'")
    script(tmp_path / "sub", SELF)
    found = both(tmp_path, "sub/script.py", "-a", "--dtype", "b c")
    assert "next door False" in found.stdout and found.stderr == ""
    # No temporary copy beside it.
    assert sorted(p.name for p in (tmp_path / "sub").glob("*.py")) == ["neighbor.py", "script.py"]


def test_a_module_of_a_package(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    script(package, "", "__init__.py")
    script(package, "NAME = 'next door'", "neighbor.py")
    script(package, SELF.replace("import neighbor", "from . import neighbor"), "tool.py")
    script(package, "from .tool import *", "__main__.py")
    plain = run("-m", "package.tool", "-a", cwd=tmp_path, codeless=False).stdout
    found = run("-m", "package.tool", "-a", cwd=tmp_path)
    assert found.stdout == plain
    assert run("-m", "package", cwd=tmp_path).returncode == 0


@pytest.mark.parametrize(
    "end",
    [
        "sys.exit(3)",
        "sys.exit('bye')",
        "1 / 0",
        "raise KeyError('x')",
        "import nowhere",
        "os._exit(9)",
        "def f(:",
    ],
)
def test_ends_are_those_of_the_script(end, tmp_path):
    name = script(
        tmp_path, f"import os, sys\nimport atexit\natexit.register(print, 'at exit')\n{end}\n"
    )
    plain = run(name, cwd=tmp_path, codeless=False)
    found = run(name, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (plain.returncode, plain.stdout)
    assert found.stderr.replace(str(tmp_path) + "/", "") == plain.stderr.replace(
        str(tmp_path) + "/", ""
    )


def test_a_script_that_is_not_there(tmp_path):
    found = run("nowhere.py", cwd=tmp_path)
    assert found.returncode == 2 and "can't open file 'nowhere.py'" in found.stderr


def test_objects_of_main_reach_other_processes(tmp_path):
    text = """
import multiprocessing, pickle

class Thing:
    def __init__(self, n):
        self.n = n

def work(thing):
    return Thing(thing.n + 1)

if __name__ == "__main__":
    print(pickle.loads(pickle.dumps(Thing(3))).n)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply_async(work, (Thing(1),)).get(60).n)
"""
    both(tmp_path, script(tmp_path, text))


# -- with models -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _ipex():
    pytest.importorskip("ipex")
    pytest.importorskip("ipex_quant")


@pytest.fixture
def hook():
    """Wraps calls in this process, and takes the wrapper away again."""
    from ipex_runtime.codeless import disable, enable
    from ipex_runtime.codeless._script import Settings

    pytest.importorskip("ipex")
    pytest.importorskip("ipex_quant")

    def start(**settings):
        enable(Settings(**({"graph_mode": False, "verbose": True} | settings)))

    yield start
    disable()


def net():
    import torch

    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)
    return torch.nn.Sequential(*layers).eval(), torch.randn(4, 64)


def optimized(model) -> bool:
    import ipex

    return bool(ipex.explain(model).optimized)


def test_the_first_call_optimizes_and_the_result_is_the_same(hook, capsys):
    import torch

    model, x = net()
    expected = model(x)
    hook()
    found = model(x)
    assert optimized(model) and not found.requires_grad
    torch.testing.assert_close(found, expected.detach(), atol=1e-5, rtol=1e-5)
    assert "Sequential optimized in" in capsys.readouterr().err
    model(x)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"dtype": "bfloat16"}, 0.05),
        ({"quantization": "int8-dynamic"}, 0.1),
        ({"quantization": "woq-int8"}, 0.1),
        ({"quantization": "woq-int4", "dtype": "bfloat16"}, 0.6),
        ({"graph_mode": True}, 1e-4),
    ],
)
def test_ways_to_optimize(settings, error, hook):
    import torch

    model, x = net()
    expected = model(x).detach()
    hook(**settings)
    for _ in range(2):
        found = model(x)
        assert found.dtype == torch.float32 and not found.requires_grad
        assert 0 <= (found - expected).abs().max() < error
    if "graph_mode" not in settings:
        assert not torch.equal(found, expected)


def test_a_part_that_is_called_by_itself(hook):
    import torch

    model, x = net()
    hook(dtype="bfloat16")
    model(x)
    assert model[0](x).dtype == torch.float32


def test_modules_without_parameters_are_none_of_its_business(hook, capsys):
    import torch

    hook()
    torch.nn.CrossEntropyLoss()(torch.randn(2, 3), torch.tensor([0, 1]))
    assert capsys.readouterr().err == ""


def test_training_is_left_alone(hook, capsys):
    import torch

    hook()
    model, x = net()
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[0].weight.detach().clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert "in training mode and left alone" in capsys.readouterr().err
    model.eval()
    assert model(x).requires_grad and not optimized(model)
    assert "is trained (an optimizer has its parameters)" in capsys.readouterr().err


def test_training_after_inference_undoes_it(hook, capsys):
    import torch

    model, x = net()
    weight = model[0].weight.detach().clone()
    hook(dtype="bfloat16")
    model(x)
    model.train()
    y = model(x)
    assert y.requires_grad and not optimized(model) and model.training
    torch.testing.assert_close(model[0].weight, weight, atol=0, rtol=0)
    assert "trained now: its optimization was undone" in capsys.readouterr().err


def test_what_else_is_left_alone(hook, capsys):
    import torch

    model, x = net()
    traced = torch.jit.trace(model, x)
    hook()
    traced(x)
    assert "TorchScript" in capsys.readouterr().err
    model(x.requires_grad_()).sum().backward()
    assert x.grad is not None and "needs a gradient" in capsys.readouterr().err


def test_a_model_that_the_script_has_optimized(hook, capsys):
    import ipex

    model, x = net()
    model = ipex.optimize(model)
    hook()
    model(x)
    assert "is optimized by the script and is left alone" in capsys.readouterr().err


def test_language_models(hook):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.tensor([[1, 5, 9, 3]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = model.generate(ids, **options)
    hook(graph_mode=True)
    assert model.generate(ids, **options).equal(tokens) and optimized(model)
    low = transformers.LlamaForCausalLM(config).eval()
    hook(dtype="bfloat16")
    out = low(ids)
    assert type(out).__name__ == "CausalLMOutputWithPast" and out.logits.dtype == torch.float32
    assert low.generate(ids, **options).shape == tokens.shape


def test_tracing_sees_the_original(hook):
    import torch

    model, x = net()
    hook()
    torch.jit.trace(model, x)
    torch.fx.symbolic_trace(model)
    assert not optimized(model)
    model(x)
    assert optimized(model)


def test_threads_optimize_once(hook, capsys):
    import threading

    model, x = net()
    hook()
    threads = [threading.Thread(target=model, args=(x,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert capsys.readouterr().err.count("optimized in") == 1


def test_a_failure_leaves_the_model_as_it_was(hook, capsys, monkeypatch):
    import ipex

    def broken(*args, **kwargs):
        raise RuntimeError("no luck")

    model, x = net()
    expected = model(x)
    hook()
    monkeypatch.setattr(ipex, "optimize", broken, raising=False)
    assert (model(x) == expected).all()
    assert "cannot be optimized and is left alone: RuntimeError: no luck" in capsys.readouterr().err


def test_models_are_not_kept_alive(hook):
    import gc
    import weakref

    model, x = net()
    hook()
    model(x)
    dead = weakref.ref(model)
    del model
    gc.collect()
    assert dead() is None


def test_results_keep_their_kinds():
    import collections

    import torch

    from ipex_runtime.codeless._models import _cast

    low, full = torch.bfloat16, torch.float32
    pair = collections.namedtuple("pair", "a b")
    cache = torch.ones(1, dtype=low)
    value = collections.OrderedDict(a=torch.ones(1, dtype=low), past_key_values=(cache,))
    found = _cast(value, low, full)
    assert type(found) is collections.OrderedDict and found["a"].dtype == full
    assert found["past_key_values"][0] is cache
    found = _cast(pair(torch.ones(1, dtype=low), [torch.ones(1, dtype=torch.int64)]), low, full)
    assert type(found) is pair and found.a.dtype == full and found.b[0].dtype == torch.int64


def test_as_a_command(_ipex, tmp_path):
    text = NET + "net.eval()\ny = net(x)\nprint(y.dtype, y.requires_grad, tuple(y.shape))\n"
    options = ("--dtype", "bfloat16", "--disable-ipex-graph-mode", "--auto-ipex-verbose")
    found = run(*options, script(tmp_path, text), cwd=tmp_path)
    assert found.stdout == "torch.float32 False (4, 8)\n", found.stderr
    assert "auto-ipex: Sequential optimized in" in found.stderr


def test_every_option_is_in_the_documentation():
    from ipex_runtime.codeless.__main__ import make_parser

    page = Path(__file__).parents[4] / "docs" / "codeless.md"
    if not page.exists():
        pytest.skip("no documentation beside the package")
    text = page.read_text(encoding="utf-8")
    options = [n for a in make_parser()._actions for n in a.option_strings if "_" not in n]
    assert [n for n in options if n not in ("-h", "--help") and f"`{n}`" not in text] == []

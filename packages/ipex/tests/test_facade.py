# SPDX-License-Identifier: Apache-2.0
"""The names of the facade, the alias of the old import name, and the three ways a name can be unusable."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import ipex
from ipex_core import config
from ipex_core.errors import (
    BrokenComponentError,
    MissingComponentError,
    NotOfferedError,
    UnknownComponentError,
)
from ipex_core.kernels import providers


def _python(code: str, *options: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=cwd,
        check=False,
    )


def _check(code: str, *options: str, cwd: Path | None = None) -> str:
    done = _python(code, *options, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(ipex.__all__))
def test_every_public_name_resolves(name):
    assert getattr(ipex, name) is not None


def test_names_are_the_objects_of_core():
    assert ipex.set_fp32_math_mode is config.set_fp32_math_mode
    assert ipex.config is config
    assert callable(ipex.doctor)
    assert ipex.doctor.__module__ == "ipex_core.diagnostics.doctor"
    assert (ipex.VERBOSE_OFF, ipex.VERBOSE_ON, ipex.VERBOSE_ON_CREATION) == (0, 1, 2)
    assert (ipex.verbose.VERBOSE_OFF, ipex.verbose.VERBOSE_ON) == (0, 1)  # as IPEX's docs write it
    assert ipex.verbose.VERBOSE_ON_CREATION == ipex.VERBOSE_ON_CREATION
    assert [m.name for m in ipex.FP32MathMode] == ["FP32", "TF32", "BF32"]


def test_functions_win_over_modules_of_the_same_name():
    code = """
        import ipex_core.diagnostics.doctor
        import ipex
        assert ipex.doctor is ipex_core.doctor is ipex_core.diagnostics.doctor.doctor
    """
    _check(code)


def test_compiler_backend_names():
    assert ipex._get_compiler_backend() == "inductor"
    with pytest.raises(ValueError, match="bogus"):
        ipex._set_compiler_backend("bogus")


def test_version(capsys):
    version = importlib.metadata.version("ipex")
    assert ipex.__version__ == f"{version}+cpu"  # which clients of IPEX look for
    from intel_extension_for_pytorch import _version

    assert _version.__version__ == version
    with pytest.raises(NotOfferedError, match=r"use `torch\.version\.git_version`"):
        _version.__torch_gitrev__  # noqa: B018
    assert ipex.version() is None
    out = capsys.readouterr().out
    assert f"ipex {version}" in out
    assert "torch 2." in out


def test_modules_of_layers_have_the_paths_of_ipex():
    for name in ("merged_embeddingbag", "_roi_align"):
        old = importlib.import_module(f"intel_extension_for_pytorch.nn.modules.{name}")
        assert old is importlib.import_module(f"ipex_core.nn.modules.{name}")


def test_submodules_are_the_modules_of_core():
    import ipex.config
    import ipex.errors
    import ipex.nn
    from ipex.nn import __name__ as name

    assert ipex.config is config
    assert sys.modules["ipex.config"] is sys.modules["ipex_core.config"]
    assert config.__name__ == "ipex_core.config"
    assert config.__spec__.name == "ipex_core.config"
    assert ipex.errors.MissingComponentError is MissingComponentError
    assert name == "ipex_core.nn"


def test_walking_over_all_names_raises_nothing():
    found = dict(inspect.getmembers(ipex))
    assert "optimize" in found
    assert set(ipex.__all__) <= set(dir(ipex))


# --- three ways a name can be unusable --------------------------------------------------------------------------------


@pytest.fixture
def _entry_points(monkeypatch):
    """Replace the installed components by made-up ones."""

    def use(**entries: str) -> None:
        found = tuple(
            importlib.metadata.EntryPoint(name, value, providers.COMPONENT_GROUP)
            for name, value in entries.items()
        )
        real = providers._entry_points.__wrapped__
        monkeypatch.setattr(
            providers,
            "_entry_points",
            lambda group: found if group == providers.COMPONENT_GROUP else real(group),
        )

    def forget() -> None:
        below = tuple(
            f"{top}.{name}"
            for top in ("ipex", "intel_extension_for_pytorch")
            for name in (*names, "cpu.runtime")
        )
        for name in [n for n in sys.modules if n.startswith(below)]:
            del sys.modules[name]
        for name in names:
            vars(ipex).pop(name, None)
        vars(ipex.cpu).pop("runtime", None)

    names = ("llm", "madeup", "quantization", "runtime")
    forget()
    yield use
    forget()


def test_unknown_name():
    with pytest.raises(UnknownComponentError, match=r"no 'optimze'; did you mean optimize"):
        ipex.optimze  # noqa: B018
    with pytest.raises(UnknownComponentError, match="quantization"):
        ipex.quantizaton  # noqa: B018
    assert not hasattr(ipex, "bogus_name")
    assert not hasattr(ipex, "__wrapped__")
    assert not hasattr(ipex, "_private")
    with pytest.raises(ImportError):
        from ipex import bogus_name  # noqa: F401


def test_unknown_names_of_components_have_a_suggestion():
    pytest.importorskip("ipex_quant")
    done = _python("import ipex; ipex.quantization.get_smoothquant_qconfig_mapping")
    assert "Did you mean: 'get_smooth_quant_qconfig_mapping'?" in done.stderr


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [
        ("llm", "ipex-llm", "llm"),
        ("quantization", "ipex-quant", "quant"),
    ],
)
def test_known_but_not_installed(_entry_points, name, package, extra):
    _entry_points()
    text = rf"ipex\.{name} needs the package {package}: pip install 'ipex\[{extra}\]'"
    with pytest.raises(MissingComponentError, match=text):
        getattr(ipex, name)
    with pytest.raises(MissingComponentError, match=text):
        importlib.import_module(f"ipex.{name}")
    with pytest.raises(MissingComponentError, match=text):
        importlib.import_module(f"ipex.{name}.modules")
    with pytest.raises(MissingComponentError, match=text):
        importlib.import_module(f"intel_extension_for_pytorch.{name}")
    with pytest.raises(ImportError):
        exec(f"from ipex import {name}")
    assert name not in dir(ipex)


def test_cmake_prefix_path(monkeypatch):
    monkeypatch.delitem(vars(ipex), "cmake_prefix_path", raising=False)
    if any(entry.name == "cpu" for entry in providers._entry_points(providers.KERNEL_GROUP)):
        assert ipex.cmake_prefix_path.endswith("/share/cmake")
        monkeypatch.delitem(vars(ipex), "cmake_prefix_path")
    monkeypatch.setattr(providers, "_entry_points", lambda group: ())
    text = r"ipex.cmake_prefix_path needs the package ipex-cpu-kernels: pip install 'ipex\[cpu\]'"
    with pytest.raises(MissingComponentError, match=text):
        ipex.cmake_prefix_path  # noqa: B018


def test_runtime_is_found_below_cpu(_entry_points):
    _entry_points()
    with pytest.raises(MissingComponentError, match="ipex-runtime"):
        ipex.cpu.runtime  # noqa: B018
    with pytest.raises(MissingComponentError, match="ipex-runtime"):
        importlib.import_module("intel_extension_for_pytorch.cpu.runtime")


def test_installed_but_broken(_entry_points, tmp_path, monkeypatch):
    (tmp_path / "madeup_broken.py").write_text("raise OSError('libx.so is gone')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _entry_points(llm="madeup_broken")
    with pytest.raises(
        BrokenComponentError, match=r"installed but cannot be imported: libx\.so is gone"
    ) as e:
        ipex.llm  # noqa: B018
    assert isinstance(e.value.__cause__, OSError)
    with pytest.raises(BrokenComponentError):
        importlib.import_module("ipex.llm")


def test_an_entry_point_that_names_no_module(_entry_points):
    _entry_points(llm="ipex_core.diagnostics.doctor:doctor")
    with pytest.raises(BrokenComponentError, match="must name a module"):
        ipex.llm  # noqa: B018


def test_installed_component_is_the_module_itself(_entry_points, tmp_path, monkeypatch):
    package = tmp_path / "madeup_llm"
    package.mkdir()
    (package / "__init__.py").write_text("X = object()\n")
    (package / "modules.py").write_text("Y = object()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    _entry_points(llm="madeup_llm", madeup="madeup_llm")
    assert ipex.llm is importlib.import_module("madeup_llm")
    assert importlib.import_module("ipex.llm.modules") is importlib.import_module(
        "madeup_llm.modules"
    )
    assert importlib.import_module("ipex.madeup") is ipex.llm  # components of others, too
    assert "llm" in dir(ipex)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("ipex.llm.bogus")


# --- the old import name ----------------------------------------------------------------------------------------------


def test_old_name_has_everything_but_the_version():
    import intel_extension_for_pytorch as old

    for name in ("optimize", "llm", "xpu", "_C", "frontend", "version"):
        assert getattr(old, name) is getattr(ipex, name)
    assert dir(old) == dir(ipex) and set(old.__all__) == set(ipex.__all__)
    with pytest.raises(AttributeError, match="did you mean optimize"):
        old.optimze  # noqa: B018
    # Least versions that vLLM, neural-compressor and ITREX ask for, as text or parsed.
    assert old.__version__ >= "2.4.0" and old.__version__ >= "2.1.0+cpu"
    release = tuple(int(part) for part in old.__version__.removesuffix("+cpu").split("."))
    assert release >= (2, 6, 0) and old.__version__ != ipex.__version__

    def call(x):
        return old.nn.functional.interaction(x, x)

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert compiled(torch.ones(2, 8)).shape == (2, 9)


@pytest.mark.parametrize("name", ["nn", "cpu", "config", "_C", "_isa_help", "errors"])
def test_old_dotted_names_are_the_same_modules(name):
    old = importlib.import_module(f"intel_extension_for_pytorch.{name}")
    assert old is importlib.import_module(f"ipex.{name}")
    assert old is getattr(ipex, name)


def test_old_dotted_names_in_a_fresh_process():
    code = """
        import intel_extension_for_pytorch.cpu as cpu
        from intel_extension_for_pytorch.nn import __name__ as nn_name
        import intel_extension_for_pytorch as ipex
        from intel_extension_for_pytorch import optimize, FP32MathMode
        import importlib.util
        import ipex as new
        assert new.cpu is ipex.cpu is cpu and nn_name == "ipex_core.nn"
        assert new.optimize is ipex.optimize is optimize
        assert importlib.util.find_spec("intel_extension_for_pytorch") is not None
        assert importlib.util.find_spec("intel_extension_for_pytorch.bogus") is None
        assert importlib.util.find_spec("ipex.bogus") is None
        import ipex_core.config, pickle
        assert pickle.loads(pickle.dumps(FP32MathMode.BF32)) is FP32MathMode.BF32
    """
    _check(code)


def test_unknown_old_dotted_name():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("intel_extension_for_pytorch.bogus")


def test_every_module_of_core_nn_keeps_one_copy():
    code = """
        import sys, pkgutil, importlib
        import intel_extension_for_pytorch, ipex_core.nn
        for info in pkgutil.walk_packages(ipex_core.nn.__path__, "ipex_core.nn."):
            tail = info.name.removeprefix("ipex_core.")
            real = importlib.import_module(info.name)
            assert importlib.import_module("intel_extension_for_pytorch." + tail) is real
            assert importlib.import_module("ipex." + tail) is real
    """
    _check(code)


# --- what the import does not do --------------------------------------------------------------------------------------


def test_import_loads_core_and_nothing_optional():
    code = """
        import sys, torch
        before = set(sys.modules)
        import ipex
        new = sorted(set(sys.modules) - before)
        optional = ("rich", "typer", "click", "transformers", "matplotlib", "scipy", "pandas", "psutil", "sklearn")
        assert not [m for m in new if m.split(".")[0] in optional], new
        own = [m for m in new if m.split(".")[0].startswith("ipex")]
        assert "ipex_core" in own and "ipex_cpu_kernels" not in own, own
        late = {"ipex_cli.app", "ipex_core.diagnostics.doctor", "ipex_core.compile_backend", "ipex_core.nn"}
        assert not late & set(own), own
        assert torch.ops.ipex.rms_norm is not None
    """
    _check(code, "-W", "error")


def test_import_patches_nothing():
    code = """
        import logging, sys, warnings, builtins
        import torch, torch.fx, torch.jit

        def state():
            owners = [torch, torch.Tensor, torch.nn, torch.nn.functional, torch.nn.Module, torch.jit, torch.fx,
                      torch.fx.Tracer, torch.backends, torch.autocast, torch._C, torch.utils.data, torch.optim,
                      logging, builtins]
            found = {}
            for owner in owners:
                for key, value in vars(owner).items():
                    found[owner.__name__, key] = value
            return found

        def globals_():
            return (torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.get_default_dtype(),
                    torch.backends.mkldnn.matmul.fp32_precision, torch.backends.mkldnn.enabled,
                    logging.root.level, tuple(logging.root.handlers), logging.getLoggerClass(), sys.excepthook,
                    warnings.showwarning, tuple(warnings.filters), torch.is_grad_enabled())

        before, settings, modules = state(), globals_(), dict(sys.modules)
        import ipex, intel_extension_for_pytorch
        after = state()
        # The name of Intel's package brings what that changed; see `ipex.compat.torch_changes`.
        changed = [key for key in after if before.get(key) is not after[key]]
        assert sorted(changed) == [("Tensor", "numpy"), ("torch.jit", "trace")]
        assert not before.keys() - after.keys()
        assert globals_() == settings
        assert [m for m in modules if sys.modules.get(m) is not modules[m]] == []
    """
    _check(code)


def test_modules_under_second_names_survive_threads():
    code = """
        import sys, threading, importlib
        sys.setswitchinterval(1e-6)
        import ipex
        found = []
        def get():
            found.append((importlib.import_module("intel_extension_for_pytorch.nn"), ipex.nn, ipex.optimize))
        threads = [threading.Thread(target=get) for _ in range(8)]
        [t.start() for t in threads]; [t.join() for t in threads]
        assert len(set(found)) == 1 and len(found) == 8
    """
    _check(code)


def test_the_command_starts_without_core():
    code = """
        import sys
        from ipex_cli import app
        sys.argv = ["ipex", "version"]
        try:
            app.main()
        except SystemExit:
            print("torch" in sys.modules)
    """
    assert _check(code).splitlines()[-1] == "False"


def test_names_of_mixed_precision():
    import ipex
    import ipex_core.amp
    from ipex.cpu.autocast import _grad_scaler

    assert ipex.amp is ipex_core.amp
    assert _grad_scaler.GradScaler is ipex.amp.GradScaler
    assert ipex.cpu.autocast.autocast is ipex.amp.autocast


@pytest.mark.parametrize("package", ["ipex", "intel_extension_for_pytorch"])
def test_the_launcher_under_its_old_name_starts_without_torch(package, tmp_path):
    pytest.importorskip("ipex_runtime")
    (tmp_path / "script.py").write_text("print(__name__)")
    command = [sys.executable, "-X", "importtime", "-m", f"{package}.cpu.launch", "script.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.stdout == "__main__\n", done.stderr
    assert "| torch\n" not in done.stderr.replace(" ", "").replace("|torch", "| torch")
    for name in ("hypertune", "auto_ipex"):
        command = [sys.executable, "-m", f"{package}.cpu.{name}", "--help"]
        assert "usage:" in subprocess.check_output(command, text=True, timeout=120)


def test_the_launcher_under_its_old_name_is_the_same_module():
    launch = pytest.importorskip("ipex_runtime.launch")
    import intel_extension_for_pytorch.cpu.launch as old
    from intel_extension_for_pytorch.cpu.launch.cpu_info import CPUPoolList

    assert old is launch is ipex.cpu.launch
    assert CPUPoolList is launch.CPUPoolList


# --- what the old name changes in torch -------------------------------------------------------------------------------

_TRACE = """
    import torch
    stock = torch.jit.trace
    {first}
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).eval()
    x = torch.ones(2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        traced = torch.jit.trace(model, x)
        assert torch.is_autocast_cache_enabled()
    assert torch.equal(traced(x), expected)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.jit.trace(lambda x: 1 / 0, x)
    except ZeroDivisionError:
        pass
    assert torch.is_autocast_cache_enabled()
"""


def test_old_name_traces_under_autocast():
    first = """import ipex
    assert torch.jit.trace is stock
    import intel_extension_for_pytorch as old
    import importlib
    importlib.reload(old)
    assert torch.jit.trace.__wrapped__ is stock and torch.jit.trace.__name__ == "trace\""""
    _check(_TRACE.format(first=first))


def test_new_name_leaves_trace_alone():
    first = "import ipex, ipex.jit, ipex.amp\n    assert torch.jit.trace is stock"
    done = _python(_TRACE.format(first=first))
    assert "Cannot insert a Tensor that requires grad" in done.stderr


_STATE = """
    import torch
    trace, numpy = torch.jit.trace, torch.Tensor.numpy
    bag, norm = torch.nn.EmbeddingBag(8, 4, mode="sum"), torch.nn.GroupNorm(2, 4)
    layer_norm = torch.nn.LayerNorm(4)
    ids, offsets, x = torch.arange(6), torch.tensor([0, 3]), torch.randn(3, 4, 5)

    def dtypes():
        found = []
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                with torch.no_grad():
                    found += [bag(ids, offsets), torch.embedding_bag(bag.weight, ids, offsets)[0]]
                found += [bag(ids, offsets), norm(x)]
                found.append(torch.ops.aten._adaptive_avg_pool3d(torch.ones(1, 2, 3, 3, 3).to(dtype), [1, 1, 1]))
        return [str(y.dtype).removeprefix("torch.") for y in found]

    def stock():
        try:
            torch.ones(1, dtype=torch.bfloat16).numpy()
        except TypeError:
            assert torch.jit.trace is trace and torch.Tensor.numpy is numpy
            full = "float32"
            return dtypes() == [full] * 4 + ["bfloat16"] + [full] * 4 + ["float16"]
        return False

    assert stock()
"""


def test_old_name_follows_the_lists_of_ipex():
    code = """
        import intel_extension_for_pytorch
        full, bf16, half = "float32", "bfloat16", "float16"
        assert dtypes() == [bf16, bf16, full, bf16, full, half, half, full, full, full], dtypes()
        with torch.no_grad():
            expected = bag(ids, offsets)
            wide = norm(x.bfloat16().float())
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast("cpu", dtype):
                    # One rounding of the sum in float32, not a sum of rounded rows.
                    assert torch.equal(bag(ids, offsets), expected.to(dtype))
            with torch.autocast("cpu", torch.bfloat16):
                torch.testing.assert_close(norm(x).float(), wide, rtol=2e-2, atol=2e-2)
                y = layer_norm.bfloat16()(x.transpose(1, 2).bfloat16())
                traced = torch.jit.trace(layer_norm, x.transpose(1, 2).bfloat16())
                assert traced(x.transpose(1, 2).bfloat16()).dtype is y.dtype is torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            bag(ids, offsets).sum().backward()
        assert bag.weight.grad.dtype is torch.float32 and int(bag.weight.grad.sum()) == 24
        y = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
        assert y.numpy().tolist() == y.numpy(force=True).tolist() == [1.5, -2.0]
        z = torch.ones(2)
        assert torch.from_numpy(z.numpy()).data_ptr() == z.data_ptr()
        try:
            torch.ones(1, dtype=torch.bfloat16, requires_grad=True).numpy()
        except RuntimeError as error:
            assert "detach" in str(error)
        else:
            raise AssertionError
    """
    options = ("-W", "error", "-W", "ignore::DeprecationWarning")  # of torch.jit.trace itself
    _check(textwrap.dedent(_STATE) + textwrap.dedent(code), *options)


def test_interaction_in_a_region():
    code = """
        import torch
        import ipex
        from ipex.compat import torch_changes
        f = ipex.nn.functional.interaction
        x, half = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, dtype=torch.bfloat16)

        def dtypes():
            with torch.autocast("cpu", torch.bfloat16):
                return [f(a, b).dtype for a, b in ((x, x), (x, half), (half, x), (half, half))]

        wide, low = torch.float32, torch.bfloat16
        assert dtypes() == [low] * 4
        import intel_extension_for_pytorch
        assert dtypes() == [wide, wide, wide, low]
        with torch.autocast("cpu", torch.bfloat16):
            y = f(x, half)
        torch.testing.assert_close(y, f(x, half.float()), rtol=0, atol=0)
        y.sum().backward()
        assert x.grad.dtype is wide
        assert torch_changes.undo() and dtypes() == [low] * 4
    """
    _check(code)


def test_torch_is_put_back():
    code = """
        import intel_extension_for_pytorch
        from ipex.compat import torch_changes
        assert torch_changes.applied() and not stock()
        assert torch_changes.undo() and not torch_changes.undo() and not torch_changes.applied()
        assert stock()
        assert torch_changes.apply() and not stock() and torch_changes.undo() and stock()
    """
    _check(textwrap.dedent(_STATE) + textwrap.dedent(code))


def test_torch_is_left_alone_on_request(monkeypatch):
    monkeypatch.setenv("IPEX_CHANGE_TORCH", "0")
    _check(textwrap.dedent(_STATE) + "import intel_extension_for_pytorch\nassert stock()")


def test_wrappers_of_other_libraries_stay():
    code = """
        import functools
        import torch
        import intel_extension_for_pytorch
        from ipex.compat import torch_changes
        ours = torch.jit.trace

        @functools.wraps(ours)
        def other(*args, **kwargs):
            return ours(*args, **kwargs)

        torch.jit.trace = torch.Tensor.numpy = other
        assert torch_changes.apply() and torch.jit.trace is other
        assert torch_changes.undo() and torch.jit.trace is torch.Tensor.numpy is other
        torch.jit.trace, before = other, torch.jit.trace
        assert torch_changes.apply() and torch.jit.trace is other
    """
    _check(code)

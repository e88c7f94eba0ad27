# SPDX-License-Identifier: Apache-2.0
"""The ``ipex`` command: output, JSON, exit codes, commands of other packages."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from ipex_cli import app as cli
from ipex_cli.doctor_report import private
from ipex_core import config
from ipex_core.diagnostics.doctor import Report
from ipex_core.kernels import machine, providers

runner = CliRunner()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    config.reload({})
    yield
    config.reload({})
    sys._xoptions.pop("ipex-tolerant", None)


def _ipex(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("IPEX_", "ATEN_"))}
    return subprocess.run(
        [sys.executable, "-m", "ipex", *args],
        env={**clean, "TERM": "dumb", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def _providers(monkeypatch):
    def use(*statuses: providers.ProviderStatus) -> None:
        monkeypatch.setattr(providers, "load_providers", lambda: statuses)
        # What other tests have loaded (scikit-learn brings an OpenMP runtime of its own) is no problem of this one.
        monkeypatch.setattr(machine, "loaded_libraries", lambda root: ("/usr/lib/libgomp.so.1",))

    return use


# --- doctor -----------------------------------------------------------------------------------------------------------


def test_doctor_table(_providers):
    _providers(providers.ProviderStatus("cpu", "missing", "ipex-cpu-kernels"))
    done = runner.invoke(cli.app, ["doctor"])
    assert done.exit_code == 0, done.output
    for text in ("CPU features", "OpenMP runtime", "ISA level", "IPEX_STRICT", "nothing is broken"):
        assert text in done.output
    assert "pip install 'ipex[cpu]'" in done.output


def test_doctor_json_is_the_report(_providers):
    _providers()
    done = runner.invoke(cli.app, ["doctor", "--json"])
    assert done.exit_code == 0
    data = json.loads(done.output)
    assert set(data) == {"schema", "ok", *(f.name for f in dataclasses.fields(Report))}
    assert data["ok"] is True
    assert isinstance(data["advice"], list)


def test_doctor_writes_one_file_for_a_bug_report(tmp_path, monkeypatch):
    for name, value in {
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "2",
        "IPEX_STRICT": "0",
        "TORCH_HUB_TOKEN": "hunter1",
        "MY_PASSWORD": "hunter2",
        "TORCHINDUCTOR_CACHE_DIR": "https://me:hunter3@host/x?api_key=hunter4&y=1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", "") + os.pathsep + str(tmp_path / "mine"),
    }.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "new" / "report.md"
    done = runner.invoke(cli.app, ["doctor", "--report", str(file)])
    assert done.exit_code in {0, 1}
    text = file.read_text()
    for part in (
        "OMP_NUM_THREADS=2",
        "TORCH_HUB_TOKEN=(hidden)",
        "## CPU",
        "## Packages",
        "PyTorch built with",
    ):
        assert part in text
    assert "hunter" not in text and "MY_PASSWORD" not in text
    assert str(tmp_path) not in text and f"~{os.sep}mine" in text
    json.loads(text.rpartition("```text")[2].removesuffix("```\n"))
    (tmp_path / "a").touch()
    done = runner.invoke(cli.app, ["doctor", "--report", str(tmp_path / "a" / "b")])
    assert done.exit_code == 2 and "cannot write" in done.output


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("/tmp/torchinductor_alice:/data/alice/x", "/tmp/torchinductor_(user):/data/(user)/x"),
        ("/home/alice/a:/home/bob/b /Users/carol", "~/a:/home/(user)/b /Users/(user)"),
        ("/home/alice2/a /data/malice/x alice", "/home/(user)/a /data/malice/x alice"),
        ("hf_AbCdEfGhIj1234 sk-abcdefgh12 ghp_0123456789", "(hidden) (hidden) (hidden)"),
        ("Authorization: Bearer abc.def", "Authorization: (hidden)"),
        ("avx512_bf16 task-oriented-text risk-free-basic", None),
    ],
)
def test_reports_name_no_user_and_no_token(text, wanted):
    environ = {"HOME": "/home/alice", "USER": "alice"}
    assert private(text, environ) == (text if wanted is None else wanted)


def test_doctor_exits_with_1_when_something_is_broken(_providers):
    _providers(providers.ProviderStatus("cpu", "broken", "ipex-cpu-kernels", cause=OSError("gone")))
    done = runner.invoke(cli.app, ["doctor"])
    assert done.exit_code == 1
    assert "OSError: gone" in done.output
    assert "nothing is broken" not in done.output
    assert "ipex doctor --report report.md" in done.output
    assert json.loads(runner.invoke(cli.app, ["doctor", "--json"]).output)["ok"] is False


def test_doctor_runs_in_a_bad_environment_and_shows_it():
    done = _ipex("doctor", "--json", IPEX_STRICT="maybe", IPEX_STRIKT="1")
    assert done.returncode == 1, done.stderr
    data = json.loads(done.stdout)
    assert any("IPEX_STRICT=maybe" in line for line in data["problems"])
    setting = next(s for s in data["settings"] if s["name"] == "IPEX_STRICT")
    assert (setting["value"], setting["source"]) == ("maybe", "error")
    assert "did you mean IPEX_STRICT" in done.stderr


def test_doctor_without_a_usable_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')\n")
    done = _ipex("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "libtorch.so: no such file" in done.stderr
    assert "Traceback" not in done.stderr
    done = _ipex("doctor", "--json", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "libtorch.so" in json.loads(done.stdout)["problems"][0]


def test_doctor_with_a_torch_that_is_too_old(tmp_path):
    (tmp_path / "torch.py").write_text("__version__ = '2.3.0'\n")
    done = _ipex("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "2.3.0" in done.stderr
    assert "Traceback" not in done.stderr


# --- the others -------------------------------------------------------------------------------------------------------


def test_other_commands_refuse_a_bad_environment_in_one_line():
    done = _ipex("op-info", "rms_norm", IPEX_STRICT="maybe")
    assert done.returncode == 2
    assert done.stderr.startswith("error: IPEX_STRICT=maybe is not allowed")
    assert len(done.stderr.splitlines()) == 1


def test_help_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('not needed')\n")
    for args in (["--help"], ["doctor", "--help"], []):
        done = _ipex(*args, PYTHONPATH=str(tmp_path))
        assert "Usage" in done.stdout + done.stderr
        assert "not needed" not in done.stderr


def test_version():
    for args in (["version"], ["--version"]):
        done = runner.invoke(cli.app, args)
        assert done.exit_code == 0
        assert "ipex-core" in done.output


def test_show_config():
    done = runner.invoke(cli.app, ["show-config"])
    assert done.exit_code == 0
    assert "IPEX_HUGE_PAGES" in done.output
    done = runner.invoke(cli.app, ["show-config", "--json"])
    rows = {row["name"]: row for row in json.loads(done.output)}
    assert set(rows) == {v.name for v in config.VARIABLES.values()}
    assert rows["IPEX_FP32_MATH_MODE"]["value"] == "FP32"


def test_show_config_runs_in_a_bad_environment_and_shows_it():
    for name, value in (("IPEX_CPU_ISA", "avx1024"), ("IPEX_STRICT", "maybe")):
        done = subprocess.run(
            [sys.executable, "-m", "ipex", "show-config"],
            env={**os.environ, name: value},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert f"{name}={value} is not allowed" in done.stdout
        assert "IPEX_FP32_MATH_MODE = FP32 (default)" in done.stdout


def test_op_info():
    done = runner.invoke(cli.app, ["op-info"])
    assert done.exit_code == 0
    assert "rms_norm" in done.output
    done = runner.invoke(cli.app, ["op-info", "rms_norm", "--json"])
    assert json.loads(done.output)["op"] == "rms_norm"
    done = runner.invoke(cli.app, ["op-info", "rms_norm"])
    assert "schema" in done.output
    assert len(json.loads(runner.invoke(cli.app, ["op-info", "--json"]).output)) >= 12


def test_an_unknown_op_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ipex", "op-info", "rmsnorm"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert "did you mean rms_norm" in capsys.readouterr().err


# --- commands of other packages ---------------------------------------------------------------------------------------


@pytest.fixture
def _commands(monkeypatch, tmp_path):
    (tmp_path / "madeup_cli.py").write_text(
        "import typer\napp = typer.Typer(help='A tool.')\n"
        "@app.command()\ndef one(n: int = 1):\n    print('one', n)\n"
        "@app.command()\ndef two():\n    print('two')\n"
        "def through(argv: list):\n    '''Takes everything.'''\n    print(argv)\n"
        "def plain(text: str):\n    '''A function.'''\n    print('plain', text)\n"
    )
    (tmp_path / "madeup_broken_cli.py").write_text("raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {
        "tool": "madeup_cli:app",
        "plain": "madeup_cli:plain",
        "through": "madeup_cli:through",
        "bad": "madeup_broken_cli:app",
        "doctor": "madeup_broken_cli:app",
    }
    entries = {n: importlib.metadata.EntryPoint(n, v, cli.COMMAND_GROUP) for n, v in names.items()}
    monkeypatch.setattr(cli, "_entry_points", lambda: entries)


def test_commands_of_other_packages(_commands):
    done = runner.invoke(cli.app, ["tool", "one", "--n", "3"])
    assert done.output.strip() == "one 3"
    assert runner.invoke(cli.app, ["plain", "x"]).output.strip() == "plain x"


def test_a_command_is_imported_only_when_it_is_named(_commands):
    sys.modules.pop("madeup_cli", None)
    runner.invoke(cli.app, ["version"])
    assert "madeup_cli" not in sys.modules


def test_a_broken_command_takes_no_other_along(_commands):
    done = runner.invoke(cli.app, ["--help"])
    assert done.exit_code == 0
    assert "broken" in done.output
    assert "A tool." in done.output
    done = runner.invoke(cli.app, ["bad", "--some-option", "x"])
    assert done.exit_code == 2
    assert "RuntimeError: boom" in done.output


def test_built_in_commands_cannot_be_replaced(_commands, _providers):
    _providers()
    assert runner.invoke(cli.app, ["doctor", "--json"]).exit_code == 0


def test_unknown_command():
    done = runner.invoke(cli.app, ["doktor"])
    assert done.exit_code == 2
    assert "doctor" in done.output


def test_own_commands_are_registered_as_entry_points():
    found = {e.name: e.value for e in importlib.metadata.entry_points(group="ipex.commands")}
    assert found["bench"] == "ipex_bench.commands.bench:app"
    assert found["demo"] == "ipex_bench.commands.demo:app"


def test_a_command_that_takes_its_arguments_as_they_are(_commands):
    done = runner.invoke(cli.app, ["through", "--help", "-x", "a b", "--json"])
    assert done.exit_code == 0, done.output
    assert done.output.strip() == "['--help', '-x', 'a b', '--json']"
    assert "Takes everything." in runner.invoke(cli.app, ["--help"]).output


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("variable", [None, "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_a_server_bounds_the_spin_before_torch_is_loaded(monkeypatch, loaded, variable):
    """It is the first to import torch; `python -m ipex` has imported it before."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        # With a value first, so that the test leaves no trace where there was none.
        monkeypatch.setenv(name, "7")
        if name != variable:
            monkeypatch.delenv(name)
    asked = []
    monkeypatch.setattr(machine, "restart_if_crowded", lambda bounded: asked.append(bounded))
    monkeypatch.setattr(cli, "app", lambda: None)
    monkeypatch.setattr(sys, "argv", ["ipex", "llm", "serve", "folder"])
    if not loaded:
        monkeypatch.delitem(sys.modules, "torch")
    cli.main()
    assert asked == [variable is None]
    own = None if loaded else "30000"
    expected = {None: own, "GOMP_SPINCOUNT": "7", "OMP_WAIT_POLICY": None}[variable]
    assert os.environ.get("GOMP_SPINCOUNT") == expected

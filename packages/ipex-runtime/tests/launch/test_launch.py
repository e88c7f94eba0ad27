# SPDX-License-Identifier: Apache-2.0
"""The launcher as its users run it: real processes, log files, messages."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launched import COMMAND, CPUS, SECONDS, SHOW, TWO, launch, write


def test_one_instance_has_all_cores_and_its_arguments(tmp_path):
    found = launch(write(tmp_path, SHOW), "--ninstances", "7", "-x")
    assert found.returncode == 0, found.stderr
    assert re.fullmatch(r"\[[\d, ]+\] \d+ \['--ninstances', '7', '-x'\] __main__\n", found.stdout)
    assert found.stderr == ""


def test_backend_word_module_and_program(tmp_path):
    write(tmp_path, SHOW, "some_module.py")
    assert launch("cpu", write(tmp_path, SHOW)).returncode == 0
    found = launch(
        "-m", "some_module", "a", PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    )
    assert "['a'] __main__" in found.stdout
    assert launch("--no-python", "echo", "a b").stdout == "a b\n"


@TWO
def test_instances_are_bound_before_they_start(tmp_path):
    one, two = CPUS[:2]
    script = write(tmp_path, SHOW)
    found = launch(
        "--cores-list", f"{one},{two}", "--ninstances", "2", "--use-logical-cores", script
    )
    assert sorted(found.stdout.splitlines()) == [f"[{one}] 1 [] __main__", f"[{two}] 1 [] __main__"]
    options = ("--cores-list", f"{one},{two}", "--ninstances", "2", "--use-logical-cores")
    found = launch(*options, "--instance-idx", "1", script)
    assert found.stdout == f"[{two}] 1 [] __main__\n"


def test_openmp_variables_alone_bind_without_a_task_manager(tmp_path):
    found = launch("--multi-task-manager", "none", "--cores-list", str(CPUS[0]), "--dry-run",
                   "--omp-runtime", "default", write(tmp_path, SHOW))  # fmt: skip
    assert f"GOMP_CPU_AFFINITY={CPUS[0]}" in found.stdout
    assert "CPUs not bound" in found.stdout


def test_dry_run_prints_a_line_for_a_shell_that_works(tmp_path):
    script = write(tmp_path, SHOW)
    found = launch("--dry-run", "--cores-list", str(CPUS[0]), script, "a b", PRIVATE="x")
    lines = found.stdout.splitlines()
    assert lines[0] == f"# instance 0: CPUs {CPUS[0]}"
    assert "PRIVATE" not in lines[1] and "OMP_NUM_THREADS=1" in lines[1]
    run = subprocess.run(
        ["sh", "-c", lines[1]], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert "['a b'] __main__" in run.stdout


def test_explain_tells_what_was_chosen(tmp_path):
    found = launch("--explain", "--dry-run", write(tmp_path, SHOW))
    for text in ("this process may use", "memory allocator", "OpenMP runtime"):
        assert text in found.stderr


def test_preset_variables_win_with_a_warning(tmp_path):
    found = launch(write(tmp_path, SHOW), OMP_NUM_THREADS="17")
    assert "] 17 []" in found.stdout
    assert "warning: OMP_NUM_THREADS=17 of the environment is kept" in found.stderr


def test_libraries_are_found_preferred_and_preloaded(tmp_path):
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in ("libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libiomp5.so"):
        (lib / name).touch()
    script = write(tmp_path, SHOW)
    both = launch("--dry-run", script, CONDA_PREFIX=str(tmp_path)).stdout
    assert f"LD_PRELOAD={lib}/libtcmalloc_minimal.so.4:{lib}/libiomp5.so" in both
    assert "KMP_AFFINITY=granularity=fine,compact,1,0" in both and "KMP_BLOCKTIME=1" in both
    je = launch("--dry-run", "--memory-allocator", "jemalloc", "--benchmark", "--omp-runtime", "default",
                script, CONDA_PREFIX=str(tmp_path)).stdout  # fmt: skip
    assert f"LD_PRELOAD={lib}/libjemalloc.so.2 " in je and "dirty_decay_ms:-1" in je
    assert "OMP_PROC_BIND=CLOSE" in je and "KMP" not in je
    none = launch("--dry-run", "--memory-allocator", "default", "--omp-runtime", "default", script,
                  LD_PRELOAD=f"{lib}/libjemalloc.so.2:/nowhere/x.so")  # fmt: skip
    assert "/nowhere/x.so of LD_PRELOAD does not exist" in none.stderr
    assert "LD_PRELOAD=" not in none.stdout


def test_an_allocator_that_is_not_there_is_advice_not_failure(tmp_path, monkeypatch):
    from ipex_runtime.launch import Launcher

    warnings = []
    launcher = Launcher()
    launcher.library_paths = [str(tmp_path)]
    launcher.ld_preload = []
    monkeypatch.setattr(launcher.cpuinfo, "verbose", lambda *message: warnings.append(message))
    assert launcher.set_memory_allocator("jemalloc") == "default"
    assert warnings[0][0] == "warning" and "apt install libjemalloc2" in warnings[0][1]
    assert launcher.set_memory_allocator("auto") == "default"
    assert warnings[1][0] == "info"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere/script.py"], "the script must exist, got '/nowhere/script.py'"),
        (["/bin/ls"], "must be a Python script"),
        (["--no-python", "/nowhere/program"], "the program must exist and be executable"),
        (["--cores-list", "7000", "SCRIPT"], "--cores-list must name CPUs that this process may use"),
        (["--cores-list", "3-1", "SCRIPT"], "must rise"),
        (["--cores-list", "a", "SCRIPT"], "got 'a' in 'a'"),
        (["--nodes-list", "900", "SCRIPT"], "--nodes-list must name NUMA nodes"),
        (["--ninstances", "100000", "SCRIPT"], "--ninstances must be at most"),
        (["--instance-idx", "3", "SCRIPT"], "--instance-idx must be below 1"),
        (["--latency-mode", "--throughput-mode", "SCRIPT"], "exclude each other"),
        (["--memory-allocator", "hoard", "SCRIPT"], "invalid choice: 'hoard'"),
        (["--stop-timeout", "-1", "SCRIPT"], "must be 0 to 86400"),
        (["--log-dir", "/proc/nothing", "SCRIPT"], "--log-dir must be a folder that can be written"),
        (["--log-file-prefix", "a/b", "SCRIPT"], "--log-file-prefix must be a name"),
        (["--no-python", "--auto-ipex", "/bin/true"], "exclude each other"),
        (["--convert-fp64-to-fp32", "SCRIPT"], "option of ipexrun xpu"),
        (["--unknown-option", "SCRIPT"], "unknown-option"),
        (["--nnodes", "-1", "SCRIPT"], "--nnodes must be 0 or more"),
    ],
)  # fmt: skip
def test_bad_arguments_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    script = write(tmp_path, SHOW)
    found = launch(*(script if a == "SCRIPT" else a for a in arguments))
    assert found.returncode == 2 and found.stdout == ""
    assert message in found.stderr and "Traceback" not in found.stderr


def test_options_without_effect_are_told(tmp_path):
    script = write(tmp_path, SHOW)
    found = launch(
        "--nprocs-per-node", "2", "--dtype", "bfloat16", "--log-file-prefix", "p", script
    )
    assert found.returncode == 0
    for text in (
        "--nprocs-per-node has no effect without --nnodes",
        "--dtype has no effect without --auto-ipex",
        "--log-file-prefix has no effect without --log-dir",
    ):
        assert text in found.stderr
    both = ("--nnodes", "1", "--nprocs-per-node", "1", "--master-port", "0", "--ninstances", "1")
    found = launch(*both, script)
    assert (
        found.stderr.count("no effect") == 1 and "--ninstances has no effect with" in found.stderr
    )


def test_a_core_named_twice_counts_once(tmp_path):
    found = launch("--cores-list", f"{CPUS[0]},{CPUS[0]}", write(tmp_path, SHOW))
    assert found.stdout.startswith(f"[{CPUS[0]}] 1")
    assert "twice" in found.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_log_folder_that_cannot_be_written(tmp_path):
    tmp_path.chmod(0o500)
    found = launch("--log-dir", str(tmp_path), __file__)
    assert found.returncode == 2 and "Permission denied" in found.stderr


def test_log_files(tmp_path):
    logs = tmp_path / "new" / "logs"
    text = "import sys\nprint('to out')\nsys.stderr.write('to err\\n')\n"
    found = launch("--log-dir", str(logs), "--log-file-prefix", "mine", "--cores-list", str(CPUS[0]),
                   write(tmp_path, text))  # fmt: skip
    assert found.stdout == "to out\nto err\n"
    names = sorted(p.name for p in logs.iterdir())
    assert re.fullmatch(rf"mine_\d{{14}}_instance_0_cores_{CPUS[0]}\.log", names[0])
    assert re.fullmatch(r"mine_\d{14}_instances\.log", names[1])
    assert (logs / names[0]).read_text() == "to out\nto err\n"
    assert "script.py" in (logs / names[1]).read_text()


def test_table_on_a_terminal(tmp_path):
    main, terminal = pty.openpty()
    text = "import time\nprint('line of the script')\ntime.sleep(1.3)\n"
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                data = os.read(main, 4096)
            except OSError:
                return
            seen.extend(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    process = subprocess.Popen(
        [*COMMAND, "--table", "always", "--cores-list", str(CPUS[0]), write(tmp_path, text)],
        stdout=terminal,
        stderr=terminal,
    )
    os.close(terminal)
    assert process.wait(timeout=SECONDS) == 0
    reader.join(10)
    os.close(main)
    screen = seen.decode()
    for part in ("instance 0", "CPU %", "running, ", "MiB", "done, ", "line of the script"):
        assert part in screen


def test_the_launcher_itself_starts_without_torch():
    code = (
        "import sys\nfrom ipex_runtime.launch.launch import main\n"
        "assert main(['--dry-run', '--no-python', '/bin/true']) == 0\n"
        "assert not {'torch', 'ipex_core', 'psutil'} & set(sys.modules)\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=SECONDS, stdout=subprocess.DEVNULL
    )


def test_every_option_is_in_the_documentation():

    from ipex_runtime.launch.launch import init_parser

    page = Path(__file__).parents[4] / "docs" / "launcher.md"
    if not page.exists():
        pytest.skip("no documentation beside the package")
    text = page.read_text(encoding="utf-8")
    actions = init_parser()._actions
    options = {name for a in actions for name in a.option_strings if "_" not in name} - {
        "-h",
        "--help",
    }
    assert [name for name in sorted(options) if f"`{name}`" not in text] == []
    # Each with its name in underscores.
    long = [a for a in actions if any("-" in n[2:] for n in a.option_strings)]
    assert all(any("_" in n for n in a.option_strings) for a in long)


def test_former_names_do_the_same_with_a_warning():
    import argparse
    import logging

    from ipex_runtime.launch import init_parser
    from ipex_runtime.launch._options import FORMER
    from ipex_runtime.launch.launch import process_deprecated_params

    parser = init_parser(argparse.ArgumentParser())
    told = []
    logger = logging.getLogger("test")
    logger.warning = told.append
    for old, (new, value) in FORMER.items():
        words = ["1"] if value is None else []
        now = [] if value is True or value is None else [str(value)]
        plain = parser.parse_args([*([new] if new else []), *words, *now, "s.py"])
        for name in (old, "--" + old[2:].replace("-", "_")):
            former = parser.parse_args([name, *words, "s.py"])
            told.clear()
            process_deprecated_params(former, logger)
            assert len(told) == 1 and told[0].startswith(f"{name} is deprecated: ")
            assert not new or told[0].endswith(" ".join([f"use {new}", *now]))
            del former.former
            assert former == plain, old
    told.clear()
    process_deprecated_params(plain, logger)
    assert not told


def test_called_from_python_a_failure_is_an_exception(tmp_path):
    import argparse

    from ipex_runtime.launch import init_parser, run_main_with_args

    parser = init_parser(argparse.ArgumentParser())
    with pytest.raises(subprocess.CalledProcessError) as error:
        run_main_with_args(parser.parse_args([write(tmp_path, "raise SystemExit(4)")]))
    assert error.value.returncode == 4
    with pytest.raises(AssertionError):
        run_main_with_args(parser.parse_args(["/bin/true"]))


def test_memory_is_bound_for_the_start_only_and_a_refusal_is_told(monkeypatch):
    import warnings

    from ipex_runtime.launch import _instance

    calls, told = [], []

    def policy(mode, nodes=()):
        calls.append((mode, tuple(nodes)))
        if nodes == (1,):
            warnings.warn("refused", RuntimeWarning, stacklevel=2)
            return False
        return True

    monkeypatch.setattr(_instance, "set_memory_policy", policy)
    with _instance.bound((CPUS[0],), (0,), told.append):
        assert os.sched_getaffinity(0) == {CPUS[0]}
    with _instance.bound((), (1,), told.append):
        pass
    assert calls == [("bind", (0,)), ("default", ()), ("bind", (1,))]
    assert told == ["refused"] and sorted(os.sched_getaffinity(0)) == CPUS

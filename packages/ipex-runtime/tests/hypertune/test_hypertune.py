# SPDX-License-Identifier: Apache-2.0
"""HyperTune: its file, its protocol, its searches, and what goes wrong in trials."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

from ipex_runtime.hypertune._yaml import ConfigurationError  # noqa: E402
from ipex_runtime.hypertune.conf import Conf, input_str_to_list_int, parse_objective  # noqa: E402
from ipex_runtime.hypertune.objective import MultiObjective, TrialError  # noqa: E402
from ipex_runtime.hypertune.strategy import STRATEGIES, TuneStrategy, strategy_registry  # noqa: E402

SECONDS = 120

SCRIPT = """
print("@hypertune {'name': 'latency', 'higher_is_better': False, 'target_val': 1.5}")
print(4.0)
"""


def conf(folder: Path, text: str, script: str = SCRIPT) -> Conf:
    (folder / "tune.yaml").write_text(text)
    (folder / "script.py").write_text(script)
    return Conf(folder / "tune.yaml", str(folder / "script.py"), [])


def settings(
    folder: Path, hyperparams: str = "hp: [ninstances]\n    ninstances: [1]", tuning: str = ""
) -> str:
    return f"tuning: {{{tuning}}}\noutput_dir: {folder}/out\nhyperparams:\n  launcher:\n    {hyperparams}\n"


def rows(folder: Path) -> list[list[str]]:
    with (folder / "out" / "record.csv").open(newline="") as file:
        return list(csv.reader(file))


class Fake(MultiObjective):
    """Answers from a function instead of running a script."""

    def __init__(self, answer, objectives):
        super().__init__("script.py", [], True)
        self.answer, self.told, self.seen = answer, objectives, []

    def evaluate(self, cfg):
        self.seen.append(dict(cfg))
        values = self.answer(cfg)
        self.objectives = self.told
        return values


def search(folder, text, answer, resume=False, higher=False, target=None):
    found = conf(folder, text)
    lines: list[str] = []
    strategy = STRATEGIES[found.execution_conf.tuning.strategy](found, resume, lines.append)
    worst = float("inf") if higher else -float("inf")
    objective = {
        "name": "n",
        "higher_is_better": higher,
        "target_val": worst if target is None else target,
    }
    strategy.multiobjective = Fake(answer, [objective])
    strategy.usr_objectives = [objective]
    strategy.traverse()
    return strategy, lines


# -- the file ----------------------------------------------------------------------------------------------------------


def test_defaults(tmp_path):
    found = conf(tmp_path, "")
    assert found.execution_conf.tuning.strategy == "grid"
    assert found.execution_conf.tuning.max_trials == 100
    assert found.execution_conf.output_dir == os.getcwd()
    assert len(found.execution_conf.hyperparams.launcher.hp) == 7
    assert found.usr_objectives == [
        {"name": "latency", "higher_is_better": False, "target_val": 1.5}
    ]


def test_the_documented_example(tmp_path):
    text = (
        "tuning:\n  strategy: Random\n  max_trials: 5\nhyperparams:\n  launcher:\n"
        "    hp: ['ncore_per_instance', 'malloc']\n    ncore_per_instance: all_physical_cores\n    malloc: [pt]\n"
    )
    launcher = conf(tmp_path, text).execution_conf.hyperparams.launcher
    assert launcher.hp == ["ncores_per_instance", "malloc"]
    assert launcher.ncores_per_instance == input_str_to_list_int("all_physical_cores")
    assert launcher.malloc == ["pt"] and launcher.use_all_nodes == [True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tuning:\n  strategy: best\n", r"line 2: tuning.strategy must be one of grid, random, bayesian, got 'best'"),
        ("tuning:\n  max_trails: 3\n", r"line 2: unknown key 'tuning.max_trails' \(did you mean max_trials"),
        ("tuning:\n  max_trials: 0\n", r"line 2: tuning.max_trials must be at least 1, got 0"),
        ("tuning:\n  max_trials: true\n", r"tuning.max_trials must be a whole number, got True"),
        ("tuning: {trial_timeout: -1}\n", r"tuning.trial_timeout must be above 0"),
        ("tuning: 3\n", r"line 1: tuning must be a mapping"),
        ("output_dir: [1]\n", r"line 1: output_dir must be the path of a folder"),
        ("hyperparams:\n  launcher:\n    ninstances: [1]\n", r"line 3: hyperparams.launcher must have the key hp"),
        ("hyperparams:\n  launcher:\n    hp: [speed]\n", r"line 3: hyperparams.launcher.hp\[0\] must be one of"),
        ("hyperparams:\n  launcher:\n    hp: [malloc, malloc]\n", r"name each parameter once"),
        ("hyperparams:\n  launcher:\n    hp: []\n", r"name at least one"),
        ("hyperparams:\n  launcher:\n    hp: [ninstances]\n    ninstances: [1, two]\n",
         r"line 4: hyperparams.launcher.ninstances\[1\] must be a whole number, got 'two'"),
        ("hyperparams:\n  launcher:\n    hp: [ninstances]\n    ninstances: some\n", r"all_logical_cores"),
        ("hyperparams:\n  launcher:\n    hp: [ninstances]\n    malloc: [tc]\n", r"malloc must be in hp, too"),
        ("hyperparams: {launcher: {hp: [malloc], malloc: [hoard]}}", r"malloc\[0\] must be one of tc, je, pt"),
        ("hyperparams:\n  launcher:\n    hp: [disable_iomp]\n    disable_iomp: [1]\n", r"must be true or false, got 1"),
        ("hyperparams: {launcher: {hp: [ninstances], ninstances: [1], ninstances: [2]}}\n", r"must be there once, got"),
        ("? [&a [x, x], *a, *a]\n: 1\n", r"line 1: a key must be a text, got a sequence$"),
        ("7: 1\n", r"line 1: a key must be a text, got 7$"),
        ("tuning:\n  strategy: [grid\n", r"line \d: must be valid YAML"),
        ("tuning: \x00\n", r"must be valid YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_named_with_line_and_key(text, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message) as error:
        conf(tmp_path, text)
    assert "tune.yaml" in str(error.value)


def test_missing_files(tmp_path):
    with pytest.raises(ConfigurationError, match="the script must exist"):
        Conf(tmp_path / "a.yaml", str(tmp_path / "none.py"), [])
    with pytest.raises(ConfigurationError, match="--conf-file must be a text file"):
        Conf(tmp_path / "a.yaml", __file__, [])


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", "{'nam': 'x'}", "{'name': 3}", "{'name': 'x', 'target_val': 'y'}"]
)
def test_objectives_that_are_none(text):
    with pytest.raises(ConfigurationError, match="@hypertune"):
        parse_objective(text, "here")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{'name': 3}", "here: name of @hypertune must be a text, got 3"),
        (
            "{'name': 'x', 'higher_is_better': 1}",
            "higher_is_better of @hypertune must be True or False, got 1",
        ),
        (
            "{'name': 'x', 'target_val': True}",
            "target_val of @hypertune must be a number, got True",
        ),
    ],
)
def test_types_of_an_objective(text, message):
    with pytest.raises(ConfigurationError, match=message):
        parse_objective(text, "here")


def test_a_goal_that_should_be_high_is_not_met_by_default():
    assert parse_objective("{'name': 'fps', 'higher_is_better': True}", "")["target_val"] == float(
        "inf"
    )


# -- searches ----------------------------------------------------------------------------------------------------------

FLAGS = """hp: [disable_numactl, use_logical_cores]
    disable_numactl: [false, true]
    use_logical_cores: [false, true]"""


def count(cfg):
    return [3.0 - cfg["disable_numactl"] - 2 * cfg["use_logical_cores"]]


@pytest.mark.parametrize("strategy", ["grid", "random"])
def test_all_are_tried_and_the_best_is_found(strategy, tmp_path):
    found, lines = search(tmp_path, settings(tmp_path, FLAGS, f"strategy: {strategy}"), count)
    assert found.best_tune_cfg == {"disable_numactl": True, "use_logical_cores": True}
    assert found.best_tune_result == [0.0]
    table = rows(tmp_path)
    assert table[0] == ["disable_numactl", "use_logical_cores", "n", "status", "seconds"]
    assert len(table) == 5 and {row[3] for row in table[1:]} == {"done"}
    text = "\n".join(lines)
    assert "Tune 4/4" in text and "best so far: n: 0" in text
    assert "Best configuration found is: {'disable_numactl': True" in text


def test_high_values_limits_and_targets(tmp_path):
    found, _ = search(tmp_path, settings(tmp_path, FLAGS, "max_trials: 2"), count, higher=True)
    assert found.best_tune_result == [3.0] and len(rows(tmp_path)) == 3
    found, lines = search(tmp_path, settings(tmp_path, FLAGS), count, target=1.5)
    assert len(found.multiobjective.seen) == 2 and "meets the target" in "\n".join(lines)
    assert (tmp_path / "out" / "record.csv.bak").exists()


def test_failed_trials_are_recorded_and_not_repeated_when_resumed(tmp_path):
    def fails_sometimes(cfg):
        if cfg["disable_numactl"]:
            raise TrialError("crashed", "exit code 1", "the output")
        return count(cfg)

    _, lines = search(tmp_path, settings(tmp_path, FLAGS, "max_trials: 3"), fails_sometimes)
    assert [row[2:4] for row in rows(tmp_path)[1:]] == [
        ["3.0", "done"],
        ["1.0", "done"],
        ["", "crashed"],
    ]
    assert (tmp_path / "out" / "trial_3.log").read_text() == "the output"
    found, lines = search(tmp_path, settings(tmp_path, FLAGS), count, resume=True)
    assert found.multiobjective.seen == [{"disable_numactl": True, "use_logical_cores": True}]
    assert len(rows(tmp_path)) == 5 and "3 trials are taken over" in "\n".join(lines)
    with pytest.raises(ConfigurationError, match=r"--resume needs a record.csv of the same"):
        search(tmp_path, settings(tmp_path), count, resume=True)


def test_interrupted_searches_keep_their_record(tmp_path):
    def interrupted(cfg):
        if cfg["disable_numactl"]:
            raise KeyboardInterrupt
        return count(cfg)

    _, lines = search(tmp_path, settings(tmp_path, FLAGS), interrupted)
    assert len(rows(tmp_path)) == 3 and "--resume" in "\n".join(lines)


def test_combinations_without_cores_are_left_out(tmp_path):
    text = settings(tmp_path, "hp: [ninstances]\n    ninstances: [1, 4096]")
    found, lines = search(tmp_path, text, lambda cfg: [1.0])
    assert found.multiobjective.seen == [{"ninstances": 1}]
    assert "1 of 2 combinations need more cores" in lines[0]
    with pytest.raises(ConfigurationError, match="must leave a combination"):
        search(tmp_path, text.replace("[1, 4096]", "[4096]"), lambda cfg: [1.0])


def test_two_searches_cannot_share_a_folder(tmp_path):
    def second(cfg):
        with pytest.raises(ConfigurationError, match="in use by another search"):
            search(tmp_path, settings(tmp_path), lambda cfg: [1.0])
        return [1.0]

    search(tmp_path, settings(tmp_path), second)


def test_bayesian(tmp_path):
    pytest.importorskip("optuna")
    found, _ = search(tmp_path, settings(tmp_path, FLAGS, "strategy: bayesian"), count)
    assert found.best_tune_result == [0.0] and len(rows(tmp_path)) == 5


def test_bayesian_without_optuna_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"ipex-runtime\[bayesian\]"):
        search(tmp_path, settings(tmp_path, tuning="strategy: bayesian"), count)


def test_strategies_of_others():
    with pytest.raises(ValueError, match="must have a new name"):
        strategy_registry(type("GridTuneStrategy", (TuneStrategy,), {}))


# -- real trials -------------------------------------------------------------------------------------------------------


def test_options_of_the_launcher():
    cfg = {"ncores_per_instance": 4, "ninstances": 2, "use_logical_cores": True, "disable_numactl": True,
           "disable_iomp": True, "malloc": "pt"}  # fmt: skip
    assert MultiObjective("s.py", [], True).decode_launcer_cfg(cfg) == [
        "--ncores-per-instance",
        "4",
        "--ninstances",
        "2",
        "--use-logical-cores",
        "--multi-task-manager",
        "taskset",
        "--omp-runtime",
        "default",
        "--memory-allocator",
        "default",
    ]


@pytest.mark.parametrize(
    ("script", "status", "message"),
    [
        ("import os\nos.kill(os.getpid(), 11)", "crashed", "exit code 139"),
        ("import time\nprint('started', flush=True)\ntime.sleep(600)", "timed out", "within 1 s"),
        ("print('nothing')", "no objective", "got no such line"),
        ("print(\"@hypertune {'name': 'a'}\")", "no objective", "must be a number"),
        ("print(\"@hypertune {'name': 'a'}\")\nprint(float('nan'))", "no objective", "nan"),
        ("print('@hypertune nonsense')\nprint(1)", "no objective", "must be followed by a dict"),
    ],
)
def test_trials_without_a_result(script, status, message, tmp_path):
    (tmp_path / "s.py").write_text(script)
    timeout = 1 if status == "timed out" else SECONDS
    with pytest.raises(TrialError, match=message) as error:
        MultiObjective(str(tmp_path / "s.py"), [], False, timeout).evaluate({})
    assert error.value.status == status


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two instances need two CPUs")
def test_instances_add_up(tmp_path):
    (tmp_path / "s.py").write_text(
        "for name, high in (('latency', False), ('fps', True)):\n"
        "    print('@hypertune', {'name': name, 'higher_is_better': high})\n    print(10)\n"
    )
    objective = MultiObjective(str(tmp_path / "s.py"), [], True)
    assert objective.evaluate({"ninstances": 2, "malloc": "pt", "use_logical_cores": True}) == [
        10.0,
        20.0,
    ]
    assert [o["name"] for o in objective.objectives] == ["latency", "fps"]


def test_the_command(tmp_path):
    (tmp_path / "s.py").write_text(SCRIPT)
    (tmp_path / "tune.yaml").write_text(settings(tmp_path))
    command = [sys.executable, "-m", "ipex_runtime.hypertune", "--conf-file"]
    found = subprocess.run(
        [*command, str(tmp_path / "tune.yaml"), str(tmp_path / "s.py")],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert "Best configuration found is: {'ninstances': 1}\nlatency: 4.0\n" in found.stdout
    assert rows(tmp_path)[1][:3] == ["1", "4.0", "done"]
    (tmp_path / "tune.yaml").write_text("tuning: {strategy: x}")
    found = subprocess.run(
        [*command, str(tmp_path / "tune.yaml"), str(tmp_path / "s.py")],
        capture_output=True, text=True, timeout=SECONDS, check=False,
    )  # fmt: skip
    assert found.returncode == 2 and "tuning.strategy must be" in found.stderr


def test_a_search_that_is_ended_leaves_no_process(tmp_path):
    text = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "s.py").write_text(text)
    (tmp_path / "tune.yaml").write_text(settings(tmp_path))
    command = [
        sys.executable,
        "-m",
        "ipex_runtime.hypertune",
        "--conf-file",
        str(tmp_path / "tune.yaml"),
    ]
    mark = tmp_path / "mark"
    process = subprocess.Popen(
        [*command, str(tmp_path / "s.py"), str(mark)], stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + SECONDS
    while not (mark.exists() and mark.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.terminate()
    printed, _ = process.communicate(timeout=SECONDS)
    assert process.returncode == 1 and "Interrupted" in printed
    assert not Path(f"/proc/{mark.read_text()}").exists()


def test_every_key_and_option_is_in_the_documentation():
    from ipex_runtime.hypertune.__main__ import make_parser
    from ipex_runtime.hypertune.conf import DEFAULTS

    page = Path(__file__).parents[4] / "docs" / "hypertune.md"
    if not page.exists():
        pytest.skip("no documentation beside the package")
    text = page.read_text(encoding="utf-8")
    options = [n for a in make_parser()._actions for n in a.option_strings if "_" not in n]
    keys = ["strategy", "max_trials", "trial_timeout", "seed", "output_dir", *DEFAULTS, *STRATEGIES]
    assert [
        n for n in (*options, *keys) if n not in ("-h", "--help") and f"`{n}`" not in text
    ] == []

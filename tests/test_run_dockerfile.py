# SPDX-License-Identifier: Apache-2.0
"""The executor of Dockerfiles: what it reads, what it executes, and that it says what it does not execute."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import run_dockerfile
from run_dockerfile import DockerfileError, StepError, VenvRoot, build, parse, substitute

ROOT = Path(__file__).resolve().parent.parent
FROM = "FROM python:3.12-slim\n"


class Folder(VenvRoot):
    """A root without an environment, which would take seconds in each test."""

    def take_base(self, image: str) -> str:
        (self.folder / "usr/local/lib/python3.0/site-packages").mkdir(parents=True)
        self.why_no_user = "this is a test"
        return f"nothing for {image}"


def execute(
    text: str, tmp_path: Path, **build_args: str
) -> tuple[run_dockerfile.Image, Folder, list[str]]:
    context = tmp_path / "context"
    context.mkdir(parents=True, exist_ok=True)
    root, said = Folder(tmp_path / "root", context), list[str]()
    return build(parse(text), root, build_args, said.append), root, said


def test_continued_lines_comments_and_both_forms() -> None:
    found = parse(
        "# syntax=docker/dockerfile:1\nARG PYTHON=3.12\nFROM python:${PYTHON}-slim\n"
        "RUN one \\\n  # a comment inside\n\n  && two\n"
        'entrypoint ["a", "b c"]\nHEALTHCHECK --interval=1m --timeout=3s CMD ["x"]\n'
    )
    assert [i.name for i in found] == ["ARG", "FROM", "RUN", "ENTRYPOINT", "HEALTHCHECK"]
    assert (found[2].line, found[2].text) == (4, "one && two")
    assert found[3].words == ("a", "b c")
    assert found[4].words == ("x",) and found[4].options == ("--interval=1m", "--timeout=3s")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("RUN x\n", "must begin with FROM"),
        (FROM + "FETCH x\n", "line 2: FETCH is not known here"),
        (FROM + "ADD x /\n", "line 2: ADD is not known here"),
        (FROM + FROM, "one stage"),
        (FROM + "RUN cat <<EOF\n", "heredocs"),
        (FROM + "CMD [x]\n", "line 2: CMD must be a JSON list"),
        (FROM + "RUN a \\\n", "ends with a backslash"),
        (FROM + "USER ipex\n", "USER must be a number"),
        (FROM + "RUN --mount=type=cache,target=/x true\n", "--mount=type=bind"),
        (FROM + "RUN --network=none true\n", "--mount=type=bind"),
        (FROM + "ENV A\n", "line 2: ENV must be NAME=VALUE"),
        (FROM + "COPY --from=other a b\n", "COPY takes --chown"),
    ],
)
def test_what_is_not_known_is_an_error(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(DockerfileError, match=message):
        execute(text, tmp_path)


def test_variables() -> None:
    values = {"A": "1", "EMPTY": ""}
    assert substitute("$A ${A}x ${B:-2} ${A:-2} ${A:+3}${EMPTY:+4} $B.", values) == "1 1x 2 1 3 ."


def test_arguments_and_variables_reach_the_steps(tmp_path: Path) -> None:
    text = (
        "ARG PYTHON=3.12\nFROM python:${PYTHON}-slim\nARG WHO=nobody\nENV GREETING=hello,$WHO\n"
        'WORKDIR /app\nRUN echo "$GREETING from $PWD ${PYTHON:-none}" > said\n'
    )
    image, root, said = execute(text, tmp_path, WHO="world")
    assert (root.folder / "app/said").read_text() == f"hello,world from {root.folder}/app none\n"
    assert image.base == "python:3.12-slim"
    assert any(line.startswith("RUN echo") for line in said)
    with pytest.raises(DockerfileError, match="no such ARG"):
        execute(text, tmp_path / "other", TYPO="1")


def test_a_broken_step_fails_and_names_its_line(tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"(?s)line 3: RUN .*status 7.*the reason"):
        execute(FROM + "RUN true\nRUN echo the reason; exit 7\n", tmp_path)
    with pytest.raises(StepError, match="there is no such file"):
        execute(FROM + "COPY missing /app\n", tmp_path / "other")


def test_steps_for_the_system_are_reported_as_not_executed(tmp_path: Path) -> None:
    text = FROM + "RUN apt-get update \\\n && apt-get install --yes g++\nRUN useradd me\nRUN true\n"
    image, _, said = execute(text, tmp_path)
    assert image.executed == ["RUN true"]
    assert [line.partition(":")[0] for line in image.skipped] == ["line 2", "line 4"]
    assert sum(line.startswith("NOT EXECUTED, ") for line in said) == 2


def test_copies_and_mounts(tmp_path: Path) -> None:
    context = tmp_path / "context"
    (context / "code/__pycache__").mkdir(parents=True)
    (context / "code/main.py").write_text("1")
    (context / "dist").mkdir()
    (context / "dist/a.whl").write_text("2")
    text = (
        FROM + "COPY code /srv/code\nCOPY code/*.py /one/\nWORKDIR /app\n"
        "RUN --mount=type=bind,source=dist,target=/wheels cp /wheels/*.whl . && ls /srv/code\n"
    )
    _, root, _ = execute(text, tmp_path)
    files = sorted(p.relative_to(root.folder).as_posix() for p in root.folder.rglob("*.*"))
    assert {"srv/code/main.py", "one/main.py", "app/a.whl"} <= set(files)
    assert not list(root.folder.rglob("__pycache__"))


def test_the_machine_shows_through_for_pip_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "https://example.org/simple")
    monkeypatch.setenv("IPEX_STRICT", "1")
    _, root, _ = execute(FROM + "WORKDIR /app\nRUN env > all\n", tmp_path)
    text = (root.folder / "app/all").read_text()
    assert "PIP_INDEX_URL=" in text and "IPEX_STRICT" not in text
    running = root.start(["/usr/bin/env"], {"A": "/app"}, network=False)
    output = run_dockerfile.finish(running, "env", quiet=True)
    assert f"A={root.folder}/app" in output and "PIP_INDEX_URL" not in output


def test_what_is_started(tmp_path: Path) -> None:
    text = (
        FROM
        + 'CMD ["lost"]\nENTRYPOINT ["run"]\nCMD ["x", "y"]\nUSER 10001\nHEALTHCHECK CMD true\n'
    )
    image, _, _ = execute(text, tmp_path)
    assert image.command() == ["run", "x", "y"] and image.command(["z"]) == ["run", "z"]
    assert image.user == "10001" and image.healthcheck == ("/bin/sh", "-c", "true")
    assert execute(FROM + "HEALTHCHECK NONE\n", tmp_path / "b")[0].healthcheck is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_root_is_left_for_the_user_of_the_image(tmp_path: Path) -> None:
    _, root, _ = execute(FROM + "USER 10001\n", tmp_path)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)  # another user has to enter it
    root.why_no_user = ""
    running = root.start(["/usr/bin/id", "-u"], {}, user="10001", network=False)
    assert run_dockerfile.finish(running, "id", quiet=True) == "10001\n"


def test_a_real_environment_and_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(VenvRoot, "venv_options", ("--without-pip",))  # which takes seconds
    dockerfile = tmp_path / "Dockerfile"

    def run(step: str, root: str) -> int:
        dockerfile.write_text(f"{FROM}{step}\n")
        return run_dockerfile.main([str(dockerfile), str(tmp_path / root), "--context", "."])

    check = "import sys; assert sys.prefix != sys.base_prefix"
    assert run(f'RUN ["python", "-c", "{check}"]', "one") == 0
    said = capsys.readouterr().out
    assert "a virtual environment of Python 3" in said
    assert said.endswith("1 steps executed, 0 not\n")
    assert run('RUN ["python", "-c", "assert 0"]', "two") == 1
    assert "FAILED: line 2: RUN" in capsys.readouterr().err
    assert run("FETCH x", "three") == 2


@pytest.mark.parametrize("path", sorted(ROOT.glob("docker/*.Dockerfile")), ids=lambda p: p.stem)
def test_our_images_can_be_read_and_are_not_root(path: Path) -> None:
    instructions = parse(path.read_text(encoding="utf-8"))
    users = [i.text for i in instructions if i.name == "USER"]
    assert users and run_dockerfile.numeric(users[-1]) > 0
    assert any(i.name == "HEALTHCHECK" for i in instructions)
    # The index of torch can be replaced; nothing of a machine is written down.
    assert any(i.text.startswith("TORCH_INDEX_URL=https://") for i in instructions)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    for source in (s for i in instructions if i.name == "RUN" for s, _ in run_dockerfile.mounts(i)):
        assert f"!{source}" in ignored
    for copy in (i for i in instructions if i.name == "COPY"):
        assert f"!{copy.text.split()[0]}" in ignored

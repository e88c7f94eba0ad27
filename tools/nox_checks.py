# SPDX-License-Identifier: Apache-2.0
"""Sessions that check without running the tests: style, types, known vulnerabilities, changed inputs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import nox

from nox_common import PACKAGES, ROOT, WORKER_ENV, XPU, install_wheels, prepare


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, formatting, licence headers and versions (nothing is rewritten; `-- fix` does)."""
    prepare(session)
    fix = "fix" in session.posargs
    session.install("ruff", "clang-format", "packaging", "tomli", "check-jsonschema", "zizmor")
    native = sorted(
        str(path.relative_to(ROOT))
        for suffix in ("h", "cpp")
        for path in ROOT.glob(f"packages/*/csrc/**/*.{suffix}")
    )
    commands = [
        ["ruff", "check", *(["--fix"] if fix else []), "."],
        ["ruff", "format", *([] if fix else ["--check"]), "."],
        ["python", "tools/check_spdx.py"],
        ["python", "tools/check_versions.py"],
        ["python", "tools/generate_stubs.py", "--check"],
        ["python", "tools/generate_isa.py", "--check"],
        ["zizmor", "--offline", "--quiet", "--persona", "pedantic", "."],
        *checks_of_github_files(),
    ]
    if native:
        commands.append(["clang-format", *(["-i"] if fix else ["--dry-run", "--Werror"]), *native])
    # All of them, so that one run shows everything there is to mend.
    failed = [command for command in commands if not succeeds(session, command)]
    if failed:
        session.error(f"failed: {', '.join(' '.join(command[:2]) for command in failed)}")


#: Schema that check-jsonschema carries -> the files that it describes.
GITHUB_FILES = {
    "vendor.github-workflows": "workflows/*.yml",
    "custom.github-workflows-require-timeout": "workflows/*.yml",
    "vendor.github-actions": "actions/*/action.yml",
    "vendor.dependabot": "dependabot.yml",
    "vendor.github-issue-forms": "ISSUE_TEMPLATE/*.yml",
    "vendor.github-issue-config": "ISSUE_TEMPLATE/config.yml",
}


def checks_of_github_files() -> Iterator[list[str]]:
    """Yield the commands that check workflows and forms against their schemas; no network is needed."""
    for schema, pattern in GITHUB_FILES.items():
        files = {str(path.relative_to(ROOT)) for path in (ROOT / ".github").glob(pattern)}
        if schema.endswith("forms"):
            files.discard(".github/ISSUE_TEMPLATE/config.yml")
        yield ["check-jsonschema", "--builtin-schema", schema, *sorted(files)]


def succeeds(session: nox.Session, command: list[str]) -> bool:
    """Run a command and return whether it succeeded."""
    try:
        session.run(*command)
    except nox.command.CommandFailed:
        return False
    return True


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check types with mypy: strictly in ipex-core, normally elsewhere; and a program of a user with pyright."""
    prepare(session)
    session.install(
        *("mypy", "pyright[nodejs]", "nox"),
        *("torch", "numpy", "rich", "typer", "packaging", "psutil"),
    )
    session.run(
        "mypy",
        *session.posargs,
        *(f"packages/{name}/src" for name in (*PACKAGES, XPU)),
        "tools",
        "docs/_ext",
        "noxfile.py",
    )
    # As if they were installed: pyright takes types of packages only from what is written, not from what follows.
    folders = [str(ROOT / "packages" / name / "src") for name in (*PACKAGES, XPU)]
    site = session.run("python", "-c", "import site; print(site.getsitepackages()[0])", silent=True)
    Path(str(site).strip(), "checkout.pth").write_text("\n".join(folders) + "\n", encoding="utf-8")
    python = shutil.which("python", path=session.bin)
    session.run("pyright", "--project", "tests/typing", "--pythonpath", str(python))


@nox.session(default=False, requires=["wheels_native"])
def audit(session: nox.Session) -> None:
    """Look for known vulnerabilities in all that our packages bring with them (asks the database of PyPI)."""
    prepare(session)
    install_wheels(session, PACKAGES, "pip-audit", extras="[all,serve,demo]")
    # Our own packages are files, no releases; torch's local versions are in no database.
    frozen = session.run("pip", "freeze", "--exclude-editable", silent=True) or ""
    lines = [re.sub(r"\+\w+$", "", line) for line in frozen.splitlines() if "==" in line]
    folder = Path(session.create_tmp()).resolve()
    listed, report = folder / "installed.txt", folder / "audit.json"
    listed.write_text("\n".join(lines) + "\n", encoding="utf-8")
    report.unlink(missing_ok=True)
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "-r", str(listed)]
    options += ["--format", "json", "--output", str(report), *session.posargs]
    # 1: it found something, which the report has, or it could not ask, and there is no report.
    session.run("pip-audit", *options, success_codes=[0, 1])
    rows = json.loads(report.read_text("utf-8"))["dependencies"] if report.exists() else []
    unknown = [row["name"] for row in rows if "skip_reason" in row]
    found = [
        f"{row['name']} {row['version']}: {one['id']}, mended in {', '.join(one['fix_versions']) or 'no release'}"
        for row in rows
        for one in row.get("vulns", ())
    ]
    if len(unknown) == len(rows):
        session.error(
            "NOTHING was audited, the database cannot be reached: it needs https access to pypi.org;"
            " `-- -s osv` asks api.osv.dev instead"
        )
    if found or unknown:
        missing = [f"not audited, since the database does not have them: {', '.join(unknown)}"]
        session.error("\n".join([*found, *(missing if unknown else [])]))
    session.log(f"no known vulnerability in {len(rows)} packages")


@nox.session(default=False, requires=["wheels_native"])
def fuzz(session: nox.Session) -> None:
    """Feed changed inputs to ops, checkpoint readers, YAML and commands; `-- gguf --count 100000 --seed 1`."""
    prepare(session)
    install_wheels(session, PACKAGES, "numpy", extras="[all]")
    session.run("python", "tests/fuzz/fuzz.py", *session.posargs)


@nox.session(default=False, requires=["wheels_native"])
def families(session: nox.Session) -> None:
    """Compare all causal models of transformers at each depth with stock: `-- --all`, or some: `-- llama gpt_neo`."""
    prepare(session)
    install_wheels(session, PACKAGES, "numpy", extras="[all]")
    session.env.update(WORKER_ENV, HF_HUB_OFFLINE="1")
    posargs = session.posargs or ["--all"]
    if "--all" in posargs and "--write" not in posargs:
        posargs = [*posargs, "--write", "docs/data/model_families.tsv"]
    session.run("python", "tools/model_families.py", *posargs)

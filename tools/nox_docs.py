# SPDX-License-Identifier: Apache-2.0
"""Sessions that build the documentation, and measure what its pages show."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterable

import nox

from nox_common import PACKAGES, REPORTS, ROOT, install_wheels, prepare


@nox.session(requires=["wheels_native"])
def docs(session: nox.Session) -> None:
    """Build the documentation with warnings as errors and run its examples."""
    prepare(session)
    tools = ("sphinx", "myst-parser", "furo", "sphinx-design", "numpy")
    install_wheels(session, PACKAGES, *tools, extras="[cpu]")
    common = ["-n", "-W", "--keep-going", "-j", "auto", "-d", "docs/_build/doctrees", "docs"]
    session.run("sphinx-build", "-b", "html", *common, "docs/_build/html")
    session.run("sphinx-build", "-b", "doctest", *common, "docs/_build/doctest")
    session.log("open docs/_build/html/index.html")


@nox.session(default=False, requires=["docs"])
def screenshots(session: nox.Session) -> None:
    """Open the documentation in headless Chromium; pictures of eight pages in reports/screenshots."""
    prepare(session)
    session.install("playwright")
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.run("playwright", "install", "chromium")
    pictures = str(REPORTS / "screenshots")
    session.run("python", "tools/screenshots.py", "docs/_build/html", pictures, *session.posargs)


@nox.session(default=False, requires=["docs"])
def site(session: nox.Session) -> None:
    """Add the documentation to public/, a folder for any web server: a folder per version, and links to the newest."""
    session.run(
        "python", "tools/make_site.py", "docs/_build/html", "public", version_of("ipex-core")
    )


def version_of(package: str) -> str:
    """Return the version of a package in the tree."""
    text = next((ROOT / "packages" / package / "src").glob("*/_version.py")).read_text("utf-8")
    return text.split('"')[-2]


#: Where the page of all tables takes its nightly ones from. The other files in docs/data stay: texts are about them.
NIGHTLY = ROOT / "docs" / "data" / "nightly"
BENCH_KINDS = ("ops", "peers", "models", "llm", "train")
#: Minutes of each kind. The installation, which builds llama.cpp from its sources, takes a quarter of an hour more
#: and everything together an hour; of the short form, which takes wheels only, ten minutes.
BENCH_MINUTES = {"ops": 8.0, "peers": 6.0, "models": 11.0, "llm": 11.0, "train": 7.0}
SHORT_MINUTES = {"ops": 1.0, "peers": 1.5, "models": 2.0, "llm": 1.4, "train": 1.0}
SHORT = ("--size", "tiny", "--seconds", "1")
#: The cases of the short form, so that each has time for all engines; where nothing is named all.
SHORT_CASES = {
    "peers": ("linear", "attention"),
    "models": ("minilm", "resnet50"),
    "train": ("dlrm",),
}
#: What `ipex bench` compares with; one line each, so that one that cannot be installed leaves the others.
BENCH_ENGINES = (
    ("torchao",),
    ("openvino", "nncf"),
    ("onnxruntime", "onnx", "onnx-ir"),
    ("llama-cpp-python", "gguf"),
    ("zentorch~=2.13.0",),  # of the torch in constraints.txt
)


@nox.session(default=False, requires=["wheels_native"])
def bench(session: nox.Session) -> None:
    """Measure ops, models, language models and training against every engine: `ipex bench`.

    Writes reports/bench-KIND.json, .md and .png; `-- --publish` also puts the JSON where the page of all tables takes
    its nightly ones from. Names of kinds come first and take only those: `-- llm train`. Other arguments go to the
    commands, to ops those that it has. All of it takes an hour at most, and `-- --short`, which takes the smallest
    sizes and only engines with a wheel, ten minutes: an engine that is slow, and cases that the time does not reach,
    are listed as such.
    `--minutes 60` gives each kind another time.
    """
    prepare(session)
    install_wheels(session, PACKAGES, extras="[demo]")
    # Engines that are not to be had for this Python or platform are listed by the tables as not installed.
    short = "--short" in session.posargs
    # Building an engine from its sources takes longer than the short form.
    wheels_only = ("--only-binary", ":all:") if short else ()
    for engine in BENCH_ENGINES:
        session.install(*wheels_only, *engine, success_codes=[0, 1])
    REPORTS.mkdir(exist_ok=True)
    own = {"--publish", "--short"}
    options = [option for option in session.posargs if option not in own]
    kinds = list(itertools.takewhile(BENCH_KINDS.__contains__, options))
    given = options[len(kinds) :]
    failed = []
    for kind in kinds or BENCH_KINDS:
        minutes = str((SHORT_MINUTES if short else BENCH_MINUTES)[kind])
        options = [*(SHORT if short else ()), "--minutes", minutes, *given]
        files = {"json": f"bench-{kind}.json", "plot": f"bench-{kind}.png"}
        if kind == "ops":
            command = ["ops", *of_ops(options)]
        else:
            command = [*(["ops", "--peers"] if kind == "peers" else [kind]), *options]
            files["markdown"] = f"bench-{kind}.md"
        command += SHORT_CASES.get(kind, ()) if short else ()
        for option, name in files.items():
            (REPORTS / name).unlink(missing_ok=True)
            command += [f"--{option}", str(REPORTS / name)]
        try:
            # 1: an engine of ours failed; the table of that kind says which.
            session.run("ipex", "bench", *command, success_codes=[0, 1])
        except nox.command.CommandFailed:
            failed.append(kind)  # the other tables are still wanted
            continue
        result = REPORTS / files["json"]
        if "--publish" in session.posargs and result.exists():
            NIGHTLY.mkdir(parents=True, exist_ok=True)
            shutil.copy(result, NIGHTLY / f"{kind}.json")
    if failed:
        session.error(f"ipex bench failed for {', '.join(failed)}")


def of_ops(options: Iterable[str]) -> list[str]:
    """Return those of the options of `ipex bench` that the kind ops has and that mean the same there."""
    found: list[str] = []
    rest = iter(options)
    for option in rest:
        name, equals, _ = option.partition("=")
        if name in {"--size", "--threads", "--dtype", "--minutes"}:
            found += [option] if equals else [option, next(rest, "")]
    return found

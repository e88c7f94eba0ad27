# SPDX-License-Identifier: Apache-2.0
"""Run the CPU tests of Intel Extension for PyTorch, unchanged, with our alias, and compare with what is expected here.

    git clone --branch v2.8.0+cpu https://github.com/intel/intel-extension-for-pytorch ../ipex
    nox -s ipex_suite -- ../ipex                    # fails where a test does worse than tests/data/ipex_suite.tsv says
    nox -s ipex_suite -- ../ipex --only test_mha.py test_rope.py
    nox -s ipex_suite -- ../ipex --update           # writes the table, and the rates in docs/migration.md
    nox -s ipex_suite -- ../ipex --update --only test_rope.py -k test_rope      # of these tests

Nothing of that suite is copied: the table has the names of its tests, the outcome that is expected, and the reason
where it is not "passed". A reason begins with its kind:

    private      needs a private name of IPEX
    nodes        looks for node names in a TorchScript or FX graph
    log          reads the log of oneDNN or the verbose output of IPEX
    environment  needs a package, a file of that repository's history, a network, or another CPU
    stock        fails in torch or transformers themselves, in the releases used here
    open         what IPEX does and ipex does not do, or does otherwise

The first three are no public API. Each file runs in a process of its own. A test that
ends its process, or runs longer than the limit, is recorded as "crashed" or "timeout", and the file goes on with the
next one. Tests that loop over hundreds of shapes, or compile each of them, take minutes on two busy cores.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["Row", "classify", "compare", "main", "merge", "rates", "read", "run_file", "write"]

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "data" / "ipex_suite.tsv"
PAGE = ROOT / "docs" / "migration.md"
START, END = "<!-- ipex_suite: start -->", "<!-- ipex_suite: end -->"

OUTCOMES = ("passed", "failed", "skipped", "crashed", "timeout")
#: Seconds for a file to be imported, and for its process to end.
AROUND = 300.0
#: Kinds of reasons that are not about public API and ops.
PRIVATE = ("private", "nodes", "log")
KINDS = (*PRIVATE, "environment", "stock", "open")

HEADER = """\
# SPDX-License-Identifier: Apache-2.0
# What the tests of Intel Extension for PyTorch 2.8 (tests/cpu, tag v2.8.0+cpu) do here: test, outcome, reason;
# separated by tabs. `python tools/ipex_suite.py PATH --update` writes it; reasons are kept while the outcome stays.
"""


class Row(NamedTuple):
    """One test of the suite.

    Attributes:
        test: ``test_mha.py::TestClass::test_name``.
        outcome: One of `OUTCOMES`.
        reason: Why it does not pass, ``kind: text``; empty where it passes.
    """

    test: str
    outcome: str
    reason: str = ""

    @property
    def kind(self) -> str:
        """The first word of the reason."""
        return self.reason.partition(":")[0]


def read(path: Path = TABLE) -> dict[str, Row]:
    """Return the rows of a table by test; none if there is no file."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    rows = [Row(*f"{line}\t\t".split("\t")[:3]) for line in lines if line]
    return {row.test: row for row in rows}


def write(rows: Mapping[str, Row], path: Path = TABLE) -> None:
    """Write a table, sorted by test."""
    lines = ["\t".join(rows[test]).rstrip("\t") for test in sorted(rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(HEADER + "\n".join(lines) + "\n", "utf-8")


#: What the text of a failure says about its kind, as patterns: the first that is found decides. (That an op is not
#: offered is no matter of private names.)
SIGNS: tuple[tuple[str, str], ...] = (
    (r"PrivateName|is a private name", "private"),
    (
        r"intel_extension_for_pytorch\.\S+ is not offered|No module named '?intel_extension_",
        "private",
    ),
    (r"has no attribute '(_|trace_graph|params_attr|batch_size_collapsed)", "private"),
    (r"_ipex_optimize_hit_count|hit once of ipex", "log"),
    (r"(onednn|dnnl)_verbose|implicit FP32 to BF16", "log"),
    (r"\| .*(\.kind\(\)|graph|_nodes)|AssertionError: graph\(%", "nodes"),
    (r"Expected to (not )?find|not found in node list", "nodes"),
    (r"No module named|No such file|[Cc]onnection|couldn't connect|offline", "environment"),
)


def classify(outcome: str, text: str) -> str:
    """Return the reason to write for an outcome that has none yet, from the text of the failure."""
    if outcome == "passed":
        return ""
    # Without what differs between runs and machines: graphs, folders, how to repeat the test.
    first = re.sub(r"graph\(%.*", "a graph", " ".join(text.split()))
    first = re.sub(r"(/[\w.+-]+)+/", "", first.partition(" To execute this test")[0])[:160].rstrip()
    if outcome == "skipped":
        return f"environment: {first.removeprefix('Skipped: ').removeprefix('SkipTest: ')}"
    flat = " ".join(text.split())  # the statement that failed may have several lines
    kind = next((kind for sign, kind in SIGNS if re.search(sign, flat)), "open")
    return f"{kind}: {first or outcome}"


def merge(
    old: Mapping[str, Row], found: Mapping[str, tuple[str, str]], whole: bool = True
) -> dict[str, Row]:
    """Return the table after a run.

    Args:
        old: The table before. Rows of files that did not run stay; tests of files that ran and are gone do not.
        found: test -> outcome and text.
        whole: Whether files ran as a whole; else tests that did not run stay.
    """
    ran = {test.partition("::")[0] for test in found} if whole else set()
    rows = {test: row for test, row in old.items() if test.partition("::")[0] not in ran}
    for test, (outcome, text) in found.items():
        before = old.get(test)
        same = before is not None and before.outcome == outcome and before.reason
        reason = before.reason if same and before else classify(outcome, text)
        rows[test] = Row(test, outcome, reason)
    return rows


def compare(
    expected: Mapping[str, Row], found: Mapping[str, tuple[str, str]]
) -> tuple[list[str], list[str]]:
    """Return what does worse than expected, and what does better or is new, as lines to print."""
    worse, better = [], []
    for test, (outcome, text) in sorted(found.items()):
        row = expected.get(test)
        line = f"{test}: {outcome}, expected {row.outcome if row else 'no such test'}"
        if row is None:
            better.append(line)
        elif row.outcome == "passed" and outcome != "passed":
            worse.append(f"{line}\n    {' '.join(text.split())[:300]}")
        elif row.outcome != outcome:
            better.append(line)
    ran = {test.partition("::")[0] for test in found}
    for test, row in expected.items():
        if test not in found and test.partition("::")[0] in ran and row.outcome == "passed":
            worse.append(f"{test}: did not run, expected passed")
    return worse, better


def rates(rows: Iterable[Row]) -> str:
    """Return the rates as Markdown: what the page shows between its two marks."""
    rows = list(rows)
    files = len({row.test.partition("::")[0] for row in rows})
    ran = [row for row in rows if row.outcome != "skipped" and row.kind != "environment"]
    kinds = collections.Counter(row.kind for row in ran if row.outcome != "passed")
    public = [row for row in ran if row.outcome == "passed" or row.kind not in PRIVATE]
    passed = sum(row.outcome == "passed" for row in ran)
    ours = len(public) - kinds["stock"]

    def share(of: int) -> str:
        return f"{passed} of {of} ({100 * passed / of:.0f} %)" if of else "none"

    lines = [
        "| Tests of IPEX 2.8 | Here |",
        "|---|---|",
        f"| in the table | {len(rows)} tests of {files} files |",
        f"| of public API and ops: pass | {share(len(public))} |",
        f"| the same without those that fail in torch or transformers themselves: pass | {share(ours)} |",
        f"| all that run: pass | {share(len(ran))} |",
        f"| fail: need private names | {kinds['private']} |",
        f"| fail: look for node names in a graph | {kinds['nodes']} |",
        f"| fail: read the log of oneDNN | {kinds['log']} |",
        f"| fail: in torch or transformers themselves | {kinds['stock']} |",
        f"| fail: behave otherwise here | {kinds['open']} |",
    ]
    return "\n".join(lines)


def put(text: str, page: Path = PAGE) -> None:
    """Put the rates between the marks of the page.

    Raises:
        ValueError: The page has no marks.
    """
    old = page.read_text("utf-8")
    before, start, rest = old.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{page}: must have the lines {START} and {END}")
    page.write_text(f"{before}{START}\n{text}\n{END}{after}", "utf-8")


# --- running ----------------------------------------------------------------------------------------------------------


def _records(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    lines = path.read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _fold(records: Iterable[Mapping[str, str]]) -> tuple[dict[str, tuple[str, str]], str]:
    """Return the outcomes by test, and the test that has started and has none, "" if there is no such test."""
    found: dict[str, tuple[str, str]] = {}
    open_test = ""
    for record in records:
        test, outcome = record["test"], record["outcome"]
        if outcome == "started":
            open_test = test
            continue
        open_test = "" if open_test == test else open_test
        # A test with subtests fails if one of them does, whatever comes after.
        if found.get(test, ("",))[0] != "failed":
            found[test] = (outcome, record["text"])
    return found, open_test


def run_file(
    path: Path, limit: float, python: str = sys.executable, more: Sequence[str] = ()
) -> dict[str, tuple[str, str]]:
    """Run one file of tests in processes of its own, until each of its tests has an outcome.

    Args:
        path: The file.
        limit: Seconds that one test may take.
        python: The interpreter that has the packages.
        more: Further arguments of pytest.

    Returns:
        test -> outcome and text.
    """
    found: dict[str, tuple[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        record, skip, log = (Path(folder, name) for name in ("record", "skip", "log"))
        env = dict(os.environ)
        env["IPEX_SUITE_RECORD"], env["IPEX_SUITE_SKIP"] = str(record), str(skip)
        env["PYTHONPATH"] = os.pathsep.join(
            [str(Path(__file__).parent), *filter(None, [env.get("PYTHONPATH")])]
        )
        options = ["-p", "ipex_suite_plugin", "-p", "no:cacheprovider", "-p", "no:xdist", "-q"]
        command = [python, "-m", "pytest", *options, "--tb=no", "-c", os.devnull, *more]
        while True:
            record.unlink(missing_ok=True)
            skip.write_text("\n".join(found), "utf-8")
            with log.open("w") as output:
                process = subprocess.Popen(
                    [*command, "--rootdir", str(path.parent), path.name],
                    cwd=path.parent,
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                stopped = _wait(process, record, limit)
            new, open_test = _fold(_records(record))
            more_found = bool(new.keys() - found.keys())
            found.update(new)
            if open_test:
                # Subtests may have failed before; the end of the process says more.
                outcome = "timeout" if stopped else "crashed"
                found[open_test] = (outcome, f"exit status {process.returncode}")
            elif stopped or process.returncode not in (0, 1, 2, 5):
                if not more_found:  # before the first test, or after the last
                    tail = log.read_text("utf-8", "replace")[-400:]
                    if not found:
                        outcome = "timeout" if stopped else "crashed"
                        found[path.name] = (outcome, tail)
                    return found
            else:
                return found


def _wait(process: subprocess.Popen[bytes], record: Path, limit: float) -> bool:
    """Wait for a process; return whether it was ended because it wrote no outcome within the limit.

    Before the first test it imports torch and the file, and after the last one it ends: `AROUND` seconds are for that.
    """
    size, since, allowed = 0, time.monotonic(), max(limit, AROUND)
    while process.poll() is None:
        now = record.stat().st_size if record.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
            last = record.read_text("utf-8").rpartition("\n{")[2]
            allowed = limit if '"started"' in last else max(limit, AROUND)
        if time.monotonic() - since > allowed:
            os.killpg(process.pid, 9)
            process.wait()
            return True
        time.sleep(0.1)
    return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; return 1 if a test does worse than the table says."""
    parser = argparse.ArgumentParser("ipex_suite", description=str(__doc__).partition("\n")[0])
    parser.add_argument("path", type=Path, help="a checkout of intel-extension-for-pytorch")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="only these files")
    parser.add_argument("--update", action="store_true", help="write the table and the rates")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for one test (1200)")
    parser.add_argument("--jobs", type=int, default=1, help="files at the same time (1)")
    parser.add_argument("--json", type=Path, help="write outcomes and texts of failures here")
    parser.add_argument("-k", default="", help="as for pytest: only these tests")
    args = parser.parse_args(argv)
    folder = args.path.resolve() / "tests" / "cpu"
    files = sorted(folder.glob("test_*.py"))
    if args.only:
        files = [file for file in files if file.name in args.only]
    if not files:
        parser.error(
            f"path: must be a checkout of intel-extension-for-pytorch with the files to run in tests/cpu, got"
            f" {args.path}; git clone --branch v2.8.0+cpu https://github.com/intel/intel-extension-for-pytorch"
        )
    found: dict[str, tuple[str, str]] = {}
    more = ["-k", args.k] if args.k else []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        jobs = {pool.submit(run_file, f, args.limit, sys.executable, more): f for f in files}
        for job in concurrent.futures.as_completed(jobs):
            new = job.result()
            found.update(new)
            counts = collections.Counter(outcome for outcome, _ in new.values())
            shown = ", ".join(f"{counts[o]} {o}" for o in OUTCOMES if counts[o])
            print(f"{jobs[job].name}: {shown or 'no tests'}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(found, indent=1), "utf-8")
    expected = read()
    if args.k:
        expected = {test: row for test, row in expected.items() if test in found}
    worse, better = compare(expected, found)
    for title, lines in (("better or new", better), ("WORSE", worse)):
        if lines:
            print(f"\n{title}:", *lines, sep="\n  ")
    if args.update:
        rows = merge(read(), found, whole=not args.k)
        write(rows)
        put(rates(rows.values()))
        print(f"\nwritten: {TABLE.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")
        return 0
    print(f"\n{len(worse)} worse than expected, {len(better)} better or new (--update writes them)")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

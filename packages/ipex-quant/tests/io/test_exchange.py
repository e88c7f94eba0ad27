# SPDX-License-Identifier: Apache-2.0
"""A saved folder is there as a whole, whenever the process that replaces it is killed."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading

import pytest

import ipex_quant
from ipex_quant.util import folders


def make(folder, content):
    folder.mkdir(parents=True)
    (folder / "file").write_text(content)


def killed(target, point, exchange):
    """Replace a folder in a process that ends at the n-th call of something that changes names or removes."""
    code = f"""
import os, sys, shutil
from pathlib import Path
sys.path.insert(0, {os.path.dirname(folders.__file__)!r})
import folders
count = 0

def wrap(function):
    def wrapped(*args, **kwargs):
        global count
        count += 1
        if count > {point}:
            os._exit(9)
        return function(*args, **kwargs)
    return wrapped

if not {exchange}:
    folders._exchange = lambda one, other: False
folders._exchange = wrap(folders._exchange)
Path.rename, shutil.rmtree, Path.mkdir = map(wrap, (Path.rename, shutil.rmtree, Path.mkdir))
with folders.replacing(Path({str(target)!r})) as work:
    (work / "file").write_text("new")
"""
    return subprocess.run([sys.executable, "-S", "-c", code], check=False).returncode


def beside(target):
    return sorted(p.name for p in target.parent.iterdir() if p != target)


@pytest.mark.skipif(sys.platform != "linux", reason="the exchange is Linux's")
def test_a_kill_leaves_the_old_folder_or_the_new_one(tmp_path):
    seen = set()
    for point in range(20):
        target = tmp_path / str(point) / "saved"
        make(target, "old")
        code = killed(target, point, True)
        assert code in (0, 9)
        seen.add((target / "file").read_text())
        # The next one succeeds, and removes what was left.
        assert killed(target, 99, True) == 0
        assert (target / "file").read_text() == "new" and beside(target) == []
        if code == 0:
            break
    assert code == 0 and seen == {"old", "new"}


def test_without_an_exchange_the_next_call_brings_the_folder_back(tmp_path):
    lost = 0
    for point in range(20):
        target = tmp_path / str(point) / "saved"
        make(target, "old")
        code = killed(target, point, False)
        lost += not target.exists()
        folders._clean(target)
        assert (target / "file").read_text() in ("old", "new") and beside(target) == []
        if code == 0:
            break
    assert code == 0 and lost == 1


def test_a_system_without_the_exchange(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    target = tmp_path / "saved"
    make(target, "old")
    with folders.replacing(target) as work:
        (work / "file").write_text("new")
    assert (target / "file").read_text() == "new" and beside(target) == []
    with pytest.raises(OSError, match="full"), folders.replacing(target) as work:
        raise OSError(errno.ENOSPC, "full")
    assert (target / "file").read_text() == "new" and beside(target) == []


def test_what_is_left_is_removed_and_nothing_else(tmp_path):
    done = subprocess.run(
        [sys.executable, "-S", "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
    )
    dead, alive = int(done.stdout), os.getpid()
    gone = [f".saved.{dead}.partial", f".saved.{dead}.00ff.partial", f".saved.{dead}.old"]
    kept = [
        f".saved.{alive}.00ff.partial",
        f".other.{dead}.partial",
        ".saved.partial",
        f"saved.{dead}.partial",
    ]
    for name in (*gone, *kept):
        make(tmp_path / name, "x")
    with folders.replacing(tmp_path / "saved") as work:
        (work / "file").write_text("new")
    assert beside(tmp_path / "saved") == sorted(kept)


def test_threads_that_save_to_one_place(tmp_path):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(32, 16)).eval()
    ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(weight_dtype=1), progress=False)
    failures = []

    def work():
        try:
            for _ in range(5):
                ipex_quant.save(model, tmp_path / "saved")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures
    again = ipex_quant.load(tmp_path / "saved", torch.nn.Sequential(torch.nn.Linear(32, 16)))
    x = torch.randn(2, 32)
    assert torch.equal(again(x), model(x)) and beside(tmp_path / "saved") == []


def test_a_link_stays_a_link(tmp_path):
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(32, 16)).eval()
    ipex_quant.quantize_linears(model, ipex_quant.woq_qconfig(weight_dtype=1), progress=False)
    ipex_quant.save(model, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    ipex_quant.save(model, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and beside(tmp_path / "real") == ["link"]

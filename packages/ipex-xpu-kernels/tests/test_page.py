# SPDX-License-Identifier: Apache-2.0
"""The code of the page about the device, followed as a reader would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_checks import DEVICE

blocks = pytest.importorskip("docs_code").blocks  # the tools are not beside an installed package

PAGE = Path(__file__).resolve().parents[3] / "docs" / "xpu.md"
pytestmark = pytest.mark.usefixtures("needs_device")


@pytest.mark.skipif(not PAGE.exists(), reason="the documentation is not in this tree")
def test_page(tmp_path: Path) -> None:
    pytest.importorskip("ipex")
    shown = (block.text for block in blocks(PAGE) if block.language == "python")
    # The files of an extension: test_extensions.py builds one.
    code = [text for text in shown if not text.startswith("# setup.py")]
    assert len(code) >= 4
    done = subprocess.run(
        [sys.executable, "-c", "\n".join([*code, "print(ipex.xpu.fallback_stats())"])],
        env={**os.environ, "IPEX_XPU_DEVICE": DEVICE, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "aten::i0" in done.stdout

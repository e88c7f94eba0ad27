# SPDX-License-Identifier: Apache-2.0
"""What the tests of ipex-quant share: ``import packers`` and ``import ggufs`` work in each of them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

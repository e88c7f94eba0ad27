# SPDX-License-Identifier: Apache-2.0
"""What the tests of ipex-quant share: the modules beside them can be imported in each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

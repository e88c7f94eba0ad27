# SPDX-License-Identifier: Apache-2.0
"""Deprecated: the names of `ipex_core.library`, which code on the recipes of 0.1 imports. This file goes in 0.3."""

from ipex_core.library.checks import *  # noqa: F403
from ipex_core.library.kernels import *  # noqa: F403
from ipex_core.library.spec import *  # noqa: F403

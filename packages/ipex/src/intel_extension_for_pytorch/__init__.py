# SPDX-License-Identifier: Apache-2.0
"""The old import name: ``import intel_extension_for_pytorch as ipex`` gives the module `ipex` itself.

Dotted names below it (``intel_extension_for_pytorch.nn``) are found by `ipex._alias` and are the same modules, too.
"""

from __future__ import annotations

import sys

import ipex

sys.modules[__name__] = ipex

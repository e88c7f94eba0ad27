# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_core.nn import *
from intel_extension_for_pytorch.nn import functional as functional

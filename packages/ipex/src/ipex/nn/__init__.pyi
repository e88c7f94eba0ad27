# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_core.nn import *
from ipex.nn import functional as functional

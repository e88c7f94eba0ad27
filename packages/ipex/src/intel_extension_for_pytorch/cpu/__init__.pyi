# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex.cpu import *
from intel_extension_for_pytorch.cpu import runtime as runtime

# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex import *
from ipex import __version__ as __version__
from intel_extension_for_pytorch import llm as llm
from intel_extension_for_pytorch import quantization as quantization
from intel_extension_for_pytorch import runtime as runtime
from intel_extension_for_pytorch import xpu as xpu

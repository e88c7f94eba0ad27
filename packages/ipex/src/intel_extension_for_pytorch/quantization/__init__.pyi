# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_quant import *
from intel_extension_for_pytorch.quantization import fp8 as fp8

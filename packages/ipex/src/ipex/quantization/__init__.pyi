# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_quant import *
from ipex.quantization import fp8 as fp8

# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_core.optim.tpp import *

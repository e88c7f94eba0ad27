# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex import *
from ipex import __version__ as __version__
from intel_extension_for_pytorch import amp as amp
from intel_extension_for_pytorch import config as config
from intel_extension_for_pytorch import cpu as cpu
from intel_extension_for_pytorch import distributed as distributed
from intel_extension_for_pytorch import errors as errors
from intel_extension_for_pytorch import jit as jit
from intel_extension_for_pytorch import llm as llm
from intel_extension_for_pytorch import nn as nn
from intel_extension_for_pytorch import optim as optim
from intel_extension_for_pytorch import quantization as quantization
from intel_extension_for_pytorch import runtime as runtime
from intel_extension_for_pytorch import testing as testing
from intel_extension_for_pytorch import xpu as xpu

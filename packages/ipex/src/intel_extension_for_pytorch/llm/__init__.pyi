# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_llm import *
from intel_extension_for_pytorch.llm import functional as functional
from intel_extension_for_pytorch.llm import generation as generation
from intel_extension_for_pytorch.llm import modules as modules
from intel_extension_for_pytorch.llm import quantization as quantization
from intel_extension_for_pytorch.llm import utils as utils

# SPDX-License-Identifier: Apache-2.0
# Written by tools/generate_stubs.py
from ipex_llm import *
from ipex.llm import functional as functional
from ipex.llm import generation as generation
from ipex.llm import modules as modules
from ipex.llm import quantization as quantization
from ipex.llm import utils as utils

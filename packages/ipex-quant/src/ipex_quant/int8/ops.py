# SPDX-License-Identifier: Apache-2.0
"""The ops of INT8 models. ``import ipex`` loads them, so that programs that were saved find them."""

from ipex_quant.int8 import bag_op
from ipex_quant.int8.modules import conv

__all__ = ["bag_op", "conv"]

# SPDX-License-Identifier: Apache-2.0
"""The ops of INT8 models. ``import ipex`` loads them, so that programs that were saved find them."""

from ipex_quant import _int8_bag_op, _int8_conv

__all__ = ["_int8_bag_op", "_int8_conv"]

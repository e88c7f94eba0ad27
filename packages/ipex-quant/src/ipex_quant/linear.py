# SPDX-License-Identifier: Apache-2.0
"""Deprecated: the names of `ipex_quant.weight_only.linear`, which pickles of 0.1 contain. This file goes in 0.3."""

from ipex_quant.weight_only.linear import *  # noqa: F403

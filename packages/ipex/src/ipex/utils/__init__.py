# SPDX-License-Identifier: Apache-2.0
"""Helpers under the names of Intel Extension for PyTorch."""

from ipex.utils import channels_last_1d

__all__ = ["channels_last_1d"]

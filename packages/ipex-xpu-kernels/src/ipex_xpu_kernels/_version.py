# SPDX-License-Identifier: Apache-2.0
"""The version of ipex-xpu-kernels; the only place that states it."""

__version__ = "0.2.0"

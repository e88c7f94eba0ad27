# SPDX-License-Identifier: Apache-2.0
"""The version of ipex-xpu-kernels; the only place that states it."""

__version__ = "0.1.0"

# SPDX-License-Identifier: Apache-2.0
"""Version of ipex-cpu-kernels."""

__version__ = "0.2.0"

# SPDX-License-Identifier: Apache-2.0
"""Version of ipex-runtime."""

__version__ = "0.2.0"

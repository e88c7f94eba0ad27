# SPDX-License-Identifier: Apache-2.0
"""IPEX's module path for helpers of layers: ``ipex.nn.utils``."""

# SPDX-License-Identifier: Apache-2.0
"""Fusion of modules that `ipex.optimize` traces."""

# SPDX-License-Identifier: Apache-2.0
"""Readers of weights that other tools quantized."""

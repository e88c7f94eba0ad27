# SPDX-License-Identifier: Apache-2.0
"""Quantized models in folders: save and load."""

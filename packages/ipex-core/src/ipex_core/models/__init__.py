# SPDX-License-Identifier: Apache-2.0
"""Whole models with kernels of their own."""

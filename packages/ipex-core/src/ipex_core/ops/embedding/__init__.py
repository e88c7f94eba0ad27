# SPDX-License-Identifier: Apache-2.0
"""Embedding bags and feature interaction."""

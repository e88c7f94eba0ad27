# SPDX-License-Identifier: Apache-2.0
"""Normalization, alone and fused with its neighbors."""

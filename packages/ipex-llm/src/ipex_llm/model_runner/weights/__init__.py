# SPDX-License-Identifier: Apache-2.0
"""Packed weights of decoder layers: dense, weight-only, experts."""

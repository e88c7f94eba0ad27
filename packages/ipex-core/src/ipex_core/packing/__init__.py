# SPDX-License-Identifier: Apache-2.0
"""Packed weights: dense, INT8, weight-only, experts, oneDNN."""

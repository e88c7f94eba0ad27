# SPDX-License-Identifier: Apache-2.0
"""Fused optimizer steps."""

# SPDX-License-Identifier: Apache-2.0
"""Optimized layers in place of the user's modules, and the way back."""

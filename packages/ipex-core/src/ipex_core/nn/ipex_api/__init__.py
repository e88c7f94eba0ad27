# SPDX-License-Identifier: Apache-2.0
"""Layers and functions with the signatures of IPEX."""

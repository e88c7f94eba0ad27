# SPDX-License-Identifier: Apache-2.0
"""Fusion of TorchScript graphs."""

# SPDX-License-Identifier: Apache-2.0
"""Merging of linear layers that are fed by the same input."""

from __future__ import annotations

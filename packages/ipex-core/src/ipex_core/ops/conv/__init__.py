# SPDX-License-Identifier: Apache-2.0
"""Convolutions on packed weights."""

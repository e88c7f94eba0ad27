# SPDX-License-Identifier: Apache-2.0
"""Weights, programs and the runner of a decoder."""

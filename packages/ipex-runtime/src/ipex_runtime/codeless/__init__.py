# SPDX-License-Identifier: Apache-2.0
"""Codeless optimisation: runs a script whose models are optimised at their first call."""

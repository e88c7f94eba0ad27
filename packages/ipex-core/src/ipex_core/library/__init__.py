# SPDX-License-Identifier: Apache-2.0
"""What defines an op: its specification, checks and derivatives."""

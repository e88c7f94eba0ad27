# SPDX-License-Identifier: Apache-2.0
"""Collectives in shared memory."""

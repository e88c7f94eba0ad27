# SPDX-License-Identifier: Apache-2.0
"""Passes of `ipex.optimize`, one file each."""

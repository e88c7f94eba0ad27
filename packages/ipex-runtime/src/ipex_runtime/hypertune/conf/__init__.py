# SPDX-License-Identifier: Apache-2.0
"""The configuration of a search."""

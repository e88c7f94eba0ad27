# SPDX-License-Identifier: Apache-2.0
"""Paged cache of keys and values, and its transformers interface."""

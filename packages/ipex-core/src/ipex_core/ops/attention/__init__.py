# SPDX-License-Identifier: Apache-2.0
"""Attention: prefill, decode, variable lengths, paged caches."""

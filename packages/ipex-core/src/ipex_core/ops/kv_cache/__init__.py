# SPDX-License-Identifier: Apache-2.0
"""Writing keys and values into a paged cache."""

# SPDX-License-Identifier: Apache-2.0
"""INT8 modules that `convert` puts in place of float ones."""

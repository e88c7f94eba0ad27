# SPDX-License-Identifier: Apache-2.0
"""Search for the INT8 recipe that keeps a model's accuracy."""

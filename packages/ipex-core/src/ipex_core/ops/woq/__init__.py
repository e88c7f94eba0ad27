# SPDX-License-Identifier: Apache-2.0
"""Linear layers on weight-only quantized weights."""

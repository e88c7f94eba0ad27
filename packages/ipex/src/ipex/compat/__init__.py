# SPDX-License-Identifier: Apache-2.0
"""Names of Intel Extension for PyTorch: modules, native names, ops."""

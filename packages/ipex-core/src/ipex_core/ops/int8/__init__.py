# SPDX-License-Identifier: Apache-2.0
"""INT8 products and quantization of tensors."""

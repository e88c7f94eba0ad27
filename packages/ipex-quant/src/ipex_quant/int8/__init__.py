# SPDX-License-Identifier: Apache-2.0
"""INT8 quantization: prepare and convert."""

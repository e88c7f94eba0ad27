# SPDX-License-Identifier: Apache-2.0
"""Model folders: reading, writing and quantizing safetensors files piece by piece."""

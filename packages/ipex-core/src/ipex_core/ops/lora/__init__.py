# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of batched rows."""

# SPDX-License-Identifier: Apache-2.0
"""Files: safetensors, JSON, folders that appear when they are complete."""

# SPDX-License-Identifier: Apache-2.0
"""Weight-only quantization: layers, conversion of models, GPTQ, AWQ, checkpoints."""

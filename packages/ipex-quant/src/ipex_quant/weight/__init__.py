# SPDX-License-Identifier: Apache-2.0
"""One quantized weight: tensor, primitives, layouts."""

# SPDX-License-Identifier: Apache-2.0
"""Models and optimizers that train: master weights, fused steps."""

# SPDX-License-Identifier: Apache-2.0
"""State space models: causal convolution and selective scan."""

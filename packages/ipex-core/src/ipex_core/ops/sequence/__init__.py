# SPDX-License-Identifier: Apache-2.0
"""RNN-T decoding and sampling of tokens."""

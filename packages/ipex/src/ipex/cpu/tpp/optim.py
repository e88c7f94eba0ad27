# SPDX-License-Identifier: Apache-2.0
"""Optimizers and clipping of gradients; the same objects as in `ipex_core.optim.tpp`."""

from __future__ import annotations

from ipex_core.optim.tpp import SGD, AdamW, DistLamb, Lamb, clip_grad_norm_

__all__ = ["SGD", "AdamW", "DistLamb", "Lamb", "clip_grad_norm_"]

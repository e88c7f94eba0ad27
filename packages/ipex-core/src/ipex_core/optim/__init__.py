# SPDX-License-Identifier: Apache-2.0
"""Optimizers that torch does not have, and short names of some that it has.

`Lamb` and `Lars` run one fused op for each parameter. `ipex.optimize(model, optimizer=...)` makes SGD, Adagrad, Adam,
AdamW, Lamb and Lars update parameters in bfloat16 and float16, too.

Example:
    >>> import torch
    >>> from ipex_core.optim import Lamb
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = Lamb(model.parameters(), lr=1e-2)
    >>> model(torch.ones(3, 4)).sum().backward()
    >>> optimizer.step()
"""

from __future__ import annotations

from torch.optim import Adafactor, RMSprop

from ipex_core.optim._lamb import Lamb
from ipex_core.optim._lars import Lars, create_optimizer_lars

__all__ = ["Adafactor", "Lamb", "Lars", "RMSprop", "create_optimizer_lars"]

# SPDX-License-Identifier: Apache-2.0
"""Modules under the names that they had in 0.1, which pickles of optimized models and optimizers contain.

Deprecated: save such models again, with `torch.save` or better as a ``state_dict``. This file goes in 0.3.
"""

from __future__ import annotations

import sys

from ipex_core.optim import fused, master_weights
from ipex_core.optimization import records, training
from ipex_core.optimization.passes import cast

# The import of `ipex_core._optimize._cast` imports this module first and takes what it has entered.
sys.modules.update(
    {
        f"{__name__}._arguments": records,
        f"{__name__}._cast": cast,
        f"{__name__}._masters": master_weights,
        f"{__name__}._records": records,
        f"{__name__}._train_step": fused,
        f"{__name__}._training": training,
    }
)

# SPDX-License-Identifier: Apache-2.0
"""``ipexrun xpu --convert-fp64-to-fp32``: runs a script after ipex.xpu was told to make float64 numbers float32."""

from __future__ import annotations

import sys

from ipex_runtime.codeless import facade
from ipex_runtime.codeless._script import run


def main() -> None:
    """Run the rest of the command line."""
    import torch

    try:
        overrides = facade().xpu.overrides
    except ImportError as error:
        sys.exit(f"ipexrun: --convert-fp64-to-fp32 needs ipex.xpu: {error}")
    overrides.convert_default_dtype(torch.float64, torch.float32, True)
    run(sys.argv[1:])


if __name__ == "__main__":
    main()

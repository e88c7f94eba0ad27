# SPDX-License-Identifier: Apache-2.0
"""Layers in the form of Hugging Face's library ``kernels``, and the folder from which it loads them.

==================  ==================================================================================================
``RMSNorm``         in the place of modules with ``weight`` and ``variance_epsilon``
``SiLU``            in the place of the activation
``SiLUMLP``         in the place of modules with ``gate_proj``, ``up_proj`` and ``down_proj``
``rotary_pos_emb``  in the place of the function ``apply_rotary_pos_emb``
``Experts``         in the place of stacked experts with ``gate_up_proj`` and ``down_proj``, gated by SiLU
==================  ==================================================================================================

The folder has no code but an import of this module: the package ``ipex-llm`` must be installed where it is loaded.
`flash_attn_forward` is an attention function of transformers. The layers have no gradients: they are for inference.

    python -m ipex_llm.integrations.kernel_hub FOLDER
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.nn.moe import pack_experts
from ipex_core.optimization.transformers import attention_forward

__all__ = ["flash_attn_forward", "layers", "supports_flash_attn", "write_kernel_hub"]

_NAME, _VERSION = "ipex-kernels", 1
_SOURCE = '''# SPDX-License-Identifier: Apache-2.0
"""Layers of ipex; they need the package ipex-llm: pip install 'ipex[cpu]'."""

from ipex_llm.integrations.kernel_hub import flash_attn_forward, layers, supports_flash_attn

__all__ = ["flash_attn_forward", "layers", "supports_flash_attn"]
'''

# By these names transformers finds an attention function that takes the arguments of its own functions.
flash_attn_forward = attention_forward
supports_flash_attn = True


class RMSNorm(nn.Module):
    """``x / rms(x) * weight``."""

    has_backward = False
    can_torch_compile = True
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize the last dimension; the result has the dtype of ``hidden_states``."""
        op = torch.ops.ipex.rms_norm
        y: Tensor = op(hidden_states, self.weight, self.variance_epsilon)
        return y


class SiLU(nn.Module):
    """``x * sigmoid(x)``."""

    has_backward = False
    can_torch_compile = True

    def forward(self, input: Tensor) -> Tensor:
        """Compute element by element."""
        return nn.functional.silu(input)


class SiLUMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    has_backward = False
    can_torch_compile = True
    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block for ``x`` ``[..., H]``."""
        y: Tensor = self.down_proj(torch.ops.ipex.silu_mul(self.gate_proj(x), self.up_proj(x)))
        return y


class RotaryPosEmb(nn.Module):
    """Rotates the halves of heads."""

    has_backward = False
    can_torch_compile = True

    def forward(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return rotated copies of ``q`` and ``k``.

        Args:
            q: ``[B, heads, S, D]``, or with ``unsqueeze_dim=2`` ``[B, S, heads, D]``.
            k: The same with its own number of heads.
            cos: ``[B, S, D]``.
            sin: ``[B, S, D]``.
            unsqueeze_dim: Where the heads are.
        """
        heads_first = unsqueeze_dim == 1
        rows = [x.transpose(1, 2) if heads_first else x for x in (q, k)]
        batch, length, _, size = rows[0].shape
        if cos.shape[0] != batch:
            cos, sin = (t.expand(batch, -1, -1) for t in (cos, sin))
        tables = (t.reshape(batch * length, size) for t in (sin, cos))
        flat = [x.reshape(batch * length, x.shape[2], size) for x in rows]
        op = torch.ops.ipex.rotary_embedding_functional
        turned = [y.view(batch, length, -1, size) for y in op(*flat, *tables, size, True)]
        q, k = (y.transpose(1, 2) if heads_first else y for y in turned)
        return q, k


#: Packed weights of modules, with the parameters that they were made of and how often these had been written to.
_packed: weakref.WeakKeyDictionary[nn.Module, Any] = weakref.WeakKeyDictionary()


class Experts(nn.Module):
    """Experts that are gated by SiLU; their weights are packed at the first call, beside the parameters."""

    has_backward = False
    can_torch_compile = False
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of the results of the experts of each token.

        Args:
            hidden_states: ``[T, H]``.
            top_k_index: int64 ``[T, K]``.
            top_k_weights: ``[T, K]``.
        """
        given = (self.gate_up_proj, self.down_proj)
        state = tuple((id(p), -1 if p.is_inference() else p._version) for p in given)
        known = _packed.get(self)
        if known is None or known[0] != state:
            with torch.no_grad():
                known = state, pack_experts(*(p.detach() for p in given))
            _packed[self] = known
        experts = known[1]
        y: Tensor = torch.ops.ipex.fused_experts(
            *(hidden_states, experts.w13, experts.w2, top_k_weights.float(), top_k_index),
            *(experts.intermediate_size, "silu"),
        )
        return y


#: Where the library looks for layers.
layers = SimpleNamespace(
    RMSNorm=RMSNorm, SiLU=SiLU, SiLUMLP=SiLUMLP, rotary_pos_emb=RotaryPosEmb, Experts=Experts
)


def write_kernel_hub(folder: str | os.PathLike[str]) -> Path:
    """Write the folder of a kernel repository, for `kernels.get_local_kernel` and ``LocalLayerRepository``.

    Args:
        folder: Must not exist, or be empty.

    Returns:
        The folder of the one variant, ``FOLDER/build/torch-universal``.

    Raises:
        FileExistsError: The folder has something in it, or is a file.

    Example:
        >>> import tempfile
        >>> from ipex_llm.integrations.kernel_hub import write_kernel_hub
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in write_kernel_hub(folder).iterdir())
        ['__init__.py', 'metadata.json']
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            f"write_kernel_hub: folder must not exist or be empty, got {target}: choose a new one"
        )
    variant = target / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text(_SOURCE, encoding="utf-8")
    about = {
        "name": _NAME,
        "id": f"_{_NAME.replace('-', '_')}_{_VERSION}",
        "version": _VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    text = json.dumps(about, indent=2) + "\n"
    (variant / "metadata.json").write_text(text, encoding="utf-8")
    return variant


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("folder", type=Path, help="folder to write; must not exist, or be empty")
    try:
        print(write_kernel_hub(parser.parse_args().folder))
    except OSError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _main()

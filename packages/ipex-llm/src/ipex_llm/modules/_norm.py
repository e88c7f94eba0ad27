# SPDX-License-Identifier: Apache-2.0
"""Norms with a weight of their own, rotary embedding with its own tables, the parts of a Mamba layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ipex_core.library.spec import check
from ipex_core.nn.ipex_api import state_space
from ipex_core.nn.rope import rope_tables
from ipex_llm import functional
from ipex_llm.modules.utils import IPEXRuntimeCustomOps


def as_parameter(value: Tensor) -> nn.Parameter:
    """Return a parameter: the given one, or a new one without gradient on the same memory."""
    if isinstance(value, nn.Parameter):
        return value
    return nn.Parameter(value.detach(), requires_grad=False)


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32.

    Args:
        hidden_size: Size of the last dimension.
        eps: Added to the mean square.
        weight: ``[hidden_size]``; a parameter is shared, not copied. None: ones.

    Raises:
        OpArgumentError: ``weight`` has another shape.

    Example:
        >>> with torch.no_grad():
        ...     RMSNorm(2, 0.0)(torch.tensor([3.0, 4.0]))
        tensor([0.8485, 1.1314])
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(self, hidden_size: int, eps: float = 1e-6, weight: Tensor | None = None) -> None:
        super().__init__()
        if weight is not None:
            fits = list(weight.shape) == [hidden_size]
            check(fits, "RMSNorm", "weight", f"have shape [{hidden_size}]", list(weight.shape))
        self.hidden_size = hidden_size
        self.eps = self.variance_epsilon = eps
        self.weight = (
            nn.Parameter(torch.ones(hidden_size)) if weight is None else as_parameter(weight)
        )

    @classmethod
    def apply_function(cls, hidden_states: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Call `ipex_llm.functional.rms_norm`."""
        return functional.rms_norm(hidden_states, weight, eps)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., hidden_size]``."""
        return functional.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        """Return size and eps."""
        return f"{self.hidden_size}, eps={self.eps}"


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimensions, computed in float32.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the variance.
        weight: ``normalized_shape``; a parameter is shared, not copied. None for ones.
        bias: Likewise; None for zeros.

    Raises:
        OpArgumentError: ``weight`` or ``bias`` has another shape.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float,
        weight: Tensor | None,
        bias: Tensor | None = None,
    ) -> None:
        super().__init__()
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        for name, value in (("weight", weight), ("bias", bias)):
            if value is not None:
                fits = list(value.shape) == shape
                check(fits, "FastLayerNorm", name, f"have shape {shape}", list(value.shape))
        self.normalized_shape = tuple(shape)
        self.eps = eps
        self.weight = None if weight is None else as_parameter(weight)
        self.bias = None if bias is None else as_parameter(bias)

    @classmethod
    def apply_function(
        cls,
        hidden_states: Tensor,
        normalized_shape: int | Sequence[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Call `ipex_llm.functional.fast_layer_norm`."""
        return functional.fast_layer_norm(hidden_states, normalized_shape, weight, bias, eps)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Normalize ``[..., *normalized_shape]``."""
        arguments: Any = (self.normalized_shape, self.weight, self.bias, self.eps)
        return functional.fast_layer_norm(hidden_states, *arguments)

    def extra_repr(self) -> str:
        """Return shape and eps."""
        return f"{self.normalized_shape}, eps={self.eps}"


# -- Rotary embedding with its own tables -----------------------------------------------------------------------------


_OP = "RotaryEmbedding"
#: Other names of the kinds of `rope_tables`.
_SYNONYMS = {"su": "longrope", "mrope": "default", "none": "default"}


class RotaryEmbedding(nn.Module):
    """Rotates the heads of a tensor by the angle of their position.

    The tables are float32 whatever the dtype of the model.

    Args:
        max_position_embeddings: Positions of the tables; they grow when a call names a longer ``seq_len``.
        pos_embd_dim: Elements of a head that are rotated.
        base: Base of the geometric series of frequencies.
        backbone: Name of the model's architecture; not needed, since ``extra_rope_config`` says it all.
        extra_rope_config: The ``rope_scaling`` (``rope_parameters``) entry of a Hugging Face configuration: the kind
            under ``rope_type`` (or ``type``) and its parameters; see `ipex_core.nn.rope`. Without a kind it follows
            from the parameters: ``short_factor`` and ``long_factor`` are LongRoPE's, ``low_freq_factor`` is Llama 3's.
            ``rope_ratio`` multiplies the base.

    Raises:
        TypeError: ``backbone`` is not a string, or ``extra_rope_config`` not a dictionary.
        ValueError: The kind is unknown, a parameter is missing, or a size is not positive.

    Example:
        >>> rope = RotaryEmbedding(2048, 64, backbone="GPTJForCausalLM")
        >>> query = torch.randn(1, 32, 16, 256)
        >>> rope(query, torch.arange(32).unsqueeze(0), 16, 256, 1, 64).shape
        torch.Size([1, 32, 16, 256])
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(
        self,
        max_position_embeddings: int,
        pos_embd_dim: int,
        base: float = 10000,
        backbone: str | None = None,
        extra_rope_config: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if backbone is not None and not isinstance(backbone, str):
            raise TypeError(f"{_OP}: backbone must be a string, got {type(backbone).__name__}")
        if extra_rope_config is not None and not isinstance(extra_rope_config, Mapping):
            kind = type(extra_rope_config).__name__
            raise TypeError(f"{_OP}: extra_rope_config must be a dictionary, got {kind}")
        scaling = dict(extra_rope_config or {})
        for name in ("rope_scaling", "rope_parameters"):  # a whole configuration
            scaling.update(scaling.pop(name, None) or {})
        positions = max_position_embeddings
        check(positions > 0, _OP, "max_position_embeddings", "be positive", positions)
        self.max_position_embeddings = max_position_embeddings
        self.pos_embd_dim = pos_embd_dim
        self.base = float(scaling.get("rope_theta") or base) * float(scaling.get("rope_ratio") or 1)
        self.backbone = backbone
        self.scaling = scaling
        self.kind = _kind(scaling)
        # Not buffers: a conversion of the model to a 16-bit type would round the tables.
        self.__dict__["_tables"] = {}
        self._table(1)

    def _original(self) -> float:
        """Return the length up to which LongRoPE takes its short factors."""
        return self.scaling.get("original_max_position_embeddings") or self.max_position_embeddings

    def _table(self, length: int) -> tuple[Tensor, Tensor]:
        """Return sines and cosines for sequences of a length."""
        tables: dict[Any, tuple[Tensor, Tensor]] = self.__dict__["_tables"]
        longest = max(length, self.max_position_embeddings)
        # What the frequencies depend on, beside the arguments of the constructor.
        key: Any = None
        if self.kind == "longrope":
            key = length > self._original()
        elif self.kind == "dynamic":
            key = longest
        found = tables.get(key)
        have = 0 if found is None else found[0].shape[0]
        if found is None or have < length:
            rows = int(self._original()) if key is False else max(longest, 2 * have)
            cos, sin = rope_tables(
                *(self.kind, self.pos_embd_dim, rows, self.base, self.scaling),
                max_position_embeddings=self.max_position_embeddings,
            )
            if self.kind == "dynamic":
                tables.clear()  # each length has its own
            found = tables[key] = (sin, cos)
        return found

    def _length(self, position_ids: Tensor, seq_len: int | None) -> int:
        """Return the length that the tables are chosen by."""
        if seq_len is not None:
            return int(seq_len)
        if self.kind in ("longrope", "dynamic"):
            return int(position_ids.max()) + 1 if position_ids.numel() else 1
        return 1  # any table will do

    @classmethod
    def apply_function(
        cls,
        query: Tensor,
        key: Tensor,
        sin: Tensor,
        cos: Tensor,
        rotary_dim: int,
        rotary_half: bool,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Call `ipex_llm.functional.rotary_embedding`, which works in place."""
        return functional.rotary_embedding(
            query, key, sin, cos, rotary_dim, rotary_half, position_ids
        )

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor,
        num_head: int,
        head_dim: int,
        offset: int,
        rotary_ndims: int,
        seq_len: int | None = None,
        num_concats: int | None = None,
    ) -> Any:
        """Rotate heads, or the queries and keys of a fused projection.

        Args:
            x: ``[batch, positions, num_head, head_dim]``, or with its last dimensions in one. With ``num_concats``:
                ``[batch, positions, (num_head + 2 * kv_heads) * head_dim]``, queries, keys, values.
            position_ids: ``[batch, positions]`` or ``[1, positions]``, integers; or a single number, the position of
                the first.
            num_head: Heads of ``x``, or of the queries.
            head_dim: Elements of a head.
            offset: Distance of the elements of a pair: 1 (GPT-J) or ``rotary_ndims / 2`` (GPT-NeoX, Llama).
            rotary_ndims: Elements of a head that are rotated, ``pos_embd_dim``.
            seq_len: Length of the sequence with its history; LongRoPE and dynamic scaling choose their frequencies by
                it. None: the largest position + 1.
            num_concats: Not None: ``x`` is a fused projection.

        Returns:
            A new tensor ``[batch, positions, num_head, head_dim]``; with ``num_concats`` ``(query, key, value)``, the
            last a view of ``x``.

        Raises:
            OpArgumentError: A size does not fit.
            RuntimeError: A position has no row in the tables, or a dtype does not fit.
        """
        half = rotary_ndims // 2
        text = f"be {self.pos_embd_dim}, the pos_embd_dim of the module"
        check(rotary_ndims == self.pos_embd_dim, _OP, "rotary_ndims", text, rotary_ndims)
        check(offset in (1, half), _OP, "offset", f"be 1 or rotary_ndims / 2 = {half}", offset)
        check(x.dim() in (3, 4), _OP, "x", "be 3-D or 4-D", f"{x.dim()}-D")
        batch, positions = x.shape[:2]
        width = x.shape[2:].numel()
        if position_ids.numel() == 1 and positions != 1:
            steps = torch.arange(positions, device=x.device)
            position_ids = position_ids.reshape(1).to(steps.dtype) + steps
        sin, cos = (t.to(x.device) for t in self._table(self._length(position_ids, seq_len)))
        rotate = torch.ops.ipex.rotary_embedding_functional
        arguments = (sin, cos, rotary_ndims, offset != 1 or half == 1, position_ids)
        if num_concats is None:
            text = f"have num_head * head_dim = {num_head * head_dim} elements per position"
            check(width == num_head * head_dim, _OP, "x", text, width)
            heads = x.reshape(batch, positions, num_head, head_dim)
            y: Tensor = rotate(heads, heads[:, :, :0], *arguments)[0]
            return y
        rest = width - num_head * head_dim
        check(
            rest > 0 and rest % (2 * head_dim) == 0,
            *(
                _OP,
                "x",
                f"hold {num_head} heads of {head_dim} elements, then as many keys as values",
            ),
            f"{width} elements per position",
        )
        kv_heads = rest // (2 * head_dim)
        heads = x.reshape(batch, positions, num_head + 2 * kv_heads, head_dim)
        query, key, value = heads.split([num_head, kv_heads, kv_heads], 2)
        query, key = rotate(query, key, *arguments)
        return query, key, value

    def extra_repr(self) -> str:
        """Return the kind and sizes."""
        return f"{self.max_position_embeddings}, {self.pos_embd_dim}, base={self.base}, {self.kind}"


def _kind(scaling: Mapping[str, Any]) -> str:
    name = scaling.get("rope_type") or scaling.get("type")
    if name is None:
        if "long_factor" in scaling or "short_factor" in scaling:
            name = "longrope"
        elif "low_freq_factor" in scaling:
            name = "llama3"
        else:
            name = "default"
    return _SYNONYMS.get(str(name), str(name))


# -- The parts of a Mamba layer ---------------------------------------------------------------------------------------


class MambaMixer:
    """The convolution and the recurrence of selective state space models.

    There is nothing to make: these are functions.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    causal_conv1d_fn = staticmethod(state_space.causal_conv1d_fn)
    causal_conv1d_update = staticmethod(state_space.causal_conv1d_update)
    selective_scan_fn = staticmethod(state_space.selective_scan_fn)
    selective_state_update = staticmethod(state_space.selective_state_update)

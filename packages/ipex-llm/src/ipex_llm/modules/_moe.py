# SPDX-License-Identifier: Apache-2.0
"""A mixture of gated MLPs, and the quantized weights that it takes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ipex_core.library.spec import FLOATS, check
from ipex_core.nn.moe import PackedExperts, gated_mlp_moe, pack_experts, pack_woq_experts
from ipex_llm.modules._norm import as_parameter
from ipex_llm.modules.utils import IPEXRuntimeCustomOps

_OP = "GatedMLPMOE"
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

_P = ParamSpec("_P")
_T = TypeVar("_T")


def _activation_may_come_first(forward: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let a method accept its tenth and eleventh argument, a bias and the activation, in the other order.

    That was the signature for XPU.
    """

    @functools.wraps(forward)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        plain: Any = args
        if len(plain) > 10 and isinstance(plain[10], str):
            if len(plain) > 11:
                kwargs["e_score_correction_bias"] = plain[11]
            kwargs["activation"] = plain[10]
            plain = plain[:10]
        return forward(*plain, **kwargs)

    return call


def from_eight_bits(name: str, weight: Tensor, scale: Tensor | None) -> Tensor:
    """Return a stack of weights as bfloat16, times a scale for each of them."""
    check(weight.dtype in FP8, _OP, name, "have 8-bit floats where scales are given", weight.dtype)
    if scale is None:
        return weight.to(torch.bfloat16)
    experts = weight.shape[0]
    text = f"have {experts} numbers, one for each expert"
    check(scale.numel() == experts, _OP, f"scales of {name}", text, list(scale.shape))
    return (weight.float() * scale.float().view(experts, 1, 1)).to(torch.bfloat16)


def from_four_bits(
    w13: Tensor, w2: Tensor, scales: tuple[Tensor | None, Tensor | None], is_mxfp4: bool
) -> PackedExperts:
    """Return packed experts of two codes per byte, the even column in the low nibble.

    Args:
        w13: uint8 ``[E, 2 I, H / 2]``, or the same bytes as int32 ``[E, 2 I, H / 8]``.
        w2: uint8 ``[E, H, I / 2]``, or int32.
        scales: ``[E, 2 I, G]`` and ``[E, H, G']``. MXFP4: one e8m0 byte for 32 columns; int4: floats, groups of equal
            size.
        is_mxfp4: Codes are e2m1 floats; else integers whose zero is 8.

    Raises:
        OpArgumentError: A shape or dtype is another one.
    """
    codes, groups, columns = [], [], []
    for name, weight, scale in (("W13", w13, scales[0]), ("W2", w2, scales[1])):
        good = weight.dtype in (torch.uint8, torch.int32) and weight.dim() == 3
        check(good, _OP, name, "be 3-D and uint8 or int32 for 4-bit weights", weight.dtype)
        code = weight.contiguous().view(torch.uint8)
        text = f"have shape [{code.shape[0]}, {code.shape[1]}, groups] for 4-bit weights"
        good = scale is not None and scale.dim() == 3 and scale.shape[:2] == code.shape[:2]
        check(good, _OP, f"scales of {name}", text, None if scale is None else list(scale.shape))
        assert scale is not None
        codes.append(code)
        columns.append(2 * code.shape[2])
        groups.append(scale.view(torch.uint8) if scale.dtype.itemsize == 1 else scale)
    fits = codes[1].shape[0] == codes[0].shape[0] and codes[0].shape[1] == 2 * columns[1]
    text = f"have shape [E, H, I / 2] for W13 of shape {list(codes[0].shape)} in bytes"
    check(fits and codes[1].shape[1] == columns[0], _OP, "W2", text, list(codes[1].shape))
    size = 32 if is_mxfp4 else columns[0] // max(groups[0].shape[2], 1)
    for name, scale, width in zip(("W13", "W2"), groups, columns, strict=True):
        text = f"have {-(-width // size)} groups of {size} columns"
        check(scale.shape[2] * size == width, _OP, f"scales of {name}", text, scale.shape[2])
    if is_mxfp4:
        bytes_only = all(scale.dtype == torch.uint8 for scale in groups)
        check(bytes_only, _OP, "scales", "be e8m0 bytes for MXFP4", groups[0].dtype)
    return pack_woq_experts(
        (codes[0], codes[1]),
        (groups[0], groups[1]),
        format="fp4" if is_mxfp4 else "int4",
        in_features=(columns[0], columns[1]),
        group_size=size,
    )


Routing = Callable[..., tuple[Tensor, Tensor]]


class GatedMLPMOE(nn.Module):
    """Experts that are gated MLPs, ``W2 @ (act(W1 @ x) * (W3 @ x))``, for the tokens routed to them.

    The weights are packed at the first call that needs no gradient, in evaluation mode, and exist only once: packed.
    Reading ``W13``, ``W2`` or ``W3`` then, or a state dict, unpacks them exactly. Weights of 4 bits are packed at once
    and stay so, as the buffers ``w13_packed`` and ``w2_packed``; they cannot be trained.

    Args:
        W13: ``[E, 2 I, H]``, the rows of the gate first; or, with ``W3``, the rows of the gate only, ``[E, I, H]``.
        W2: ``[E, H, I]``.
        W3: ``[E, I, H]``, or None.
        use_prepack: Pack the weights. False: keep them as they are and compute each expert with stock operations.
        w1_scale_inv: Values of 1 in ``W13`` (and ``W3``). 8-bit floats: ``[E]``; the weights become bfloat16. 4 bits:
            ``[E, 2 I, groups]``.
        w2_scale_inv: The same for ``W2``.
        a1_scale_inv: Scales of activations in 8 bits, which are not needed: activations stay as they are.
        a2_scale_inv: The same for the second product.
        w13_bias: ``[E, 2 I]`` or None.
        w2_bias: ``[E, H]`` or None.
        is_mxfp4: The weights are e2m1 floats, two per byte, the even column in the low nibble: uint8
            ``[E, 2 I, H / 2]`` and ``[E, H, I / 2]``, or those bytes as int32. The scales are e8m0 bytes, one for 32
            columns.
        is_fp8: Not needed: the dtype of the weights says it.
        is_int4: The weights are integers whose zero is 8, stored like that; the scales are floats, for groups of any
            one size that `torch.ops.ipex.pack_woq_weight` takes.
        experts_start_id: Id of the first of these experts, where other processes have others.

    Raises:
        OpArgumentError: The shapes or dtypes of the weights do not fit.
    """

    runtime_ops = IPEXRuntimeCustomOps()

    def __init__(
        self,
        W13: Tensor,
        W2: Tensor,
        W3: Tensor | None = None,
        use_prepack: bool = True,
        w1_scale_inv: Tensor | None = None,
        w2_scale_inv: Tensor | None = None,
        a1_scale_inv: Tensor | None = None,
        a2_scale_inv: Tensor | None = None,
        w13_bias: Tensor | None = None,
        w2_bias: Tensor | None = None,
        is_mxfp4: bool = False,
        is_fp8: bool = False,
        is_int4: bool = False,
        experts_start_id: int = 0,
    ) -> None:
        super().__init__()
        packed = None
        self._eight_bits = not (is_mxfp4 or is_int4) and (
            w1_scale_inv is not None or w2_scale_inv is not None or W2.dtype in FP8
        )
        given: dict[str, Tensor | None] = dict.fromkeys(("W13", "W2", "W3"))
        if is_mxfp4 or is_int4:
            check(W3 is None, _OP, "W3", "be None for 4-bit weights: its rows are in W13", "others")
            packed = from_four_bits(W13, W2, (w1_scale_inv, w2_scale_inv), is_mxfp4)
            sizes = W2.shape[0], W2.shape[1], packed.intermediate_size
        else:
            if self._eight_bits:
                W13 = from_eight_bits("W13", W13, w1_scale_inv)
                W2 = from_eight_bits("W2", W2, w2_scale_inv)
                W3 = None if W3 is None else from_eight_bits("W3", W3, w1_scale_inv)
            sizes = _check_weights(W13, W2, W3)
            given = {"W13": W13, "W2": W2, "W3": W3}
        experts, hidden, size = sizes
        biases = {"w13_bias": (w13_bias, 2 * size), "w2_bias": (w2_bias, hidden)}
        for name, (value, width) in biases.items():
            if value is not None:
                text = f"have shape {[experts, width]} for these weights"
                check(list(value.shape) == [experts, width], _OP, name, text, list(value.shape))
        check(experts_start_id >= 0, _OP, "experts_start_id", "not be negative", experts_start_id)
        self.use_prepack = use_prepack
        self.experts_start_id = experts_start_id
        self.num_experts, self.hidden_size, self.intermediate_size = experts, hidden, size
        for name, value in {**given, "w13_bias": w13_bias, "w2_bias": w2_bias}.items():
            self.register_parameter(name, None if value is None else as_parameter(value))
        # Those of 4 bits stay packed: the state dict has them as they are.
        self.register_buffer("w13_packed", None if packed is None else packed.w13)
        self.register_buffer("w2_packed", None if packed is None else packed.w2)
        self._forget()

    # -- the packed form ----------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.__dict__["_packed"] = None
        self.__dict__["_dtype"] = None

    def init_on_device(self, x: Tensor, op_type: object = None) -> None:
        """Pack the weights now instead of at the first call."""
        if self.use_prepack:
            self._pack()

    @torch.no_grad()
    def _pack(self) -> None:
        p = self._parameters
        if self._packed is not None or p["W13"] is None or p["W2"] is None:
            return
        w13, w2 = p["W13"], p["W2"]
        packed = pack_experts(w13, w2, p["W3"])
        self.__dict__["_dtype"] = w2.dtype
        self.__dict__["_grads"] = w13.requires_grad
        self.__dict__["_separate"] = p["W3"] is not None
        self.__dict__["_packed"] = packed
        for name in ("W13", "W2", "W3"):
            self._parameters.pop(name)

    @torch.no_grad()
    def _unpacked(self) -> dict[str, Tensor | None]:
        packed: PackedExperts = self._packed
        size, hidden = self.intermediate_size, self.hidden_size
        unpack = torch.ops.ipex.unpack_moe_weight
        w13 = unpack(packed.w13, 2 * size, hidden, self._dtype, True)
        w2 = unpack(packed.w2, hidden, size, self._dtype)
        if self._separate:
            return {"W13": w13[:, :size].contiguous(), "W2": w2, "W3": w13[:, size:].contiguous()}
        return {"W13": w13, "W2": w2, "W3": None}

    def _unpack(self) -> None:
        """Return to plain parameters; the next call packs again."""
        if self._packed is None:
            return
        plain = self._unpacked()
        self._forget()  # first: only then the names are free
        for name, value in plain.items():
            parameter = None if value is None else nn.Parameter(value, self._grads)
            self.register_parameter(name, parameter)

    def __getattr__(self, name: str) -> Any:
        if name in ("W13", "W2", "W3") and self.__dict__.get("_packed") is not None:
            return self._unpacked()[name]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._packed is not None:
            for name, value in self._unpacked().items():
                if value is not None:
                    destination[prefix + name] = value

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._unpack()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._unpack()
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> GatedMLPMOE:
        """Set the mode; the weights are parameters again in training mode."""
        if mode:
            self._unpack()
        return super().train(mode)

    # -- the computation ----------------------------------------------------------------------------------------------

    @_activation_may_come_first
    def forward(
        self,
        hidden_states: Tensor,
        use_grouped_topk: bool,
        top_k: int,
        router_logits: Tensor,
        renormalize: bool,
        topk_group: int | None = None,
        num_expert_group: int | None = None,
        custom_routing_function: Routing | None = None,
        scoring_func: str = "softmax",
        e_score_correction_bias: Tensor | None = None,
        activation: str = "silu",
    ) -> Tensor:
        """Route each token to ``top_k`` experts and return the weighted sum of their results.

        Args:
            hidden_states: ``[..., H]`` in the dtype of the weights; with weights of 4 or 8 bits in any float dtype.
            use_grouped_topk: Choose groups of experts first.
            top_k: Experts per token.
            router_logits: ``[tokens, number of all experts]``.
            renormalize: Make the weights of a token sum to 1.
            topk_group: Groups that a token's experts come from.
            num_expert_group: Number of groups.
            custom_routing_function: Called as ``f(hidden_states=, gating_output=, topk=, renormalize=)`` for weights
                and ids, ``[tokens, top_k]``.
            scoring_func: ``"softmax"`` or ``"sigmoid"``.
            e_score_correction_bias: ``[number of all experts]``, added to the scores for the choice only.
            activation: Of the gate: ``"silu"``, ``"gelu"`` or ``"gelu_tanh"``; with weights of 4 bits also
                ``"swigluoai"``. It may stand before ``e_score_correction_bias``, as on IPEX for XPU.

        Returns:
            A tensor like ``hidden_states``.

        Raises:
            OpArgumentError: Groups are asked for, but not how many; the activation is unknown; or ``hidden_states`` has
                another dtype or size than the weights.
            RuntimeError: For other wrong dtypes or shapes, or a ``top_k`` or groups that do not fit the experts.
        """
        if use_grouped_topk:
            for name, value in (("topk_group", topk_group), ("num_expert_group", num_expert_group)):
                check(value is not None, _OP, name, "be given with use_grouped_topk", None)
        known = ["silu", "gelu", "gelu_tanh"]
        if self.w2_packed is not None:
            known.append("swigluoai")
        check(activation in known, _OP, "activation", f"be one of {', '.join(known)}", activation)
        features = hidden_states.shape[-1]
        text = f"have {self.hidden_size} features"
        check(features == self.hidden_size, _OP, "hidden_states", text, features)
        states = hidden_states
        if self.w2_packed is None:
            dtype = self.W2.dtype if self._packed is None else self._dtype
            if self._eight_bits and states.dtype in FLOATS:
                states = states.to(dtype)
            text = f"have dtype {dtype} of the weights"
            check(states.dtype == dtype, _OP, "hidden_states", text, states.dtype)
        if self._must_be_plain(states):
            self._unpack()
            x = states.reshape(-1, self.hidden_size)
            if custom_routing_function is None:
                custom_routing_function = _routing(
                    *(use_grouped_topk, num_expert_group, topk_group, scoring_func),
                    e_score_correction_bias,
                )
            weights, ids = custom_routing_function(
                hidden_states=x, gating_output=router_logits, topk=top_k, renormalize=renormalize
            )
            result = self._plain(x, weights, ids, activation).view(hidden_states.shape)
            return result.to(hidden_states.dtype)
        self._pack()
        w13, w2 = self.w13_packed, self.w2_packed
        if w2 is None:
            w13, w2 = self._packed.w13, self._packed.w2
        experts = PackedExperts(w13, w2, self.intermediate_size, self.w13_bias, self.w2_bias)
        result = gated_mlp_moe(
            *(states, experts, router_logits, top_k, renormalize),
            use_grouped_topk=use_grouped_topk,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            custom_routing_function=custom_routing_function,
            scoring_func=scoring_func,
            e_score_correction_bias=e_score_correction_bias,
            activation=activation,
            experts_start_id=self.experts_start_id,
        )
        return result.to(hidden_states.dtype)

    def _must_be_plain(self, x: Tensor) -> bool:
        if self.w2_packed is not None:
            return False
        if self.training or not self.use_prepack:
            return True
        if self._packed is None:
            if torch.compiler.is_compiling() or self.W2.dtype not in FLOATS:
                return True
            learns = any(p.requires_grad for p in self.parameters())
        else:
            learns = self._grads
        return torch.is_grad_enabled() and (x.requires_grad or learns)

    def _plain(self, x: Tensor, weights: Tensor, ids: Tensor, activation: str) -> Tensor:
        """Compute with stock operations, expert by expert."""
        y = torch.zeros_like(x)
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        w13, w13_bias = self.W13, self.w13_bias
        for e in range(self.num_experts):
            token, place = (ids == e + self.experts_start_id).nonzero(as_tuple=True)
            rows = x[token]
            both = functional.linear(rows, w13[e], None)
            if self.W3 is not None:
                both = torch.cat([both, functional.linear(rows, self.W3[e])], -1)
            if w13_bias is not None:
                both = both + w13_bias[e].to(both.dtype)
            gate, up = both.chunk(2, -1)
            if activation == "silu":
                gate = functional.silu(gate)
            else:
                gate = functional.gelu(gate, approximate=approximate)
            rows = functional.linear(gate * up, self.W2[e])
            if self.w2_bias is not None:
                rows = rows + self.w2_bias[e].to(rows.dtype)
            y = y.index_add(0, token, rows * weights[token, place, None].to(rows.dtype))
        return y

    def extra_repr(self) -> str:
        """Return the sizes."""
        sizes = f"hidden_size={self.hidden_size}, intermediate_size={self.intermediate_size}"
        return f"num_experts={self.num_experts}, {sizes}, packed={self._packed is not None}"


def _check_weights(w13: Tensor, w2: Tensor, w3: Tensor | None) -> tuple[int, int, int]:
    """Check that weights belong together; return the numbers of experts, features and features between."""
    check(w2.dim() == 3, _OP, "W2", "have shape [E, H, I]", list(w2.shape))
    experts, hidden, size = w2.shape
    rows = 2 * size if w3 is None else size
    for name, value, shape in (
        ("W13", w13, [experts, rows, hidden]),
        ("W3", w3, [experts, size, hidden]),
    ):
        if value is not None:
            text = f"have shape {shape} for W2 of shape {list(w2.shape)}"
            check(list(value.shape) == shape, _OP, name, text, list(value.shape))
            check(value.dtype == w2.dtype, _OP, name, f"have dtype {w2.dtype}", value.dtype)
    return experts, hidden, size


def _routing(
    grouped: bool,
    groups: int | None,
    topk_group: int | None,
    scoring_func: str,
    bias: Tensor | None,
) -> Routing:
    """Return the usual routing as a function; the op can be differentiated."""

    def route(
        hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool
    ) -> tuple[Tensor, Tensor]:
        weights, ids = torch.ops.ipex.moe_routing(
            *(gating_output, topk, renormalize, scoring_func),
            *((groups or 0, topk_group or 0) if grouped else (0, 0)),
            None if bias is None else bias.float(),  # it may have been cast with the model
        )
        return weights, ids

    return route

# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and other layers without a packed weight.

The norms and activations run ``torch.ops.ipex`` kernels where a kernel package has them and the stock op otherwise. All
layers with weights convert an input of another floating dtype to the dtype of a reduced weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional
from torch.nn.modules.transformer import _detect_is_causal_mask, _get_seq_len

from ipex_core.kernels.measured import stays_stock
from ipex_core.kernels.policy import prefer_ipex_bag
from ipex_core.library.spec import FLOATS
from ipex_core.module_swap.base import OptimizedModule, call, is_stand_in, record_call, stock_only
from ipex_core.module_swap.script import stock_forward
from ipex_core.nn.functional import layer_norm, rms_norm
from ipex_core.nn.torchscript import rms_norm as script_rms_norm
from ipex_core.nn.torchscript import scale_and_shift as script_scale_and_shift
from ipex_core.nn.torchscript import unfolded as script_unfolded


class OptimizedLayerNorm(OptimizedModule, nn.LayerNorm):
    """`torch.nn.LayerNorm`."""

    _stock = stock_forward(nn.LayerNorm)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize over the last dimensions."""
        if is_scripting():
            x = self._cast(input, self.weight) if self._dtype is not None else input
            return self._stock(x)
        else:
            return self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        parameters = self._parameters  # quicker than attributes, which a parametrization needs
        if "weight" in parameters and "bias" in parameters:
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.weight, self.bias
        x = self._cast(input, weight) if self._dtype is not None else input
        if stays_stock("layer_norm", x):
            return torch.layer_norm(x, self.normalized_shape, weight, bias, self.eps)
        if self._kernel and not stock_only(x):
            return layer_norm(x, weight, bias, self.eps)
        if is_stand_in(x):
            return record_call(self, x)
        return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class OptimizedRMSNorm(OptimizedModule, nn.RMSNorm):
    """`torch.nn.RMSNorm`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize over the last dimensions."""
        if is_scripting():
            x = self._cast(x, self.weight) if self._dtype is not None else x
            if self._kernel:
                return script_rms_norm(x, self.normalized_shape, self.weight, self.eps)  # type: ignore[arg-type]
            else:
                return functional.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        else:
            return self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        weight = self.weight
        x = self._cast(x, weight) if self._dtype is not None else x
        eps = self.eps
        if stays_stock("rms_norm", x):
            return torch.rms_norm(x, self.normalized_shape, weight, eps)
        if self._kernel and not stock_only(x):
            return rms_norm(x, weight, torch.finfo(x.dtype).eps if eps is None else eps)
        if is_stand_in(x):
            return record_call(self, x)
        return functional.rms_norm(x, self.normalized_shape, weight, eps)


class _Stock(OptimizedModule):
    """Layers that are the stock ones in the dtype of their weight."""

    if TYPE_CHECKING:
        weight: Any
        _stock: Any

    def forward(self, input: Tensor) -> Tensor:
        """Run the stock layer."""
        return self._stock(self._cast(input, self.weight))


class OptimizedGroupNorm(_Stock, nn.GroupNorm):
    """`torch.nn.GroupNorm`."""

    _stock = stock_forward(nn.GroupNorm)


class OptimizedPReLU(_Stock, nn.PReLU):
    """`torch.nn.PReLU`."""

    _stock = stock_forward(nn.PReLU)


def _takes(x: Tensor) -> bool:
    return not stock_only(x) and x.dtype in FLOATS and x.device.type == "cpu"


class _Activation(OptimizedModule):
    """Activations that a program of ``torch.jit.script`` has as the stock ones."""

    if TYPE_CHECKING:
        _stock: Any

    def forward(self, input: Tensor) -> Tensor:
        """Apply the activation."""
        if is_scripting():
            return self._stock(input)
        else:
            return self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        raise NotImplementedError


class OptimizedGELU(_Activation, nn.GELU):
    """`torch.nn.GELU`."""

    _stock = stock_forward(nn.GELU)

    def _run(self, input: Tensor) -> Tensor:
        if stays_stock("gelu:tanh" if self.approximate == "tanh" else "gelu:none", input):
            return torch._C._nn.gelu(input, approximate=self.approximate)
        if _takes(input):
            return call(torch.ops.ipex.gelu.default, input, self.approximate)
        return record_call(self, input) if is_stand_in(input) else self._stock(input)


class OptimizedSoftmax(_Activation, nn.Softmax):
    """`torch.nn.Softmax`."""

    _stock = stock_forward(nn.Softmax)

    def _run(self, input: Tensor) -> Tensor:
        dim = self.dim
        if dim == -1 and stays_stock("softmax", input):
            return input.softmax(-1)
        if _takes(input) and dim is not None and dim in (-1, input.dim() - 1):
            return call(torch.ops.ipex.softmax.default, input)
        return record_call(self, input) if is_stand_in(input) else self._stock(input)


class OptimizedEmbeddingBag(OptimizedModule, nn.EmbeddingBag):
    """`torch.nn.EmbeddingBag`; the mean by our op, sums by the stock one, which is as fast as the memory."""

    _stock = stock_forward(nn.EmbeddingBag)

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return the sum or the mean of the rows of each bag."""
        if is_scripting():
            if per_sample_weights is not None:
                per_sample_weights = self._cast(per_sample_weights, self.weight)
            return self._stock(input, offsets, per_sample_weights)
        else:
            return self._run(input, offsets, per_sample_weights)

    def _run(
        self, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> Tensor:
        if is_stand_in(input):
            return record_call(self, input, offsets, per_sample_weights)
        weight = self.weight
        if per_sample_weights is not None:
            per_sample_weights = self._cast(per_sample_weights, weight)
        if per_sample_weights is not None or not self._fits(weight, input, offsets):
            return super().forward(input, offsets, per_sample_weights)
        last = self.include_last_offset
        if offsets is None:
            count, size = input.shape
            offsets = torch.arange(count, dtype=input.dtype, device=input.device) * size
            input, last = input.reshape(-1), False
        bags: Tensor = call(
            torch.ops.ipex.merged_embeddingbag_forward.default,
            [weight],
            [input],
            [offsets],
            [],
            self.mode,
            last,
        )
        return bags[0]

    def _fits(self, weight: Tensor, input: Tensor, offsets: Tensor | None) -> bool:
        """Return whether our op takes the call; what is wrong or special goes to the stock op."""
        # The measured choice comes early: a small bag takes as long as the Python code around it.
        return (
            self._kernel
            and self.mode == "mean"
            and self.padding_idx is None
            and self.max_norm is None
            and input.dim() == (2 if offsets is None else 1)
            and (offsets is None or (offsets.dim() == 1 and offsets.dtype is input.dtype))
            and (offsets is not None or not self.include_last_offset)
            and prefer_ipex_bag(
                input.shape[0] if offsets is None else offsets.shape[0],
                input.numel(),
                self.embedding_dim,
                weight.dtype,
            )
            and not (torch.is_grad_enabled() and weight.requires_grad)
            and _takes(weight)
            and not stock_only(input)
        )


class OptimizedMultiheadAttention(OptimizedModule, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` that takes activations of any floating dtype."""

    _stock = stock_forward(nn.MultiheadAttention)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend in the dtype of the weights."""
        weight = self.out_proj.weight
        if is_scripting():
            return self._stock(
                self._cast(query, weight),
                self._cast(key, weight),
                self._cast(value, weight),
                key_padding_mask,
                need_weights,
                attn_mask,
                average_attn_weights,
                is_causal,
            )
        else:
            rest = (key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
            return self._run(query, key, value, *rest)

    def _run(self, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
        if is_stand_in(query):
            return record_call(self, query, key, value, *args)
        weight = self.out_proj.weight
        same = key is query and value is query
        query = self._cast(query, weight)
        if same:  # the stock code recognizes self-attention by identity
            return super().forward(query, query, query, *args)
        return super().forward(query, self._cast(key, weight), self._cast(value, weight), *args)


class _FoldedBatchNorm(OptimizedModule):
    """A batch norm whose arithmetic has moved into the layer before it."""

    if TYPE_CHECKING:  # an annotation would be read by `torch.jit.script`
        _folded_into: nn.Module
        running_mean: Any
        running_var: Any
        weight: Any
        bias: Any
        eps: float
    _linear = False
    __constants__: ClassVar[list[str]] = ["_linear"]

    def __prepare_scriptable__(self) -> OptimizedModule:
        """Get ready for ``torch.jit.script``."""
        self.__dict__["_linear"] = isinstance(self._folded_into, nn.Linear)
        return super().__prepare_scriptable__()

    def refold(self) -> None:
        """Give the layer before this one the present scale and shift."""
        from ipex_core.module_swap.state_dict import realize, revert, state_of

        state = state_of(self._folded_into)
        if state is not None and state.fold is not None:
            revert(self._folded_into)
            state.fold = scale_and_shift(self)
            realize(self._folded_into)

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        if self.training:
            raise RuntimeError(
                "optimize: a batch norm that is folded into the layer before it must be in inference mode, got training"
                " mode: call ipex.restore(model) before training"
            )
        if is_scripting():
            if self._linear:
                return script_unfolded(
                    input, self.running_mean, self.running_var, self.weight, self.bias, self.eps
                )
            else:
                return input
        else:
            return self._run(input)

    def _run(self, input: Tensor) -> Tensor:
        if is_stand_in(input):
            return record_call(self, input)
        if isinstance(self._folded_into, nn.Linear) and input.dim() > 2:
            # Channels are dimension 1 here, but the fold scaled the last one: take it back and normalize.
            scale, shift = scale_and_shift(self)
            plain = ((input.float() - shift) / scale).to(input.dtype)
            return self._stock(plain)
        return input

    def _stock(self, x: Tensor) -> Tensor:
        return super().forward(x)


def scale_and_shift(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the per-channel ``(scale, shift)`` of an inference batch norm in float32."""
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    mean, variance = module.running_mean, module.running_var
    assert mean is not None and variance is not None
    with torch.no_grad():
        return script_scale_and_shift(mean, variance, module.weight, module.bias, module.eps)


class FoldedBatchNorm1d(_FoldedBatchNorm, nn.BatchNorm1d):
    """`torch.nn.BatchNorm1d` folded into the layer before it."""


class FoldedBatchNorm2d(_FoldedBatchNorm, nn.BatchNorm2d):
    """`torch.nn.BatchNorm2d` folded into the layer before it."""


class FoldedBatchNorm3d(_FoldedBatchNorm, nn.BatchNorm3d):
    """`torch.nn.BatchNorm3d` folded into the layer before it."""


class _IdentityDropout(OptimizedModule, nn.Identity):
    """A dropout that costs nothing in inference; in training it still drops.

    It is an `nn.Identity` for scripts that look for what `replace_dropout_with_identity` made, and stays a dropout for
    those that look for their own class.
    """

    if TYPE_CHECKING:
        _stock: Any

    def forward(self, input: Tensor) -> Tensor:
        """Return the input."""
        return self._stock(input) if self.training else input


class OptimizedDropout(_IdentityDropout, nn.Dropout):
    """`torch.nn.Dropout`."""

    _stock = stock_forward(nn.Dropout)


class OptimizedDropout1d(_IdentityDropout, nn.Dropout1d):
    """`torch.nn.Dropout1d`."""

    _stock = stock_forward(nn.Dropout1d)


class OptimizedDropout2d(_IdentityDropout, nn.Dropout2d):
    """`torch.nn.Dropout2d`."""

    _stock = stock_forward(nn.Dropout2d)


class OptimizedDropout3d(_IdentityDropout, nn.Dropout3d):
    """`torch.nn.Dropout3d`."""

    _stock = stock_forward(nn.Dropout3d)


class OptimizedAlphaDropout(_IdentityDropout, nn.AlphaDropout):
    """`torch.nn.AlphaDropout`."""

    _stock = stock_forward(nn.AlphaDropout)


class OptimizedFeatureAlphaDropout(_IdentityDropout, nn.FeatureAlphaDropout):
    """`torch.nn.FeatureAlphaDropout`."""

    _stock = stock_forward(nn.FeatureAlphaDropout)


#: Dropout classes and what replaces them.
IDENTITY_DROPOUTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: OptimizedDropout,
    nn.Dropout1d: OptimizedDropout1d,
    nn.Dropout2d: OptimizedDropout2d,
    nn.Dropout3d: OptimizedDropout3d,
    nn.AlphaDropout: OptimizedAlphaDropout,
    nn.FeatureAlphaDropout: OptimizedFeatureAlphaDropout,
}


class FrozenBatchNorm2d(nn.Module):
    """`torch.nn.BatchNorm2d` whose statistics and parameters are constants.

    All four vectors are buffers, so that nothing trains them; the input gets its gradient. In a model that is cast to
    bfloat16 or float16 the buffers may stay float32.

    Args:
        num_features: Channels of the input.
        eps: Added to the variance.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features = num_features
        self.eps = eps
        self.register_buffer("weight", torch.ones(num_features))
        self.register_buffer("bias", torch.zeros(num_features))
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_var", torch.ones(num_features))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A checkpoint of nn.BatchNorm2d has a counter that means nothing here.
        state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``x [N, C, H, W]``, float32, bfloat16 or float16; the result has its dtype and memory format."""
        return torch.ops.ipex.frozen_batch_norm(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps
        )

    def extra_repr(self) -> str:
        """Return the size and eps."""
        return f"{self.num_features}, eps={self.eps}"


# --- encoders ---------------------------------------------------------------------------------------------------------


class OptimizedTransformerEncoderLayer(OptimizedModule, nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer`."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Run attention and feed-forward, each with its sum and norm."""
        if is_scripting():
            return self._parts(src, src_mask, src_key_padding_mask, is_causal)
        else:
            if is_stand_in(src):
                return record_call(self, src, src_mask, src_key_padding_mask, is_causal)
            if src.is_nested:
                return super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return self._parts(src, src_mask, src_key_padding_mask, is_causal)

    def _parts(
        self,
        src: Tensor,
        src_mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        padding = functional._canonical_mask(
            src_key_padding_mask,
            "src_key_padding_mask",
            functional._none_or_dtype(src_mask),
            "src_mask",
            src.dtype,
        )
        mask = functional._canonical_mask(src_mask, "src_mask", None, "", src.dtype, False)
        x = src
        if self.norm_first:
            x = x + self._sa_block(self.norm1(x), mask, padding, is_causal)
            x = x + self._ff_block(self.norm2(x))
        else:
            x = self.norm1(x + self._sa_block(x, mask, padding, is_causal))
            x = self.norm2(x + self._ff_block(x))
        return x


class OptimizedTransformerEncoder(OptimizedModule, nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`; where the stock one skips padding, its results are zero here, too."""

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run the layers one after the other."""
        if is_scripting():
            return self._layers(src, mask, src_key_padding_mask, is_causal, True)
        else:
            if is_stand_in(src):
                return record_call(self, src, mask, src_key_padding_mask, is_causal)
            if src.is_nested:
                return super().forward(src, mask, src_key_padding_mask, is_causal)
            skips = not (
                torch.is_grad_enabled()
                and (src.requires_grad or any(p.requires_grad for p in self.parameters()))
            ) and not (self.mask_check and torch.compiler.is_compiling())
            return self._layers(src, mask, src_key_padding_mask, is_causal, skips)

    def _layers(
        self,
        src: Tensor,
        mask: Tensor | None,
        src_key_padding_mask: Tensor | None,
        is_causal: bool | None,
        skips: bool,
    ) -> Tensor:
        padding = functional._canonical_mask(
            src_key_padding_mask,
            "src_key_padding_mask",
            functional._none_or_dtype(mask),
            "mask",
            src.dtype,
        )
        mask = functional._canonical_mask(mask, "mask", None, "", src.dtype, False)
        length = _get_seq_len(src, self.layers[0].self_attn.batch_first)
        causal = _detect_is_causal_mask(mask, is_causal, length)
        output = src
        for layer in self.layers:
            output = layer(output, src_mask=mask, is_causal=causal, src_key_padding_mask=padding)
        if skips and self.use_nested_tensor and mask is None and padding is not None:
            real = padding.logical_not()
            if src.dim() == 3 and (
                not self.mask_check or torch._nested_tensor_from_mask_left_aligned(src, real)
            ):
                output = output.masked_fill(padding.to(torch.bool).unsqueeze(-1), 0.0)
        if self.norm is not None:
            output = self.norm(output)
        return output

# SPDX-License-Identifier: Apache-2.0
"""Wrong arguments: the native kernels raise RuntimeError with the text of the Python checks."""

from __future__ import annotations

import itertools

import pytest
import refusals
import torch
from torch.utils._pytree import tree_map_only

import ipex_core  # noqa: F401
from ipex_core.errors import OpArgumentError
from ipex_core.library.kernels import specs

ops = torch.ops.ipex
X = torch.ones(3, 8)
W = torch.ones(8)
PACKED = ops.pack_linear_weight(torch.ones(5, 8))
IDS = torch.tensor([4, 0])
Q = torch.ones(1, 2, 3, 8)


def bad_calls():
    yield "rms_norm", (X.double(), None), "x must have dtype"
    yield "rms_norm", (X.int(), None), "x must have dtype"
    yield "rms_norm", (torch.tensor(1.0), None), "at least 1 dimension"
    yield (
        "rms_norm",
        (X, torch.ones(7)),
        "weight must be 1-D of size x.shape\\[-1\\] = 8, got \\[7\\]",
    )
    yield "rms_norm", (X, torch.ones(3, 8)), "weight must be 1-D"
    yield "rms_norm", (X, W.double()), "weight must have the dtype"
    yield "rms_norm", (X.bfloat16(), W.half()), "weight must have the dtype"
    yield "add_rms_norm", (X, torch.ones(3, 9), W), "residual must have the shape"
    yield "add_rms_norm", (X, X.bfloat16(), W), "residual must have the dtype"
    yield "layer_norm", (X, W, torch.ones(9)), "bias must be 1-D"
    yield "layer_norm", (X.long(), W, W), "x must have dtype"
    yield "add_layer_norm", (X, X[:2], W, W), "residual must have the shape"
    yield "gelu", (X, "sigmoid"), "approximate must be 'none' or 'tanh'"
    yield "gelu", (X.double(),), "x must have dtype"
    yield "gelu_mul", (X, X[:1]), "up must have the shape"
    yield "gelu_mul", (X, X, "no"), "approximate must be"
    yield "silu_mul", (X, X.half()), "up must have the dtype"
    yield "silu_mul", (X.bool(), X.bool()), "gate must have dtype"
    yield "softmax", (X, torch.ones(2, 8)), "mask must be broadcastable"
    yield "softmax", (X, torch.ones(3, 8, dtype=torch.int32)), "mask must have the dtype"
    yield "softmax", (X, torch.ones(1, 1, 3, 8)), "mask must be broadcastable"
    yield "linear", (X, torch.ones(5, 8), 5), "packed_weight must be"
    yield "linear", (X, PACKED, 6), "header"  # the same padded size
    yield "linear", (X, PACKED, 0), "out_features must be positive"
    yield "linear", (X, PACKED, -1), "out_features must be positive"
    yield "linear", (X.bfloat16(), PACKED, 5), "packed_weight must be"
    yield "linear", (X, PACKED, 5, torch.ones(4)), "bias must be 1-D"
    yield "linear", (X, PACKED, 5, torch.ones(5).half()), "bias must have the dtype"
    yield "linear", (X, PACKED, 5, None, torch.ones(3, 4)), "residual must have shape \\[3, 5\\]"
    yield "linear", (X, PACKED, 5, None, torch.ones(3, 5).half()), "residual must have the dtype"
    yield "linear", (X, PACKED, 5, None, None, "swish"), "activation must be one of"
    yield "linear", (X, torch.zeros_like(PACKED), 5), "header"
    yield "pack_linear_weight", (torch.ones(4),), "weight must be 2-D"
    yield "pack_linear_weight", (torch.ones(0, 4),), "not empty"
    yield "pack_linear_weight", (torch.ones(4, 4).int(),), "weight must have dtype"
    yield "unpack_linear_weight", (PACKED, 5, 9, torch.float32), "packed must be"
    yield "unpack_linear_weight", (PACKED, 5, 8, torch.int8), "dtype must be"
    yield "unpack_linear_weight", (PACKED, 0, 8, torch.float32), "out_features must be positive"
    yield "packed_embedding", (PACKED, IDS, 5, 8, torch.int8), "dtype must be"
    yield "packed_embedding", (PACKED, IDS, 5, 0, torch.float32), "embedding_dim must be positive"
    yield "packed_embedding", (PACKED, IDS, 0, 8, torch.float32), "num_embeddings must be positive"
    yield "packed_embedding", (PACKED, IDS, 5, 9, torch.float32), "packed must be"
    yield "packed_embedding", (PACKED, IDS, 6, 8, torch.float32), "header"  # the same padded size
    yield "packed_embedding", (PACKED, IDS.float(), 5, 8, torch.float32), "ids must have dtype"
    yield (
        "packed_embedding",
        (PACKED, IDS + 1, 5, 8, torch.float32),
        "ids must hold rows in \\[0, 5",
    )
    yield "packed_embedding", (PACKED, IDS - 1, 5, 8, torch.float32), "ids must hold rows in .* -1"
    yield "attention", (Q[0], Q, Q), "query must be 4-D"
    yield "attention", (Q, Q[..., :4], Q[..., :4]), "key must have shape"
    yield "attention", (Q, Q, Q[:, :, :2]), "value must have the shape"
    yield "attention", (Q, Q.half(), Q), "key must have the dtype"
    yield "attention", (torch.ones(1, 3, 3, 8), Q, Q), "heads that divides"
    yield "attention", (Q, Q, Q, torch.ones(4, 3)), "mask must be broadcastable"
    yield "attention", (Q, Q, Q, torch.ones(3, 3).int()), "mask must have dtype"

    def adam(beta1=0.9, beta2=0.999, eps=1e-8):
        states = [torch.zeros(3, 8) for _ in range(2)]
        return X.clone(), *states, None, X, None, False, 1.0, beta1, beta2, 0.1, 0.0, eps

    nan = float("nan")
    yield "adam_fused_step", adam(beta1=1.5), "beta1 must be from 0 to below 1, got 1.5"
    yield "adam_fused_step", adam(beta2=1.0), "beta2 must be from 0 to below 1, got 1"
    yield "adam_fused_step", adam(beta2=-0.1), "beta2 must be from 0 to below 1, got -0.1"
    yield "adam_fused_step", adam(beta1=nan), "beta1 must be from 0 to below 1, got nan"
    yield "adam_fused_step", adam(eps=-1e-8), "eps must not be negative, got -1e-08"
    lamb, numbers = adam(), (1, 0.9, 1.5, 0.1, 0.0, 1e-8)
    yield "lamb_fused_step", (*lamb[:3], X, None, *numbers), "beta2 must be from 0 to below 1"
    adagrad = (X.clone(), X, X.clone(), None, 1.0, 0.1, 0.0, 0.0)
    yield "adagrad_fused_step", (*adagrad, -1.0), "eps must not be negative, got -1"
    lars = (X.clone(), X, None, None, 0.0, 0.1, 1e-3)
    yield "lars_fused_step", (*lars, nan, 0.0, 0.0, False), "eps must not be negative, got nan"


@refusals.each(bad_calls())
def test_bad_input(op, args, text):
    refusals.assert_refused(op, args, text)


@pytest.mark.parametrize("op", list(specs()))
def test_a_tensor_that_is_missing_is_named(op):
    """torch's dispatcher takes None for any tensor."""
    sample = next(iter(specs()[op].samples(specs()[op].dtypes[0])))
    if not isinstance(sample.args[0], torch.Tensor):
        pytest.skip("a list of tensors")
    name = specs()[op].op.default._schema.arguments[0].name
    with torch.no_grad(), pytest.raises(OpArgumentError, match=f"{op}: {name} must be a tensor"):
        specs()[op].op(None, *sample.args[1:], **sample.kwargs)


def test_bfloat16_and_float16_packings_are_told_apart():
    weight = torch.ones(32, 64)
    packed = ops.pack_linear_weight(weight.half())
    with pytest.raises(RuntimeError, match="packed_weight must be a bfloat16 weight"):
        ops.linear(torch.ones(2, 64, dtype=torch.bfloat16), packed, 32)


@pytest.mark.parametrize("op", [name for name, spec in specs().items()])
def test_meta_tensors(op):
    spec = specs()[op]
    sample = list(spec.samples(torch.bfloat16))[2]
    meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), sample.args)
    got, want = spec.op(*meta), spec.op(*sample.args)
    if spec.mutates and got is None:  # all results are in the arguments
        return
    for g, w in zip(*(o if isinstance(o, tuple) else (o,) for o in (got, want)), strict=True):
        assert g.is_meta
        assert g.shape == w.shape
        assert g.dtype == w.dtype


def tensor_arguments():
    """Yield (op, position) of each tensor argument; the sample has all optional ones."""
    for name in specs():
        sample = fullest(name)
        yield from (
            pytest.param(name, i, id=f"{name}-{i}")
            for i, value in enumerate(sample.args)
            if isinstance(value, torch.Tensor)
        )


def fullest(op):
    """Return the sample of an op with the most tensor arguments that are not empty."""

    def tensors(sample):
        given = [a for a in sample.args if isinstance(a, torch.Tensor)]
        return len(given) if all(a.numel() for a in given) else 0

    return max(specs()[op].samples(torch.float32), key=tensors)


def corrupted(op, position, change):
    args = list(fullest(op).args)
    args[position] = change(args[position])
    return args


ARGUMENTS = list(tensor_arguments())
ARGUMENTS_BUT_FIRST = [p for p in ARGUMENTS if p.values[1] > 0]


@pytest.mark.parametrize(("op", "position"), ARGUMENTS)
def test_wrong_dtype_of_each_argument(op, position):
    args = corrupted(op, position, lambda t: t.to(torch.int16))
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ must .*, got "):
        getattr(ops, op)(*args)


@pytest.mark.parametrize(("op", "position"), ARGUMENTS_BUT_FIRST)
def test_wrong_shape_of_each_argument(op, position):
    args = corrupted(op, position, lambda t: torch.ones(3, *t.shape, 3, dtype=t.dtype))
    with pytest.raises(RuntimeError, match=rf"^{op}: \w+ must .*, got "):
        getattr(ops, op)(*args)


@pytest.mark.parametrize(("op", "position"), ARGUMENTS_BUT_FIRST)
def test_wrong_device_of_each_argument(op, position):
    args = corrupted(op, position, lambda t: t.to("meta"))
    with pytest.raises(RuntimeError, match="device"):
        getattr(ops, op)(*args)


@pytest.mark.parametrize("op", ["pack_linear_weight", "unpack_linear_weight"])
def test_requires_grad_without_a_derivative_raises(op):
    if op == "unpack_linear_weight":
        assert not ops.unpack_linear_weight(PACKED, 5, 8, torch.float32).requires_grad
        return
    packed = ops.pack_linear_weight(torch.ones(4, 4, requires_grad=True))
    assert packed.dtype == torch.uint8  # bytes cannot carry a gradient
    assert not packed.requires_grad


@pytest.mark.parametrize("dtype", specs()["attention"].dtypes, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_attention_hides_no_bad_value(value, dtype, level):
    """A NaN or infinity in query, key or value reaches the rows that it reaches in the reference, and no other."""
    for keys, position in itertools.product((1, 3, 24, 300), range(3)):
        lengths = (24, keys, keys)
        tensors = [torch.randn(1, 2, length, 16).to(dtype) for length in lengths]
        tensors[position][0, 1, min(5, lengths[position] - 1), 3] = value
        got, want = ops.attention(*tensors), specs()["attention"].reference(*tensors)
        assert torch.equal(got.isfinite(), want.isfinite()), f"argument {position}, {keys} keys"

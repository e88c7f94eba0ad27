# SPDX-License-Identifier: Apache-2.0
"""Experts with weights of 4 bits, as clients hand them over."""

from __future__ import annotations

import pytest
import torch

from ipex_core.errors import OpArgumentError
from ipex_llm.modules import GatedMLPMOE

E, H, INNER, T = 4, 64, 96, 5
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def stack(rows: int, columns: int, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return bytes, scales and the weights that they stand for."""
    codes = torch.randint(0, 16, (E, rows, columns))
    bytes_ = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    groups = columns // 32
    if form == "mxfp4":
        scales = torch.randint(121, 125, (E, rows, groups), dtype=torch.uint8)
        values, wide = E2M1[codes], torch.exp2(scales.float() - 127)
    else:
        scales = torch.rand(E, rows, groups) / 16
        values, wide = codes.float() - 8, scales
    return bytes_, scales, values * wide.repeat_interleave(32, -1)


@pytest.mark.parametrize("form", ["mxfp4", "int4"])
def test_weights_of_four_bits(form: str) -> None:
    torch.manual_seed(0)
    (w13, s13, f13), (w2, s2, f2) = stack(2 * INNER, H, form), stack(H, INNER, form)
    biases = {"w13_bias": torch.randn(E, 2 * INNER), "w2_bias": torch.randn(E, H)}
    options = {"w1_scale_inv": s13, "w2_scale_inv": s2, f"is_{form}": True, **biases}
    module = GatedMLPMOE(w13, w2, **options)
    x, logits = torch.randn(T, H), torch.randn(T, E)
    expected = GatedMLPMOE(f13, f2, **biases, use_prepack=False)(x, False, 2, logits, True)
    torch.testing.assert_close(module(x, False, 2, logits, True), expected, rtol=1e-3, atol=1e-3)
    half = module(x.bfloat16(), False, 2, logits, True)
    assert torch.nn.functional.cosine_similarity(half.float(), expected).min() > 0.999
    words = GatedMLPMOE(w13.view(torch.int32), w2.view(torch.int32), **options)
    again = GatedMLPMOE(torch.zeros_like(w13), torch.zeros_like(w2), **options)
    again.load_state_dict(module.state_dict())
    for other in (words, again.eval().bfloat16().float()):
        result = other(x, False, 2, logits, True)
        torch.testing.assert_close(result, expected, rtol=2e-2, atol=5e-2)  # biases were bfloat16
    module(x, False, 2, logits, True, activation="swigluoai")
    module.init_on_device(x)
    assert set(module.state_dict()) == {"w13_bias", "w2_bias", "w13_packed", "w2_packed"}


def test_four_bits_that_do_not_fit() -> None:
    (w13, s13, _), (w2, s2, _) = stack(2 * INNER, H, "mxfp4"), stack(H, INNER, "mxfp4")
    for weights, scales, text in (
        ((w13.float(), w2), (s13, s2), "W13 must be 3-D and uint8 or int32"),
        ((w13, w2), (None, s2), r"scales of W13 must have shape \[4, 192, groups\]"),
        ((w13, w2), (s13[..., :1], s2), "scales of W13 must have 2 groups of 32 columns, got 1"),
        ((w13, w2), (s13.float(), s2), "scales must be e8m0 bytes"),
        ((w13, w2[:, :-1]), (s13, s2[:, :-1]), r"W2 must have shape \[E, H, I / 2\]"),
        ((w13, w2, w13), (s13, s2), "W3 must be None"),
    ):
        with pytest.raises(OpArgumentError, match="GatedMLPMOE: " + text):
            GatedMLPMOE(*weights, w1_scale_inv=scales[0], w2_scale_inv=scales[1], is_mxfp4=True)

# SPDX-License-Identifier: Apache-2.0
"""The tiny models that the other tests use are sound."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCAB, tokens


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_models_are_alike_and_independent(name: str) -> None:
    first, second = FAMILIES[name](), FAMILIES[name]()
    expected = first(tokens(2), use_cache=False).logits
    assert expected.shape == (2, 20, VOCAB)
    assert expected.isfinite().all()
    assert not first.training
    for parameter in first.parameters():
        parameter.zero_()
    torch.testing.assert_close(second(tokens(2), use_cache=False).logits, expected)

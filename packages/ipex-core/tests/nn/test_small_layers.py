# SPDX-License-Identifier: Apache-2.0
"""Scores of classifiers, a linear layer with its activation, the LSTM layer of IPEX's name. No kernels needed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ipex_core
from ipex_core import metrics
from ipex_core.nn.modules import IPEXLinearEltwise
from ipex_core.nn.utils._lstm_convert import _LSTM, replace_lstm_with_ipex_lstm


@pytest.mark.parametrize("levels", [2, 5, 10**6])
def test_roc_auc_counts_pairs(levels):
    generator = torch.Generator().manual_seed(levels)
    actual = torch.randint(0, 2, (200,), generator=generator)
    predicted = torch.randint(0, levels, (200,), generator=generator) / levels
    up, down = predicted[actual == 1], predicted[actual == 0]
    pairs = (up[:, None] > down).double() + (up[:, None] == down).double() / 2
    assert metrics.roc_auc_score(actual, predicted) == pytest.approx(float(pairs.mean()), abs=1e-12)


def test_scores_of_a_known_case():
    actual, predicted = torch.tensor([0.0, 0, 1, 1]), torch.tensor([0.1, 0.4, 0.35, 0.8])
    assert metrics.roc_auc_score(actual, predicted) == 0.75
    loss = -(math.log(0.9) + math.log(0.6) + math.log(0.35) + math.log(0.8)) / 4
    assert metrics.log_loss(actual, predicted) == pytest.approx(loss, rel=1e-6)
    assert metrics.accuracy_score(actual, predicted) == 0.75
    assert math.isfinite(metrics.log_loss(actual, 1 - actual))


def test_scores_of_bad_input():
    labels = torch.tensor([0, 1, 1])
    with pytest.raises(ValueError, match="predicted must have as many elements as actual = 3, got"):
        metrics.roc_auc_score(labels, torch.rand(2))
    with pytest.raises(ValueError, match="actual must hold both classes, got 3 positive of 3"):
        metrics.roc_auc_score(torch.ones(3), torch.rand(3))
    with pytest.raises(ValueError, match="actual must hold 0 and 1, got 2"):
        metrics.log_loss(labels * 2, torch.rand(3))
    with pytest.raises(ValueError, match="predicted must not hold NaN, got 1"):
        metrics.accuracy_score(labels, torch.tensor([0.5, float("nan"), 0.1]))
    with pytest.raises(ValueError, match="actual must not be empty"):
        metrics.roc_auc_score(labels[:0], torch.rand(0))
    with pytest.raises(TypeError, match="predicted must be a tensor, got list"):
        metrics.roc_auc_score(labels, [0.1])


@pytest.mark.parametrize("optimized", [False, True])
@pytest.mark.parametrize("eltwise", ["relu", "sigmoid"])
def test_linear_eltwise(eltwise, optimized):
    torch.manual_seed(0)
    linear = nn.Linear(32, 48).eval()
    x = torch.randn(6, 32)
    want = getattr(torch, eltwise)(linear(x)).detach()
    layer = IPEXLinearEltwise(ipex_core.optimize(linear) if optimized else linear, eltwise)
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    other = x.clone().requires_grad_()
    getattr(torch, eltwise)(linear(other)).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-4)
    assert eltwise in repr(layer)


def test_linear_eltwise_bad_input():
    with pytest.raises(TypeError, match="ipex_linear_module must be a linear layer, got ReLU"):
        IPEXLinearEltwise(nn.ReLU())
    with pytest.raises(ValueError, match="eltwise must be 'relu' or 'sigmoid', got 'gelu'"):
        IPEXLinearEltwise(nn.Linear(2, 2), "gelu")


def test_lstm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LSTM(5, 4, num_layers=2, dropout=0.5, bidirectional=True, batch_first=True)
    ).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 6, 5)
    packed = pack_padded_sequence(
        x, torch.tensor([6, 2, 4]), batch_first=True, enforce_sorted=False
    )
    want, (h, _) = model(x)
    long, _ = pad_packed_sequence(model(packed)[0], batch_first=True)
    names = list(model.state_dict())
    replace_lstm_with_ipex_lstm(model, optimizer)
    assert type(model[0]) is _LSTM
    assert list(model.state_dict()) == names
    got, (state, _) = model(x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, h)
    torch.testing.assert_close(pad_packed_sequence(model(packed)[0], batch_first=True)[0], long)
    assert model(x.bfloat16())[0].dtype == torch.float32  # stock refuses another dtype
    model.train()
    torch.manual_seed(1)
    first = model(x)[0]
    torch.manual_seed(2)
    assert not torch.equal(first, model(x)[0])  # dropout draws
    before = [p.clone() for p in model.parameters()]
    model(x)[0].sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

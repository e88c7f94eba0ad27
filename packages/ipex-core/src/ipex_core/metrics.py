# SPDX-License-Identifier: Apache-2.0
"""Scores of binary classifiers, for recommendation models."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["accuracy_score", "log_loss", "roc_auc_score"]


def _pair(name: str, actual: Tensor, predicted: Tensor) -> tuple[Tensor, Tensor]:
    for argument, value in (("actual", actual), ("predicted", predicted)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(value).__name__}")
    if actual.numel() != predicted.numel():
        raise ValueError(
            f"{name}: predicted must have as many elements as actual = {actual.numel()}, got {predicted.numel()}"
        )
    if actual.numel() == 0:
        raise ValueError(f"{name}: actual must not be empty, got shape {list(actual.shape)}")
    labels, values = actual.detach().flatten(), predicted.detach().flatten().double()
    wrong = (labels != 0) & (labels != 1)
    if bool(wrong.any()):
        raise ValueError(f"{name}: actual must hold 0 and 1, got {labels[wrong][0].item():g}")
    if bool(values.isnan().any()):
        raise ValueError(f"{name}: predicted must not hold NaN, got {int(values.isnan().sum())}")
    return labels != 0, values


def roc_auc_score(actual: Tensor, predicted: Tensor) -> float:
    """Return the area under the receiver operating characteristic.

    It is the probability that a positive example has a higher prediction than a negative one, a tie counting as half:
    what ``sklearn.metrics.roc_auc_score`` returns.

    Args:
        actual: Labels 0 and 1, any shape and dtype.
        predicted: As many scores, any floating dtype.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: The sizes differ, ``actual`` holds other numbers or one class only, or ``predicted`` holds NaN.
    """
    positive, values = _pair("roc_auc_score", actual, predicted)
    ups = int(positive.sum())
    downs = positive.numel() - ups
    if not ups or not downs:
        raise ValueError(
            f"roc_auc_score: actual must hold both classes, got {ups} positive of {ups + downs}"
        )
    _, places, counts = values.unique(return_inverse=True, return_counts=True)
    # Equal predictions share the mean of their ranks.
    ranks = counts.cumsum(0).double() - (counts - 1) / 2
    total = float(ranks[places][positive].sum())
    return (total - ups * (ups + 1) / 2) / (ups * downs)


def log_loss(actual: Tensor, predicted: Tensor) -> float:
    """Return the mean negative logarithm of the probability that was given to the true class.

    Args:
        actual: Labels 0 and 1, any shape and dtype.
        predicted: As many probabilities of class 1; they are kept off 0 and 1 by the epsilon of float64.

    Raises:
        TypeError: As `roc_auc_score`.
        ValueError: As `roc_auc_score`, but one class is enough.
    """
    positive, values = _pair("log_loss", actual, predicted)
    eps = torch.finfo(torch.float64).eps
    values = values.clamp(eps, 1 - eps)
    return float(-torch.where(positive, values, 1 - values).log().mean())


def accuracy_score(actual: Tensor, predicted: Tensor) -> float:
    """Return the share of examples whose prediction, rounded to 0 or 1, is the label.

    Args:
        actual: Labels 0 and 1, any shape and dtype.
        predicted: As many probabilities of class 1.

    Raises:
        TypeError: As `log_loss`.
        ValueError: As `log_loss`.
    """
    positive, values = _pair("accuracy_score", actual, predicted)
    return float(((values.round() != 0) == positive).double().mean())

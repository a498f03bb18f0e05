"""Losses of predicted numbers: squared, absolute and Huber error, each the mean over all elements.

predictions: [batch, values]. targets: the same shape, or [batch] if there is one value. Predictions of 16 bits are
computed with in fp32. Each loss raises ValueError for other shapes, which torch would broadcast. The mean over ranks is
the loss of the global batch if all have as many rows.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from scaletrain_cli.engine.losses.classification import full_precision


def mean_squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of e^2, where e is prediction less target; a scalar in squared units of the targets."""
    return F.mse_loss(*_alike("mse", predictions, targets))


def mean_absolute_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """Return the mean of |e|, where e is prediction less target; a scalar in units of the targets."""
    return F.l1_loss(*_alike("mae", predictions, targets))


def huber(predictions: Tensor, targets: Tensor, delta: float = 1.0) -> Tensor:
    """Return the mean of e^2 / 2 where |e| <= delta, and of delta (|e| - delta / 2) elsewhere; a scalar.

    Huber, Robust Estimation of a Location Parameter (1964), equation 2. ``delta`` is in units of the targets.
    """
    return F.huber_loss(*_alike("huber", predictions, targets), delta=delta)


def _alike(name: str, predictions: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    predictions = full_precision(predictions)
    if targets.dim() == 1 and predictions.shape == (len(targets), 1):
        targets = targets.unsqueeze(1)
    if predictions.dim() != 2 or predictions.shape != targets.shape:
        raise ValueError(
            f"{name}: predictions {list(predictions.shape)} and targets {list(targets.shape)}; allowed are two tensors "
            f"[batch, values], or targets [batch] if there is one value"
        )
    return predictions, targets.to(predictions.dtype)

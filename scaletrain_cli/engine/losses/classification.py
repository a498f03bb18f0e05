"""Losses of class scores: cross-entropy and binary cross-entropy, in nats, with label smoothing and mixed targets.

Targets are classes, [batch] int64, or one number per class, [batch, classes]: the shares of a mixed image or its
labels. Smoothing by s turns the target t of one of C classes into (1 - s) t + s / C (arXiv:1512.00567, section 7): a
class becomes 1 - s + s / C and every other one s / C. Labels of which an image may have none or several are yes or no
each by itself: one of two classes, so that t becomes (1 - s) t + s / 2. Smoothing before mixing gives the same, so
targets that are given as numbers must not be smoothed yet. Logits of 16 bits are computed with in fp32.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the mean over the batch of -sum_c t_c log softmax(x)_c, a scalar in nats.

    logits: [batch, classes]. targets: [batch] int64, or [batch, classes] with the sum 1 in each row. Raises ValueError
    for other shapes. The mean over ranks is the loss of the global batch if all have as many rows.
    """
    logits = full_precision(logits)
    _check("cross_entropy", logits, targets)
    log_probabilities = F.log_softmax(logits, 1)
    if targets.dim() == 1:
        chosen = log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
    else:
        chosen = (log_probabilities * targets).sum(1)
    loss = -chosen.mean()
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * log_probabilities.mean()
    return loss


def binary_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    label_smoothing: float = 0.0,
    pos_weight: float | Sequence[float] | None = None,
    target_threshold: float | None = None,
    *,
    several_labels: bool = False,
) -> Tensor:
    """Return the mean over batch and classes of -[p t log sigmoid(x) + (1 - t) log(1 - sigmoid(x))], in nats.

    logits: [batch, classes]. targets: [batch] int64, or [batch, classes] from 0 to 1. ``pos_weight``: p, one number or
    one per class. ``target_threshold``: smoothed targets above it become 1 and all others 0 (arXiv:2110.00476, section
    3.1, trains with such targets). ``several_labels``: an image may have none or several of the classes, as it always
    may if there is one; smoothing adds s / 2 to each then, and s / ``classes`` otherwise. A sum over classes would be
    ``classes`` times as large, and so would its gradient. Raises ValueError for other shapes. The mean over ranks is
    the loss of the global batch if all have as many rows.
    """
    logits = full_precision(logits)
    _check("bce", logits, targets)
    classes = logits.shape[1]
    if targets.dim() == 1:
        targets = torch.zeros_like(logits).scatter(1, targets.unsqueeze(1), 1.0)
    targets = targets.to(logits.dtype)
    if label_smoothing:
        targets = (1 - label_smoothing) * targets + label_smoothing / (2 if several_labels else max(2, classes))
    if target_threshold is not None:
        targets = (targets > target_threshold).to(logits.dtype)
    weight = None if pos_weight is None else logits.new_tensor(pos_weight)
    if weight is not None and weight.dim() and len(weight) != classes:
        raise ValueError(f"bce: pos_weight has {len(weight)} numbers for {classes} classes")
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=weight)


def full_precision(x: Tensor) -> Tensor:
    """Return a tensor of 16 bits in fp32, and others as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check(name: str, logits: Tensor, targets: Tensor) -> None:
    classes = targets.dim() == 1 and len(targets) == len(logits) and not targets.is_floating_point()
    if logits.dim() != 2 or not (classes or targets.shape == logits.shape):
        raise ValueError(
            f"{name}: logits {list(logits.shape)} and targets {list(targets.shape)} {targets.dtype}; "
            f"allowed are [batch, classes] and targets [batch] of integers or [batch, classes]"
        )


# Losses of predicted numbers: squared, absolute and Huber error, each the mean over all elements.
#
# predictions: [batch, values]. targets: the same shape, or [batch] if there is one value. Predictions of 16 bits are
# computed with in fp32. Each loss raises ValueError for other shapes, which torch would broadcast. The mean over ranks
# is the loss of the global batch if all have as many rows.


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
